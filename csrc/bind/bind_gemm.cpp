// Packing and GEMM on arrays, for tests/kernels/test_gemm.py and bench/kernels.py. The engine's own
// weights are in bind_program.cpp: it never crosses into Python per operation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/arena.hpp"
#include "kvloom/gemm.hpp"
#include "kvloom/pack_weights.hpp"
#include "kvloom/thread_team.hpp"

namespace nb = nanobind;

namespace kvloom {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool is_met, const char* message) {
  if (!is_met) throw nb::value_error(message);
}

template <class T>
struct Name {
  const char* name;
  T value;
};

template <class T, size_t kCount>
T named(const Name<T> (&names)[kCount], const std::string& name) {
  for (const Name<T>& candidate : names) {
    if (name == candidate.name) return candidate.value;
  }
  throw nb::value_error(("no such choice: " + name).c_str());
}

constexpr Name<Format> kFormats[] = {
    {"f32", Format::F32}, {"bf16", Format::BF16}, {"q8", Format::Q8}, {"q4", Format::Q4}};
constexpr Name<SourceFormat> kSourceFormats[] = {
    {"f32", SourceFormat::F32},   {"bf16", SourceFormat::BF16}, {"f16", SourceFormat::F16},
    {"q8_0", SourceFormat::Q8_0}, {"q4_0", SourceFormat::Q4_0}, {"q4_1", SourceFormat::Q4_1}};
constexpr Name<RowFormat> kRowFormats[] = {
    {"f32", RowFormat::F32}, {"bf16", RowFormat::BF16}, {"s8", RowFormat::S8}};
constexpr Name<Activation> kActivations[] = {
    {"silu", Activation::Silu}, {"gelu", Activation::Gelu}, {"gelu_tanh", Activation::GeluTanh}};
constexpr Name<EpilogueKind> kEpilogues[] = {{"store", EpilogueKind::Store},
                                             {"add", EpilogueKind::Add},
                                             {"best", EpilogueKind::Best},
                                             {"gated_store", EpilogueKind::GatedStore},
                                             {"gated_pack", EpilogueKind::GatedPack}};

std::string row_format_name(const std::string& weight_format, int num_rows) {
  const RowFormat format = row_format_for(named(kFormats, weight_format), num_rows);
  for (const auto& candidate : kRowFormats) {
    if (candidate.value == format) return candidate.name;
  }
  return "";
}

// A packed weight and its memory.
class GemmWeight {
 public:
  GemmWeight(const std::string& format, bool is_gate_up, int num_outputs, int num_inputs) {
    require(num_outputs > 0 && num_inputs > 0 && num_outputs < (1 << 24) && num_inputs < (1 << 24),
            "sizes are out of range");
    require(!is_gate_up || num_outputs % 2 == 0, "gate and up need an even number of outputs");
    view_.format = named(kFormats, format);
    view_.order = is_gate_up ? OutputOrder::GateUp : OutputOrder::Plain;
    view_.num_outputs = num_outputs;
    view_.num_inputs = num_inputs;
    memory_ = std::make_unique<Region>(
        packed_weight_bytes(view_.format, view_.order, num_outputs, num_inputs));
    view_.panels = memory_->data();
  }

  void pack(const std::string& source_format, int first_output, const Bytes& data) {
    WeightSource source;
    source.format = named(kSourceFormats, source_format);
    require(can_pack(source.format, view_.format), "this source has no exact form in this format");
    require(!is_block_format(source.format) || view_.num_inputs % kGroupInputs == 0,
            "blocks need a multiple of 32 inputs");
    const size_t row_bytes = source_row_bytes(source.format, view_.num_inputs);
    require(data.shape(0) % row_bytes == 0, "data must be whole rows");
    const size_t num_rows = data.shape(0) / row_bytes;
    require(first_output >= 0 && first_output <= view_.num_outputs &&
                num_rows <= static_cast<size_t>(view_.num_outputs - first_output),
            "rows are out of range");
    source.data = data.data();
    source.first_output = first_output;
    source.num_outputs = static_cast<int>(num_rows);
    pack_outputs(view_, source);
  }

  nb::bytes panels() const { return nb::bytes(memory_->data(), memory_->num_bytes()); }

  const PackedWeight& view() const { return view_; }
  size_t num_bytes() const { return memory_->num_bytes(); }

 private:
  PackedWeight view_;
  std::unique_ptr<Region> memory_;
};

// Packed rows and their memory.
struct RowBuffer {
  RowBuffer(RowFormat format, int num_rows, int num_inputs)
      : memory(packed_rows_bytes(format, num_rows, num_inputs)),
        view{format, num_rows, num_inputs, memory.data()} {}

  nb::bytes bytes() const { return nb::bytes(memory.data(), memory.num_bytes()); }

  Region memory;
  PackedRows view;
};

std::unique_ptr<RowBuffer> pack_array(const std::string& format, const Rows& x) {
  require(x.shape(0) < (1 << 24) && x.shape(1) > 0 && x.shape(1) < (1 << 24),
          "sizes are out of range");
  auto rows = std::make_unique<RowBuffer>(named(kRowFormats, format), static_cast<int>(x.shape(0)),
                                          static_cast<int>(x.shape(1)));
  for (int row = 0; row < rows->view.num_rows; ++row) {
    pack_row(rows->view, row, x.data() + x.shape(1) * static_cast<size_t>(row));
  }
  return rows;
}

// What one GEMM is asked to do; the defaults are those of Epilogue.
struct GemmOptions {
  std::string row_format;
  std::string epilogue = "store";
  std::string activation = "silu";
  std::optional<Vector> bias;
  int num_threads = 1;
  bool is_reversed = false;  // items in descending order: the order must not matter
};

Gemm checked_gemm(const GemmWeight& weight, const Rows& x, const GemmOptions& options) {
  Gemm gemm;
  gemm.weight = weight.view();
  require(static_cast<int>(x.shape(1)) == gemm.weight.num_inputs, "x must be [rows, num_inputs]");
  gemm.rows.format = named(kRowFormats, options.row_format);
  require(find_tile_functions(gemm.weight.format, gemm.rows.format) != nullptr,
          "rows of this format do not go with this weight");
  gemm.epilogue.kind = named(kEpilogues, options.epilogue);
  gemm.epilogue.activation = named(kActivations, options.activation);
  require(is_gated(gemm.epilogue.kind) == (gemm.weight.order == OutputOrder::GateUp),
          "a gated epilogue and a gate and up weight need each other");
  require(options.num_threads > 0 && options.num_threads < 1024, "num_threads is out of range");
  if (options.bias) {
    require(static_cast<int>(options.bias->shape(0)) == gemm.weight.num_outputs,
            "bias must be [num_outputs]");
    gemm.epilogue.bias = options.bias->data();
  }
  return gemm;
}

void run_items(const Gemm& gemm, const GemmOptions& options) {
  const GemmPlan plan = plan_gemm(gemm, options.num_threads);
  Region scratch(gemm_scratch_bytes(gemm.weight.format, gemm.weight.num_inputs));
  for (int i = 0; i < plan.num_items; ++i) {
    run_gemm_item(gemm, plan, options.is_reversed ? plan.num_items - 1 - i : i, scratch.data());
  }
}

void run_to_rows(const GemmWeight& weight, const Rows& x, const OutRows& out,
                 const GemmOptions& options) {
  Gemm gemm = checked_gemm(weight, x, options);
  require(gemm.epilogue.kind != EpilogueKind::GatedPack, "gated_pack returns packed rows");
  const int width = gemm.weight.num_outputs / (is_gated(gemm.epilogue.kind) ? 2 : 1);
  require(out.shape(0) == x.shape(0) && static_cast<int>(out.shape(1)) == width,
          "out must be [rows, outputs]");
  require(gemm.epilogue.kind != EpilogueKind::Best || width > 1, "best needs two outputs");
  const auto rows = pack_array(options.row_format, x);
  gemm.rows = rows->view;
  gemm.epilogue.out = out.data();
  gemm.epilogue.out_stride = out.shape(1);
  run_items(gemm, options);
}

nb::bytes run_to_packed(const GemmWeight& weight, const Rows& x, const std::string& packed_format,
                        const GemmOptions& options) {
  Gemm gemm = checked_gemm(weight, x, options);
  require(gemm.epilogue.kind == EpilogueKind::GatedPack, "only gated_pack returns packed rows");
  const auto rows = pack_array(options.row_format, x);
  gemm.rows = rows->view;
  const RowBuffer packed(named(kRowFormats, packed_format), gemm.rows.num_rows,
                         gemm.weight.num_outputs / 2);
  gemm.epilogue.packed = packed.view;
  run_items(gemm, options);
  return packed.bytes();
}

// The same rows times several weights, one after another on a thread team: a step's worth of work.
class GemmBench {
 public:
  GemmBench(std::vector<const GemmWeight*> weights, const Rows& x, const std::string& row_format,
            int num_threads)
      : rows_(pack_array(row_format, x)), team_(num_threads) {
    GemmOptions options;
    options.row_format = row_format;
    options.num_threads = num_threads;
    size_t scratch_bytes = 0;
    for (const GemmWeight* weight : weights) {
      Gemm gemm = checked_gemm(*weight, x, options);
      gemm.rows = rows_->view;
      outputs_.emplace_back(x.shape(0) * static_cast<size_t>(gemm.weight.num_outputs));
      gemm.epilogue.out = outputs_.back().data();
      gemm.epilogue.out_stride = static_cast<size_t>(gemm.weight.num_outputs);
      gemms_.push_back(gemm);
      plans_.push_back(plan_gemm(gemm, num_threads));
      scratch_bytes =
          std::max(scratch_bytes, gemm_scratch_bytes(gemm.weight.format, gemm.weight.num_inputs));
    }
    for (int i = 0; i < num_threads; ++i) {
      scratch_.push_back(std::make_unique<Region>(scratch_bytes));
    }
  }

  void run() {
    team_.run([&](int thread) noexcept {
      uint8_t* scratch = scratch_[static_cast<size_t>(thread)]->data();
      for (size_t i = 0; i < gemms_.size(); ++i) {
        team_.for_each_item(thread, plans_[i].num_items, [&](int64_t item) {
          run_gemm_item(gemms_[i], plans_[i], static_cast<int>(item), scratch);
        });
      }
    });
  }

 private:
  std::unique_ptr<RowBuffer> rows_;
  ThreadTeam team_;
  std::vector<Gemm> gemms_;
  std::vector<GemmPlan> plans_;
  std::vector<std::vector<float>> outputs_;
  std::vector<std::unique_ptr<Region>> scratch_;
};

// Independent dot products on registers alone: what the machine can do at most.
struct PeakBF16 {
  static constexpr int kOperations = 4 * kLanes;
  static KVLOOM_INLINE vf32 step(vf32 sum, vi32 a, vi32 b) { return dot_bf16(sum, a, b); }
};
struct PeakF32 {
  static constexpr int kOperations = 2 * kLanes;
  static KVLOOM_INLINE vf32 step(vf32 sum, vi32 a, vi32 b) {
    return fma(as_f32(a), as_f32(b), sum);
  }
};
struct PeakS8 {
  static constexpr int kOperations = 8 * kLanes;
  static KVLOOM_INLINE vf32 step(vf32 sum, vi32 a, vi32 b) {
    return as_f32(dot_u8s8(as_i32(sum), a, b));
  }
};

template <class Peak>
__attribute__((noinline)) double run_peak(int64_t num_steps, vi32 a, vi32 b) {
  constexpr int kSums = kNumRegisters == 32 ? 16 : 8;
  vf32 sums[kSums];
  KVLOOM_UNROLL
  for (int j = 0; j < kSums; ++j) sums[j] = to_f32(a + j);  // unlike, or they would become one
  for (int64_t i = 0; i < num_steps; ++i) {
    KVLOOM_UNROLL
    for (int j = 0; j < kSums; ++j) sums[j] = Peak::step(sums[j], a, b);
  }
  vf32 total = sums[0];
  KVLOOM_UNROLL
  for (int j = 1; j < kSums; ++j) total = total + sums[j];
  volatile float kept = reduce_add(total);  // or the loop would be dropped
  (void)kept;
  return static_cast<double>(num_steps) * kSums * Peak::kOperations;
}

// Returns the number of operations done.
double peak_operations(const std::string& format, int64_t num_steps) {
  volatile int32_t unknown = 0;  // to the compiler
  const vi32 zero = broadcast(unknown);
  if (format == "bf16") return run_peak<PeakBF16>(num_steps, zero, zero);
  if (format == "f32") return run_peak<PeakF32>(num_steps, zero, zero);
  if (format == "s8") return run_peak<PeakS8>(num_steps, zero, zero);
  throw nb::value_error("no such format");
}

// Reads an array once with a team of threads, for the memory's bandwidth. Returns something that
// depends on all of it.
int32_t read_all(const Bytes& data, int num_threads) {
  constexpr size_t kPieceBytes = 1 << 18;
  const int64_t num_pieces = static_cast<int64_t>(data.shape(0) / kPieceBytes);
  std::atomic<int32_t> total{0};
  ThreadTeam team(num_threads);
  team.run([&](int thread) noexcept {
    team.for_each_item(thread, num_pieces, [&](int64_t piece) {
      const uint8_t* from = data.data() + kPieceBytes * static_cast<size_t>(piece);
      vi32 bits = {};
      for (size_t i = 0; i < kPieceBytes; i += sizeof(bits)) bits = bits ^ load_i32(from + i);
      total ^= reduce_add(bits & 0xffff);
    });
  });
  return total;
}

}  // namespace

void bind_gemm(nb::module_& module) {
  nb::module_ gemm = module.def_submodule("gemm", "Packing and GEMM on arrays, for tests.");
  gemm.attr("max_tile_rows") = kMaxTileRows;
  gemm.def("row_format_for", &row_format_name);
  gemm.def("pack_rows",
           [](const std::string& format, const Rows& x) { return pack_array(format, x)->bytes(); });
  nb::class_<GemmWeight>(gemm, "GemmWeight")
      .def(nb::init<const std::string&, bool, int, int>())
      .def("pack", &GemmWeight::pack)
      .def("panels", &GemmWeight::panels)
      .def_prop_ro("num_bytes", &GemmWeight::num_bytes);
  nb::class_<GemmOptions>(gemm, "GemmOptions")
      .def(nb::init<>())
      .def_rw("row_format", &GemmOptions::row_format)
      .def_rw("epilogue", &GemmOptions::epilogue)
      .def_rw("activation", &GemmOptions::activation)
      .def_rw("bias", &GemmOptions::bias, nb::arg().none())
      .def_rw("num_threads", &GemmOptions::num_threads)
      .def_rw("is_reversed", &GemmOptions::is_reversed);
  gemm.def("run_to_rows", &run_to_rows);
  gemm.def("run_to_packed", &run_to_packed);
  nb::class_<GemmBench>(gemm, "GemmBench")
      .def(nb::init<std::vector<const GemmWeight*>, const Rows&, const std::string&, int>(),
           nb::keep_alive<1, 2>())
      .def("run", &GemmBench::run, nb::call_guard<nb::gil_scoped_release>());
  gemm.def("peak_operations", &peak_operations, nb::call_guard<nb::gil_scoped_release>());
  gemm.def("read_all", &read_all, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace kvloom
