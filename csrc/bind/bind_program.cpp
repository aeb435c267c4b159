// Programs, packed weights and memory for Python; program_builder.hpp checks what comes in.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "build_rowwise.hpp"
#include "build_stacks.hpp"
#include "program_builder.hpp"

namespace kvloom {
namespace {

void bind_weights(nb::module_& module) {
  nb::class_<Weight>(module, "Weight")
      .def("pack", &Weight::pack, nb::arg("source_format"), nb::arg("rows").noconvert(),
           nb::arg("first_row"))
      .def_prop_ro("nbytes", &Weight::num_bytes)
      .def_prop_ro("format", &Weight::format_name)
      .def_prop_ro("num_outputs", [](const Weight& self) { return self.stack().first.num_outputs; })
      .def_prop_ro("num_inputs",
                   [](const Weight& weight) { return weight.stack().first.num_inputs; });
  nb::class_<WeightPool>(module, "WeightPool")
      .def(nb::init<>())
      .def("allocate", &WeightPool::allocate, nb::arg("format"), nb::arg("is_gated"),
           nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("num_matrices") = 1);
  module.def("allocate_bytes", &allocate_bytes, nb::arg("num_bytes"));
  module.def(
      "packed_row_bytes",
      [](const std::string& format, int64_t num_inputs) {
        const Format weight = named(kFormats, format);
        const int width = checked_size(num_inputs, "num_inputs is out of range");
        return std::max(packed_rows_bytes(row_format_for(weight, 1), 1, width),
                        packed_rows_bytes(row_format_for(weight, 1 << 20), 1, width));
      },
      nb::arg("format"), nb::arg("num_inputs"),
      "Most bytes of one row packed for a weight of this format.");
  module.def(
      "product_scratch_bytes",
      [](const std::string& format, int64_t num_inputs) {
        return gemm_scratch_bytes(named(kFormats, format),
                                  checked_size(num_inputs, "num_inputs is out of range"));
      },
      nb::arg("format"), nb::arg("num_inputs"),
      "Bytes each thread needs to multiply by a weight of this format.");
}

Screen* make_screen(ThreadTeam& team, const Weight& weight) {
  const PackedWeight& exact = weight.packed();
  if (exact.format != Format::BF16 || exact.order != OutputOrder::Plain) {
    throw nb::value_error("only plain BF16 weights are screened");
  }
  auto screen = std::make_unique<Screen>(exact);
  const int panels = num_panels(exact.order, exact.num_outputs);
  // Before the threads begin, where running out of memory is an error.
  const std::vector<float> row(static_cast<size_t>(padded_inputs(exact.num_inputs)));
  std::vector<std::vector<float>> rows(static_cast<size_t>(team.num_threads()), row);
  nb::gil_scoped_release unlocked;
  team.run([&](int thread) noexcept {
    team.for_each_item(thread, panels, [&](int64_t panel) {
      screen->make_panel(static_cast<int>(panel), rows[static_cast<size_t>(thread)].data());
    });
  });
  return screen.release();
}

void bind_screen(nb::module_& module) {
  nb::class_<Screen>(module, "Screen", "A copy of a weight that finds its greatest outputs.")
      .def_prop_ro("is_usable", &Screen::is_usable, "Whether all weights are usual numbers.");
  module.def("make_screen", &make_screen, nb::arg("team"), nb::arg("weight"),
             nb::rv_policy::take_ownership, nb::keep_alive<0, 2>());
  module.def(
      "screen_bytes",
      [](int64_t num_outputs, int64_t num_inputs, int64_t max_num_rows) {
        const int inputs = checked_size(num_inputs, "num_inputs is out of range");
        const int outputs = checked_size(num_outputs, "num_outputs is out of range");
        const int rows = checked_size(max_num_rows, "max_num_rows is out of range");
        return Screen::num_bytes(outputs, inputs) + ScreenedHead::num_bytes(rows, outputs, inputs);
      },
      nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("max_num_rows"),
      "Bytes of a screen, and of a program that uses it.");
}

// Small records that the builder takes; keyword arguments only, so that nothing is mixed up.
void bind_records(nb::module_& module) {
  nb::class_<Operand>(module, "Operand")
      .def(
          "__init__",
          [](Operand* self, int slot, bool is_logits, int width, int first, int stride) {
            new (self) Operand{slot, is_logits ? RowCount::Logits : RowCount::Tokens, width, first,
                               stride};
          },
          nb::arg("slot"), nb::arg("is_logits"), nb::arg("width"), nb::arg("first") = 0,
          nb::arg("stride") = 0, "Columns of rows; a stride of 0 means whole rows.");
  nb::class_<SlotSpec>(module, "SlotSpec")
      .def(
          "__init__",
          [](SlotSpec* self, bool is_logits, size_t row_bytes) {
            if (row_bytes > size_t{1} << 32) throw nb::value_error("row_bytes is out of range");
            new (self) SlotSpec{is_logits ? RowCount::Logits : RowCount::Tokens, row_bytes};
          },
          nb::arg("is_logits"), nb::arg("row_bytes"));
  nb::class_<ProgramSizes>(module, "ProgramSizes")
      .def(
          "__init__",
          [](ProgramSizes* self, int tokens, int rows, int requests, int length) {
            new (self) ProgramSizes{tokens, rows, requests, length};
          },
          nb::kw_only(), nb::arg("max_num_tokens"), nb::arg("max_num_rows"),
          nb::arg("max_num_requests"), nb::arg("max_model_len"));
  nb::class_<GroupShape>(module, "GroupShape")
      .def(
          "__init__",
          [](GroupShape* self, const std::string& format, int block_size, int num_heads,
             int num_kv_heads, int head_size, int head_size_v, int window, int chunk,
             bool is_latent) {
            new (self) GroupShape{format,      block_size, num_heads, num_kv_heads, head_size,
                                  head_size_v, window,     chunk,     is_latent};
          },
          nb::kw_only(), nb::arg("kv_format"), nb::arg("block_size"), nb::arg("num_heads"),
          nb::arg("num_kv_heads"), nb::arg("head_size"), nb::arg("head_size_v"),
          nb::arg("window") = 0, nb::arg("chunk") = 0, nb::arg("is_latent") = false);
}

void bind_attention_records(nb::module_& module) {
  module.def(
      "attention_bytes",
      [](const GroupShape& shape, int max_model_len, int num_threads) {
        return attention_group_bytes(checked_heads(shape),
                                     checked_limits(num_threads, max_model_len));
      },
      nb::arg("shape"), nb::arg("max_model_len"), nb::arg("num_threads"),
      "Bytes that layers of equal heads share, beyond queries and results.");
  nb::class_<Columns>(module, "Columns")
      .def(
          "__init__",
          [](Columns* self, int slot, int first, int stride) {
            new (self) Columns{slot, first, stride};
          },
          nb::arg("slot"), nb::arg("first"), nb::arg("stride"));
  using Array = std::optional<FloatArray>;
  nb::class_<QueryKeyArrays>(module, "QueryKeyArrays")
      .def(
          "__init__",
          [](QueryKeyArrays* self, const std::optional<FloatTable>& rotations, bool is_interleaved,
             const Array& q_norm, const Array& k_norm, const Array& v_norm, float norm_eps,
             bool norms_follow_rope, float q_scale, const Array& position_scales) {
            new (self) QueryKeyArrays{rotations, is_interleaved,    q_norm,  k_norm,         v_norm,
                                      norm_eps,  norms_follow_rope, q_scale, position_scales};
          },
          nb::kw_only(), nb::arg("rotations").noconvert().none(), nb::arg("is_interleaved") = false,
          nb::arg("q_norm").noconvert().none(), nb::arg("k_norm").noconvert().none(),
          nb::arg("v_norm").noconvert().none() = nb::none(), nb::arg("norm_eps"),
          nb::arg("norms_follow_rope") = false, nb::arg("q_scale"),
          nb::arg("position_scales").noconvert().none() = nb::none());
  nb::class_<LayerMemory>(module, "LayerMemory")
      .def(
          "__init__",
          [](LayerMemory* self, const Bytes& raw, int64_t num_blocks, int64_t offset_bytes) {
            if (num_blocks < 1) throw nb::value_error("num_blocks must be positive");
            if (offset_bytes < 0) throw nb::value_error("offset_bytes must not be negative");
            new (self) LayerMemory{raw, num_blocks, offset_bytes};
          },
          nb::arg("raw").noconvert(), nb::arg("num_blocks"), nb::arg("offset_bytes"));
  nb::class_<BatchArrays>(module, "BatchArrays")
      .def(nb::init<StepArray<int64_t, 1>, StepArray<int64_t, 1>, StepArray<int64_t, 1>,
                    StepArray<int32_t, 1>, StepArray<int32_t, 1>, bool>(),
           nb::kw_only(), nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("logits_rows").noconvert(), nb::arg("query_start").noconvert(),
           nb::arg("seq_lens").noconvert(), nb::arg("wants_best_only") = false);
  nb::class_<LateArrays>(module, "LateArrays")
      .def(nb::init<StepArray<int64_t, 1>, StepArray<int64_t, 1>, StepArray<int32_t, 1>>(),
           nb::kw_only(), nb::arg("places").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("sampled_ids").noconvert());
  nb::class_<GroupArrays>(module, "GroupArrays")
      .def(nb::init<StepArray<int32_t, 2>, StepArray<int64_t, 1>,
                    std::optional<StepArray<int32_t, 1>>>(),
           nb::kw_only(), nb::arg("block_table").noconvert(), nb::arg("slots").noconvert(),
           nb::arg("first_columns").noconvert().none() = nb::none());
}

}  // namespace

void bind_program(nb::module_& module) {
  bind_weights(module);
  bind_screen(module);
  bind_records(module);
  bind_attention_records(module);
  bind_stack_records(module);
  bind_stack_sizes(module);
  // Whatever an instruction reads must outlive it: weights, norms, tables and KV memory.
  using Builder = ProgramBuilder;
  nb::class_<Builder> program(module, "Program");
  program
      .def(nb::init<ThreadTeam&, const ProgramSizes&, const std::vector<SlotSpec>&>(),
           nb::arg("team"), nb::arg("sizes"), nb::arg("slots"), nb::keep_alive<1, 2>())
      .def("embedding", &Builder::embedding, nb::arg("table"), nb::arg("first_row"), nb::arg("out"),
           nb::keep_alive<1, 2>())
      .def("pack", &Builder::pack, nb::arg("x"), nb::arg("norm").noconvert().none(), nb::arg("eps"),
           nb::arg("weight"), nb::arg("out_slot"), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def("linear", &Builder::linear, nb::arg("x_slot"), nb::arg("weight"),
           nb::arg("bias").noconvert().none(), nb::arg("kind"), nb::arg("activation"),
           nb::arg("out"), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("screened_logits", &Builder::screened_logits, nb::arg("x_slot"), nb::arg("weight"),
           nb::arg("screen"), nb::arg("out"), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("gated_pack", &Builder::gated_pack, nb::arg("x_slot"), nb::arg("weight"),
           nb::arg("bias").noconvert().none(), nb::arg("activation"), nb::arg("next"),
           nb::arg("out"), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("select_rows", &Builder::select_rows, nb::arg("x"), nb::arg("out_slot"))
      .def("attention_group", &Builder::attention_group, nb::arg("group"), nb::arg("shape"),
           nb::arg("num_blocks"))
      .def("store_qkv", &Builder::store_qkv, nb::arg("group"), nb::arg("memory"), nb::arg("arrays"),
           nb::arg("q"), nb::arg("k").none(), nb::arg("v").none(), nb::arg("q_slot"),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("attend", &Builder::attend, nb::arg("group"), nb::arg("memory"), nb::arg("q_slot"),
           nb::arg("out"), nb::arg("soft_cap"), nb::arg("sinks").noconvert().none(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 7>())
      .def("end_segment", &Builder::end_segment)
      .def("finish", &Builder::finish)
      .def("begin", &Builder::begin, nb::arg("batch"), nb::arg("groups"))
      .def("run_segment", &Builder::run_segment, nb::arg("segment"))
      .def("start", &Builder::start, nb::arg("batch"), nb::arg("groups"),
           nb::arg("late").none() = nb::none())
      .def(
          "view",
          [](nb::handle self, const Operand& operand) {
            return nb::cast<Builder&>(self).view(operand, self);
          },
          nb::arg("operand"))
      .def_prop_ro("num_segments", &Builder::num_segments);
  bind_rowwise(program);
  bind_stacks(program);
}

}  // namespace kvloom
