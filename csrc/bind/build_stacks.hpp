// Builds the instructions on stacks of matrices (program_stacks.hpp of the kernels), checking what
// comes in.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "kvloom/program_stacks.hpp"
#include "program_builder.hpp"

namespace kvloom {

constexpr std::pair<const char*, RouteScore> kRouteScores[] = {
    {"softmax", RouteScore::Softmax},
    {"softmax_of_chosen", RouteScore::SoftmaxOfChosen},
    {"sigmoid", RouteScore::Sigmoid}};
constexpr std::pair<const char*, GroupScore> kGroupScores[] = {
    {"max", GroupScore::Max}, {"sum_of_two", GroupScore::SumOfTwo}};

inline Routing checked_routing(const Routing& routing) {
  check(routing.num_experts >= 1 && routing.num_experts <= 1 << 16, "route: too many experts");
  check(routing.num_choices >= 1 && routing.num_choices <= routing.num_experts,
        "route: there are not so many experts");
  check(routing.num_groups >= 1 && routing.num_experts % routing.num_groups == 0 &&
            routing.num_chosen_groups >= 1 && routing.num_chosen_groups <= routing.num_groups,
        "route: experts do not make up the groups");
  return routing;
}

// A row of all heads packed, or of a token for all of its experts.
inline void check_packed_runs(const ProgramBuilder& program, const Operand& rows, Format weight,
                              int num_runs, int slot) {
  const size_t num_bytes = stack_row_bytes(weight, rows.width) * static_cast<size_t>(num_runs);
  check(program.check_slot(slot, rows.rows).row_bytes >= num_bytes,
        "the slot is too small for packed rows");
}

inline void add_pack_heads(ProgramBuilder& program, const Operand& x, const Weight& weight,
                           int out_slot) {
  const PackedStack& stack = weight.stack();
  program.check_floats(x);
  check(x.width == int64_t{stack.num_matrices} * stack.first.num_inputs,
        "pack_heads: width is not that of all heads");
  check_packed_runs(program, {0, x.rows, stack.first.num_inputs}, stack.first.format,
                    stack.num_matrices, out_slot);
  program.add<PackHeadsInstruction>(x, stack, out_slot);
}

inline void add_head_linear(ProgramBuilder& program, int x_slot, const Weight& weight,
                            const Operand& out) {
  const PackedStack& stack = weight.stack();
  program.check_result(out);
  check(stack.first.order == OutputOrder::Plain, "head_linear: rows must lie in order");
  check(out.width == int64_t{stack.num_matrices} * stack.first.num_outputs,
        "head_linear: width is not that of all heads");
  check_packed_runs(program, {0, out.rows, stack.first.num_inputs}, stack.first.format,
                    stack.num_matrices, x_slot);
  program.add<HeadLinearInstruction>(stack, x_slot, out);
}

inline void add_route(ProgramBuilder& program, const Routing& routing,
                      const std::optional<FloatArray>& bias, const Operand& logits,
                      const Operand& out) {
  program.check_floats(logits);
  program.check_result(out);
  check(logits.width == routing.num_experts && out.width == 2 * routing.num_choices &&
            logits.rows == out.rows,
        "route: widths are not those of the experts");
  check(!bias || bias->shape(0) == static_cast<size_t>(routing.num_experts),
        "route: the bias differs");
  program.add<RouteInstruction>(routing, bias ? bias->data() : nullptr, logits, out.slot);
}

// A layer's experts as instructions take them. The order is one that layers share.
struct ExpertLayer {
  ExpertOrder& order;
  Operand routes;
  std::optional<FloatArray> scales;
  bool weighs_input = false;

  RouteWeights weights() const { return {routes, scales ? scales->data() : nullptr}; }
};

inline void check_layer(const ProgramBuilder& program, const ExpertLayer& layer) {
  const ExpertOrder& order = layer.order;
  program.check_result(layer.routes);
  const int most = layer.routes.rows == RowCount::Tokens ? program.sizes().max_num_tokens
                                                         : program.sizes().max_num_rows;
  check(order.max_num_rows() >= most, "experts: the order is for fewer rows");
  check(layer.routes.width == 2 * order.num_choices(), "experts: routes have other choices");
  check(!layer.scales || layer.scales->shape(0) == static_cast<size_t>(order.num_experts()),
        "experts: one scale per expert");
}

inline const PackedStack& checked_stack(const ExpertOrder& order, const Weight& weight) {
  const PackedStack& stack = weight.stack();
  check(stack.num_matrices == order.num_experts(), "experts: a matrix per expert");
  return stack;
}

inline void add_pack_experts(ProgramBuilder& program, const ExpertLayer& layer, const Operand& x,
                             const Weight& weight, int out_slot) {
  check_layer(program, layer);
  program.check_floats(x);
  const PackedStack& stack = checked_stack(layer.order, weight);
  check(x.width == stack.first.num_inputs && x.rows == layer.routes.rows,
        "pack_experts: width is not the weight's");
  check_packed_runs(program, x, stack.first.format, layer.order.num_choices(), out_slot);
  program.add<OrderInstruction>(layer.order, layer.routes);
  program.add<PackExpertsInstruction>(layer.order, stack, x, layer.weights(), layer.weighs_input,
                                      out_slot);
}

inline const float* checked_bias(const std::optional<FloatArray>& bias, const PackedStack& stack) {
  if (!bias) return nullptr;
  check(bias->shape(0) ==
            static_cast<size_t>(stack.num_matrices) * static_cast<size_t>(stack.first.num_outputs),
        "experts: the bias differs");
  return bias->data();
}

// Gate and up of all experts' rows, packed for `next`. `bias` is flat: [num_experts x num_outputs].
inline void add_gate_experts(ProgramBuilder& program, const ExpertLayer& layer, int x_slot,
                             const Weight& weight, const std::optional<FloatArray>& bias,
                             const std::string& activation, const Weight& next, int out_slot) {
  check_layer(program, layer);
  const PackedStack& stack = checked_stack(layer.order, weight);
  const PackedStack& down = checked_stack(layer.order, next);
  const int num_choices = layer.order.num_choices();
  check(stack.first.order == OutputOrder::GateUp, "gate_experts: gate and up");
  check(stack.first.num_outputs / 2 == down.first.num_inputs, "gate_experts: inner sizes differ");
  ExpertResult result;
  result.kind = EpilogueKind::GatedPack;
  result.activation = named(kActivations, activation);
  result.bias = checked_bias(bias, stack);
  result.packed_for = down.first.format;
  result.slot = out_slot;
  const RowCount rows = layer.routes.rows;
  check_packed_runs(program, {0, rows, stack.first.num_inputs}, stack.first.format, num_choices,
                    x_slot);
  check_packed_runs(program, {0, rows, down.first.num_inputs}, down.first.format, num_choices,
                    out_slot);
  program.add<ExpertsInstruction>(layer.order, stack, rows, x_slot, result);
}

// [num_rows x num_choices, num_outputs] results in the experts' order, as rows of num_choices.
inline void add_down_experts(ProgramBuilder& program, const ExpertLayer& layer, int x_slot,
                             const Weight& weight, const std::optional<FloatArray>& bias,
                             const Operand& out) {
  check_layer(program, layer);
  const PackedStack& stack = checked_stack(layer.order, weight);
  const int num_choices = layer.order.num_choices();
  program.check_result(out);
  check(stack.first.order == OutputOrder::Plain, "down_experts: rows must lie in order");
  check(
      out.rows == layer.routes.rows && out.width == int64_t{num_choices} * stack.first.num_outputs,
      "down_experts: width is not that of all choices");
  check_packed_runs(program, {0, out.rows, stack.first.num_inputs}, stack.first.format, num_choices,
                    x_slot);
  ExpertResult result;
  result.bias = checked_bias(bias, stack);
  result.slot = out.slot;
  program.add<ExpertsInstruction>(layer.order, stack, out.rows, x_slot, result);
}

inline void add_sum_experts(ProgramBuilder& program, const ExpertLayer& layer, const Operand& y,
                            const Operand& out) {
  check_layer(program, layer);
  program.check_result(y);
  program.check_result(out);
  check(y.rows == layer.routes.rows && out.rows == y.rows &&
            y.width == int64_t{layer.order.num_choices()} * out.width,
        "sum_experts: width is not that of all choices");
  program.add<SumExpertsInstruction>(layer.order, y.slot, layer.weights(), layer.weighs_input, out);
}

inline void check_order_sizes(int num_experts, int num_choices, int max_num_rows) {
  check(num_experts >= 1 && num_experts <= 1 << 16 && num_choices >= 1 &&
            num_choices <= num_experts && max_num_rows >= 1 && max_num_rows <= 1 << 20 &&
            int64_t{max_num_rows} * num_choices <= 1 << 26,
        "ExpertOrder: a size is out of range");
}

inline void bind_stack_records(nb::module_& module) {
  nb::class_<Routing>(module, "Routing")
      .def(
          "__init__",
          [](Routing* self, int num_experts, int num_choices, const std::string& score,
             bool is_normalised, float factor, int num_groups, int num_chosen_groups,
             const std::string& group_score) {
            const Routing routing{num_experts,
                                  num_choices,
                                  named(kRouteScores, score),
                                  is_normalised,
                                  factor,
                                  num_groups,
                                  num_chosen_groups,
                                  named(kGroupScores, group_score)};
            new (self) Routing(checked_routing(routing));
          },
          nb::kw_only(), nb::arg("num_experts"), nb::arg("num_choices"), nb::arg("score"),
          nb::arg("is_normalised"), nb::arg("factor"), nb::arg("num_groups"),
          nb::arg("num_chosen_groups"), nb::arg("group_score"));
  nb::class_<ExpertOrder>(module, "ExpertOrder")
      .def(
          "__init__",
          [](ExpertOrder* self, int num_experts, int num_choices, int max_num_rows) {
            check_order_sizes(num_experts, num_choices, max_num_rows);
            new (self) ExpertOrder(num_experts, num_choices, max_num_rows);
          },
          nb::arg("num_experts"), nb::arg("num_choices"), nb::arg("max_num_rows"))
      .def_prop_ro("nbytes", [](const ExpertOrder& order) {
        return ExpertOrder::num_bytes(order.num_experts(), order.num_choices(),
                                      order.max_num_rows());
      });
  nb::class_<ExpertLayer>(module, "ExpertLayer")
      .def(
          "__init__",
          [](ExpertLayer* self, ExpertOrder& order, const Operand& routes,
             const std::optional<FloatArray>& scales,
             bool weighs_input) { new (self) ExpertLayer{order, routes, scales, weighs_input}; },
          nb::kw_only(), nb::arg("order"), nb::arg("routes"), nb::arg("scales").noconvert().none(),
          nb::arg("weighs_input"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>());
}

inline void bind_stack_sizes(nb::module_& module) {
  module.def(
      "expert_order_bytes",
      [](int num_experts, int num_choices, int max_num_rows) {
        check_order_sizes(num_experts, num_choices, max_num_rows);
        return ExpertOrder::num_bytes(num_experts, num_choices, max_num_rows);
      },
      nb::arg("num_experts"), nb::arg("num_choices"), nb::arg("max_num_rows"),
      "Bytes that an ExpertOrder keeps.");
  module.def(
      "route_scratch_bytes",
      [](int num_experts, int num_groups) {
        check(num_experts >= 1 && num_groups >= 1 && num_groups <= num_experts,
              "route: experts do not make up the groups");
        Routing routing;
        routing.num_experts = num_experts;
        routing.num_groups = num_groups;
        return sizeof(float) * route_scratch_floats(routing);
      },
      nb::arg("num_experts"), nb::arg("num_groups"), "Bytes each thread needs to route a token.");
  module.def(
      "stack_row_bytes",
      [](const std::string& format, int64_t num_inputs) {
        return stack_row_bytes(named(kFormats, format),
                               checked_size(num_inputs, "num_inputs is out of range"));
      },
      nb::arg("format"), nb::arg("num_inputs"),
      "Bytes of one row packed for a matrix of a stack of this format.");
}

// Whatever an instruction reads must outlive it.
inline void bind_stacks(nb::class_<ProgramBuilder>& program) {
  program
      .def("pack_heads", &add_pack_heads, nb::arg("x"), nb::arg("weight"), nb::arg("out_slot"),
           nb::keep_alive<1, 3>())
      .def("head_linear", &add_head_linear, nb::arg("x_slot"), nb::arg("weight"), nb::arg("out"),
           nb::keep_alive<1, 3>())
      .def("route", &add_route, nb::arg("routing"), nb::arg("bias").noconvert().none(),
           nb::arg("logits"), nb::arg("out"), nb::keep_alive<1, 3>())
      .def("pack_experts", &add_pack_experts, nb::arg("layer"), nb::arg("x"), nb::arg("weight"),
           nb::arg("out_slot"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
      .def("gate_experts", &add_gate_experts, nb::arg("layer"), nb::arg("x_slot"),
           nb::arg("weight"), nb::arg("bias").noconvert().none(), nb::arg("activation"),
           nb::arg("next"), nb::arg("out_slot"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>())
      .def("down_experts", &add_down_experts, nb::arg("layer"), nb::arg("x_slot"),
           nb::arg("weight"), nb::arg("bias").noconvert().none(), nb::arg("out"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("sum_experts", &add_sum_experts, nb::arg("layer"), nb::arg("y"), nb::arg("out"),
           nb::keep_alive<1, 2>());
}

}  // namespace kvloom
