// The KV cache and attention of one layer on arrays, for tests/kernels/test_attention.py and
// bench/attention.py. The engine binds attention in bind_program.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <vector>

#include "kvloom/attention.hpp"
#include "kvloom/kv_write.hpp"
#include "kvloom/thread_team.hpp"

namespace nb = nanobind;

namespace kvloom {
namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Raw = Array<uint8_t, 2>;     // [num_blocks, block_bytes]
using Layers = Array<uint8_t, 3>;  // [num_layers, num_blocks, block_bytes]
using Queries = nb::ndarray<nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // bf16 bits or f32

void require(bool is_met, const char* what) {
  if (!is_met) throw nb::value_error(what);
}

KVFormat parse_format(const std::string& name) {
  if (name == "float32") return KVFormat::F32;
  if (name == "bfloat16") return KVFormat::BF16;
  if (name == "int8") return KVFormat::INT8;
  throw nb::value_error("the format must be float32, bfloat16 or int8");
}

// Where a step's tokens lie, as in AttentionMetadata.
struct StepArrays {
  Array<const int32_t, 1> query_start, seq_lens;
  Array<const int32_t, 2> block_table;

  AttentionStep checked(const KVLayout& layout, size_t num_blocks, size_t num_tokens) const {
    const size_t num_reqs = seq_lens.shape(0);
    require(query_start.shape(0) == num_reqs + 1 && block_table.shape(0) == num_reqs,
            "query_start, seq_lens and block_table must be of the same requests");
    require(query_start.data()[0] == 0 &&
                query_start.data()[num_reqs] == static_cast<int64_t>(num_tokens),
            "query_start must begin with 0 and end with the number of tokens");
    for (size_t i = 0; i < num_reqs; ++i) check_request(i, layout, num_blocks);
    return {static_cast<int>(num_reqs), query_start.data(), seq_lens.data(), block_table.data(),
            static_cast<int64_t>(block_table.shape(1))};
  }

 private:
  void check_request(size_t i, const KVLayout& layout, size_t num_blocks) const {
    const int64_t num_queries = int64_t{query_start.data()[i + 1]} - query_start.data()[i];
    const int64_t seq_len = seq_lens.data()[i];
    require(num_queries >= 0 && seq_len >= num_queries, "a request has fewer tokens than queries");
    const size_t used = static_cast<size_t>(cdiv(seq_len, layout.block_size));
    require(used <= block_table.shape(1), "block_table is too narrow for seq_lens");
    const int32_t* blocks = block_table.data() + i * block_table.shape(1);
    for (size_t b = 0; b < used; ++b) {
      require(blocks[b] >= 0 && static_cast<size_t>(blocks[b]) < num_blocks,
              "a block id is out of range");
    }
  }
};

// Where a step's tokens are stored.
struct StoredAt {
  Array<const int64_t, 1> positions, slots;
};

class AttentionLayer {
 public:
  AttentionLayer(const AttentionShape& shape, const AttentionLimits& limits)
      : shape_(shape),
        plan_(shape, limits),
        team_(limits.num_threads),
        states_(attention_states_floats(plan_)),
        scratch_(attention_scratch_bytes(shape) * static_cast<size_t>(limits.num_threads) +
                 kCacheLineBytes) {}

  size_t block_bytes() const { return shape_.layout.block_bytes(); }
  int num_items() const { return plan_.num_items(); }

  // As in QueryKeyForm and AttentionScoring.
  std::optional<Array<const float, 1>> q_norm, k_norm, v_norm, position_scales, sinks;
  float norm_eps = 0.0f;
  float q_scale = 1.0f;
  float soft_cap = 0.0f;
  bool is_interleaved = false;
  bool norms_follow_rope = false;
  int64_t offset_bytes = 0;  // of the layer's part of a block

  // qkv: columns q | k | v, q | row in a latent layout, or q alone, which stores nothing.
  void write(const Raw& raw, const Array<const float, 2>& qkv, const StoredAt& at,
             const Array<const float, 2>& rotations, const Queries& q) {
    KVWriteArgs args = {};
    args.layout = shape_.layout;
    args.storage = {checked_base(raw.data(), raw.shape(1)), static_cast<int64_t>(raw.shape(1))};
    args.num_heads = shape_.num_heads;
    args.num_tokens = static_cast<int>(qkv.shape(0));
    set_columns(qkv, &args);
    args.positions = at.positions.data();
    args.slots = at.slots.data();
    args.form = checked_form(rotations);
    args.q_out = checked_queries(q, qkv.shape(0));
    require(at.positions.shape(0) == qkv.shape(0) && at.slots.shape(0) == qkv.shape(0),
            "positions and slots must have one entry for each row of qkv");
    check_places(args, raw.shape(0), rotations.shape(0));
    nb::gil_scoped_release release;
    team_.run([&](int thread) noexcept {
      team_.for_each_item(thread, kv_write_num_items(args),
                          [&](int64_t item) { kv_write_run_item(args, static_cast<int>(item)); });
    });
  }

  // raw [num_layers, num_blocks, block_bytes]: each layer in turn writes out, [num_tokens,
  // num_heads * head_size_v] f32.
  void attend(const Layers& raw, const Queries& q, const StepArrays& step,
              const Array<float, 2>& out) {
    char* base = checked_base(raw.data(), raw.shape(2));
    const size_t width = static_cast<size_t>(shape_.num_heads * shape_.layout.head_size_v);
    require(out.shape(0) == q.shape(0) && out.shape(1) == width, "out has another shape");
    const void* queries = checked_queries(q, q.shape(0));
    plan_.build(step.checked(shape_.layout, raw.shape(1), q.shape(0)));
    const int64_t stride = static_cast<int64_t>(raw.shape(2));
    AttentionArgs args = {&plan_,
                          {nullptr, stride},
                          queries,
                          {out.data(), static_cast<int64_t>(width), false},
                          states_.data(),
                          aligned(scratch_.data()),
                          {soft_cap, nullptr}};
    if (sinks) {
      require(sinks->shape(0) == static_cast<size_t>(shape_.num_heads),
              "sinks: one per query head");
      args.scoring.sinks = sinks->data();
    }
    const int num_items = plan_.num_items();
    const size_t layer_bytes = raw.shape(1) * raw.shape(2);
    nb::gil_scoped_release release;
    team_.run([&](int thread) noexcept {
      AttentionArgs layer_args = args;
      for (size_t layer = 0; layer < raw.shape(0); ++layer) {
        layer_args.storage.base = base + layer * layer_bytes;
        team_.for_each_item(thread, num_items, [&](int64_t item) {
          const int index = static_cast<int>(item);
          const int next = index + 1 < num_items ? index + 1 : -1;
          attention_run_item(layer_args, index, next, thread);
        });
      }
    });
  }

 private:
  static char* aligned(char* memory) {
    const uintptr_t past = reinterpret_cast<uintptr_t>(memory) % kCacheLineBytes;
    return past == 0 ? memory : memory + (kCacheLineBytes - past);
  }

  // Of the layer's part of the first block.
  char* checked_base(uint8_t* raw, size_t stride) const {
    require(offset_bytes >= 0 && stride >= block_bytes() &&
                static_cast<size_t>(offset_bytes) <= stride - block_bytes(),
            "the rows of raw must hold a block");
    return reinterpret_cast<char*>(raw) + offset_bytes;
  }

  void* checked_queries(const Queries& q, size_t num_tokens) const {
    const bool is_bf16 = has_bf16_queries(shape_.layout.format);
    require(is_bf16 ? q.dtype() == nb::dtype<uint16_t>() : q.dtype() == nb::dtype<float>(),
            "q must be uint16 (bf16 bits) where keys are bf16, else float32");
    require(q.shape(0) == num_tokens && q.shape(1) == static_cast<size_t>(shape_.num_heads) &&
                q.shape(2) == static_cast<size_t>(shape_.layout.head_size),
            "q must be [num_tokens, num_heads, head_size]");
    return q.data();
  }

  void set_columns(const Array<const float, 2>& qkv, KVWriteArgs* args) const {
    const KVLayout& layout = shape_.layout;
    const int64_t q_width = int64_t{shape_.num_heads} * layout.head_size;
    const int64_t k_width = int64_t{layout.num_kv_heads} * layout.head_size;
    const int64_t v_width =
        layout.is_latent ? 0 : int64_t{layout.num_kv_heads} * layout.head_size_v;
    const int64_t stride = static_cast<int64_t>(qkv.shape(1));
    args->q = {qkv.data(), stride};
    if (stride == q_width) return;
    require(stride == q_width + k_width + v_width, "qkv has the wrong width");
    args->k = {qkv.data() + q_width, stride};
    if (v_width > 0) args->v = {qkv.data() + q_width + k_width, stride};
  }

  static const float* checked_norm(const std::optional<Array<const float, 1>>& norm, int size) {
    require(!norm || norm->shape(0) == static_cast<size_t>(size), "a norm must be of one head");
    return norm ? norm->data() : nullptr;
  }

  QueryKeyForm checked_form(const Array<const float, 2>& rotations) const {
    const KVLayout& layout = shape_.layout;
    QueryKeyForm form;
    form.rotations = rotations.data();
    form.num_pairs = static_cast<int>(rotations.shape(1) / 2);
    require(2 * form.num_pairs <= layout.head_size, "rotations are wider than a head");
    form.is_interleaved = is_interleaved;
    form.q_norm = checked_norm(q_norm, layout.head_size);
    form.k_norm = checked_norm(k_norm, layout.head_size);
    form.v_norm = checked_norm(v_norm, layout.head_size_v);
    form.norm_eps = norm_eps;
    form.norms_follow_rope = norms_follow_rope;
    form.q_scale = q_scale;
    form.position_scales = position_scales ? position_scales->data() : nullptr;
    return form;
  }

  void check_places(const KVWriteArgs& args, size_t num_blocks, size_t max_positions) const {
    const int64_t num_slots = static_cast<int64_t>(num_blocks) * shape_.layout.block_size;
    for (int i = 0; i < args.num_tokens; ++i) {
      const int64_t position = args.positions[i];
      require(position >= 0 &&
                  (args.form.num_pairs == 0 || position < static_cast<int64_t>(max_positions)) &&
                  (!position_scales || position < static_cast<int64_t>(position_scales->shape(0))),
              "a position is out of range");
      require(args.slots[i] >= -1 && args.slots[i] < num_slots, "a slot is out of range");
    }
  }

  AttentionShape shape_;
  AttentionPlan plan_;
  ThreadTeam team_;
  std::vector<float> states_;
  std::vector<char> scratch_;
};

AttentionShape checked_shape(const AttentionShape& shape) {
  if (const char* problem = shape.layout.problem()) throw nb::value_error(problem);
  require(shape.num_heads > 0 && shape.num_heads % shape.layout.num_kv_heads == 0,
          "num_heads must be a multiple of num_kv_heads");
  return shape;
}

}  // namespace

void bind_attention(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("attention");
  nb::class_<KVLayout>(module, "KVLayout")
      .def(
          "__init__",
          [](KVLayout* self, const std::string& format, int block_size, int num_kv_heads,
             int head_size, int head_size_v, bool is_latent) {
            new (self) KVLayout{parse_format(format), block_size, num_kv_heads, head_size,
                                head_size_v,          is_latent};
          },
          nb::arg("format"), nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("head_size"),
          nb::arg("head_size_v"), nb::arg("is_latent") = false)
      .def_prop_ro("problem", [](const KVLayout& layout) -> std::optional<std::string> {
        const char* problem = layout.problem();
        return problem == nullptr ? std::nullopt : std::optional<std::string>(problem);
      });
  nb::class_<StepArrays>(module, "AttentionStep")
      .def(nb::init<Array<const int32_t, 1>, Array<const int32_t, 1>, Array<const int32_t, 2>>(),
           nb::arg("query_start"), nb::arg("seq_lens"), nb::arg("block_table"));
  nb::class_<StoredAt>(module, "StoredAt")
      .def(nb::init<Array<const int64_t, 1>, Array<const int64_t, 1>>(), nb::arg("positions"),
           nb::arg("slots"));
  nb::class_<AttentionLayer>(module, "AttentionLayer")
      .def(
          "__init__",
          [](AttentionLayer* self, const KVLayout& layout, int num_heads, int num_threads,
             int max_model_len, int window, int chunk) {
            require(num_threads > 0 && num_threads <= 1024, "num_threads must be from 1 to 1024");
            require(max_model_len > 0, "max_model_len must be positive");
            require(window >= 0 && chunk >= 0, "window and chunk must not be negative");
            new (self) AttentionLayer(checked_shape({layout, num_heads, {window, chunk}}),
                                      {num_threads, max_model_len});
          },
          nb::arg("layout"), nb::arg("num_heads"), nb::arg("num_threads"), nb::arg("max_model_len"),
          nb::arg("window") = 0, nb::arg("chunk") = 0)
      .def_prop_ro("block_bytes", &AttentionLayer::block_bytes)
      .def_prop_ro("num_items", &AttentionLayer::num_items)
      .def_rw("q_norm", &AttentionLayer::q_norm, nb::arg("q_norm").none())
      .def_rw("k_norm", &AttentionLayer::k_norm, nb::arg("k_norm").none())
      .def_rw("v_norm", &AttentionLayer::v_norm, nb::arg("v_norm").none())
      .def_rw("position_scales", &AttentionLayer::position_scales, nb::arg("scales").none())
      .def_rw("sinks", &AttentionLayer::sinks, nb::arg("sinks").none())
      .def_rw("norm_eps", &AttentionLayer::norm_eps)
      .def_rw("q_scale", &AttentionLayer::q_scale)
      .def_rw("soft_cap", &AttentionLayer::soft_cap)
      .def_rw("is_interleaved", &AttentionLayer::is_interleaved)
      .def_rw("norms_follow_rope", &AttentionLayer::norms_follow_rope)
      .def_rw("offset_bytes", &AttentionLayer::offset_bytes)
      .def("write", &AttentionLayer::write, nb::arg("raw").noconvert(), nb::arg("qkv"),
           nb::arg("at"), nb::arg("rotations"), nb::arg("q").noconvert())
      .def("attend", &AttentionLayer::attend, nb::arg("raw").noconvert(), nb::arg("q").noconvert(),
           nb::arg("step"), nb::arg("out").noconvert());
}

}  // namespace kvloom
