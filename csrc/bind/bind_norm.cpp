// Norms, embedding and element-wise operations on arrays, for tests/kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "kvloom/embedding.hpp"
#include "kvloom/norm.hpp"
#include "kvloom/rowwise.hpp"
#include "kvloom/select_rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvloom {
namespace {

template <class T, size_t kDims>
using In = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <class T, size_t kDims>
using Out = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void check(bool is_right, const char* message) {
  if (!is_right) throw nb::value_error(message);
}

// Runs all items of a kernel.
template <class Args>
void run_items(int64_t num_items, const Args& args, void (*run_item)(const Args&, int64_t)) {
  nb::gil_scoped_release release;
  for (int64_t item = 0; item < num_items; ++item) run_item(args, item);
}

void rms_norm(In<float, 2> x, In<float, 1> weight, float eps, Out<float, 2> y) {
  const int64_t num_rows = static_cast<int64_t>(x.shape(0));
  const int64_t size = static_cast<int64_t>(x.shape(1));
  check(size > 0 && weight.shape(0) == x.shape(1) && y.shape(0) == x.shape(0) &&
            y.shape(1) == x.shape(1),
        "x and y must be [num_rows, size] and weight [size]");
  for (int64_t row = 0; row < num_rows; ++row) {
    rms_norm_row(x.data() + row * size, weight.data(), size, eps, y.data() + row * size);
  }
}

RowFormat row_format(const std::string& name) {
  if (name == "f32") return RowFormat::F32;
  if (name == "bf16") return RowFormat::BF16;
  if (name == "s8") return RowFormat::S8;
  throw nb::value_error("a row format is f32, bf16 or s8");
}

// Normalises rows and packs them as the next GEMM reads them; with eps None packs them as they are.
void pack_rows(In<float, 2> x, In<float, 1> weight, nb::object eps, const std::string& format,
               Out<uint8_t, 1> packed) {
  check(x.shape(0) > 0 && x.shape(0) < (1u << 20) && x.shape(1) > 0 && x.shape(1) < (1u << 20) &&
            weight.shape(0) == x.shape(1),
        "x must be [num_rows, size] and weight [size]");
  const int64_t size = static_cast<int64_t>(x.shape(1));
  const PackedRows rows{row_format(format), static_cast<int>(x.shape(0)), static_cast<int>(size),
                        packed.data()};
  check(packed.shape(0) == packed_rows_bytes(rows.format, rows.num_rows, rows.num_inputs),
        "packed does not have the bytes of these rows");
  const GroupRange all{0, num_groups(rows.num_inputs)};
  for (int tile = 0; tile < num_tiles(rows.num_rows); ++tile) {
    if (eps.is_none()) {
      pack_tile(rows, tile, all, x.data(), size);
    } else {
      const RmsNorm norm{weight.data(), size, nb::cast<float>(eps)};
      rms_norm_pack_tile(x.data(), size, norm, rows, tile, all);
    }
  }
}

Format weight_format(const std::string& name) {
  if (name == "f32") return Format::F32;
  if (name == "bf16") return Format::BF16;
  if (name == "q8") return Format::Q8;
  if (name == "q4") return Format::Q4;
  throw nb::value_error("a weight format is f32, bf16, q8 or q4");
}

// Token ids from first_row on are rows of a table [num_rows, size] in packed panels.
void embedding(const std::string& format, In<uint8_t, 1> panels, int num_rows, int64_t first_row,
               In<int32_t, 1> token_ids, Out<float, 2> out) {
  check(num_rows > 0 && num_rows < (1 << 24) && out.shape(1) > 0 && out.shape(1) < (1u << 20) &&
            out.shape(0) == token_ids.shape(0) && first_row >= 0,
        "out must be [num_tokens, size], with num_rows above 0");
  EmbeddingArgs args{};
  args.table.format = weight_format(format);
  args.table.num_outputs = num_rows;
  args.table.num_inputs = static_cast<int>(out.shape(1));
  // Kernels only read a table; its type serves those who pack it as well.
  args.table.panels = const_cast<uint8_t*>(panels.data());
  check(panels.shape(0) == packed_weight_bytes(args.table.format, args.table.order, num_rows,
                                               args.table.num_inputs),
        "panels do not have the bytes of this table");
  args.first_row = first_row;
  args.token_ids = token_ids.data();
  args.num_tokens = static_cast<int64_t>(token_ids.shape(0));
  args.out = out.data();
  args.out_stride = static_cast<int64_t>(out.shape(1));
  run_items(embedding_num_items(args), args, embedding_run_item);
}

void add(In<float, 1> a, In<float, 1> b, Out<float, 1> out) {
  check(a.shape(0) == out.shape(0) && b.shape(0) == out.shape(0), "lengths differ");
  const auto size = static_cast<int64_t>(out.shape(0));
  if (size > 0) map_run(MapKind::Add, a.data(), b.data(), false, size, out.data());
}

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu") return Activation::Gelu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  if (name == "swiglu_clamped") return Activation::SwigluClamped;
  throw nb::value_error("an activation is silu, gelu, gelu_tanh or swiglu_clamped");
}

void gated_activation(In<float, 2> x, const std::string& activation, Out<float, 2> out) {
  check(x.shape(0) == out.shape(0) && x.shape(1) == 2 * out.shape(1),
        "x must be [num_rows, 2 x size] and out [num_rows, size]");
  const int64_t size = static_cast<int64_t>(out.shape(1));
  const Activation kind = activation_named(activation);
  for (int64_t row = 0; row < static_cast<int64_t>(out.shape(0)) && size > 0; ++row) {
    const float* gate = x.data() + row * 2 * size;
    gated_run(kind, gate, gate + size, size, out.data() + row * size);
  }
}

void select_rows(In<float, 2> x, In<int32_t, 1> rows, Out<float, 2> out) {
  check(out.shape(0) == rows.shape(0) && out.shape(1) == x.shape(1),
        "out must be [len(rows), size]");
  for (size_t i = 0; i < rows.shape(0); ++i) {
    check(rows.data()[i] >= 0 && static_cast<size_t>(rows.data()[i]) < x.shape(0),
          "a row is outside x");
  }
  const int64_t size = static_cast<int64_t>(x.shape(1));
  const SelectRowsArgs args{x.data(), size,       rows.data(), static_cast<int64_t>(rows.shape(0)),
                            size,     out.data(), size};
  run_items(select_rows_num_items(args), args, select_rows_run_item);
}

}  // namespace

void bind_norm(nb::module_& module) {
  // noconvert: what is written to a converted copy would be lost.
  nb::module_ elementwise =
      module.def_submodule("elementwise", "Norms, embedding and so on on arrays, for tests.");
  elementwise.def("rms_norm", &rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a,
                  "y"_a.noconvert());
  elementwise.def("pack_rows", &pack_rows, "x"_a.noconvert(), "weight"_a.noconvert(),
                  "eps"_a.none(), "format"_a, "packed"_a.noconvert());
  elementwise.def("embedding", &embedding, "format"_a, "panels"_a.noconvert(), "num_rows"_a,
                  "first_row"_a, "token_ids"_a.noconvert(), "out"_a.noconvert());
  elementwise.def("add", &add, "a"_a.noconvert(), "b"_a.noconvert(), "out"_a.noconvert());
  elementwise.def("gated_activation", &gated_activation, "x"_a.noconvert(), "activation"_a,
                  "out"_a.noconvert());
  elementwise.def("select_rows", &select_rows, "x"_a.noconvert(), "rows"_a.noconvert(),
                  "out"_a.noconvert());
}

}  // namespace kvloom
