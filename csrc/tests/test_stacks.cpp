// Routing, the order of experts, and products with stacks, each in memory of its exact size.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "check.hpp"
#include "kvloom/pack_weights.hpp"
#include "kvloom/program_stacks.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> routed(const Routing& routing, const std::vector<float>& logits) {
  std::vector<float> scratch(route_scratch_floats(routing));
  std::vector<float> out(static_cast<size_t>(2 * routing.num_choices));
  route_row(routing, logits.data(), nullptr, scratch.data(), out.data());
  return out;
}

KVLOOM_TEST(routes_take_the_first_of_equals) {
  Routing routing;
  routing.num_experts = 5;
  routing.num_choices = 3;
  routing.score = RouteScore::SoftmaxOfChosen;
  const std::vector<float> out = routed(routing, {1.0f, 2.0f, 1.0f, 2.0f, 0.0f});
  CHECK(out[0] == 1.0f && out[1] == 3.0f && out[2] == 0.0f);
  const double e = std::exp(-1.0);
  CHECK_NEAR(out[3], 1.0 / (2.0 + e), 1e-6);
  CHECK_NEAR(out[5], e / (2.0 + e), 1e-6);
}

KVLOOM_TEST(routes_of_no_numbers_are_different_experts) {
  Routing routing;
  routing.num_experts = 4;
  routing.num_choices = 4;
  routing.score = RouteScore::Sigmoid;
  routing.num_groups = 2;
  for (const float x : {kNaN, std::numeric_limits<float>::infinity()}) {
    const std::vector<float> out = routed(routing, {x, x, 1.0f, x});
    std::vector<float> ids(out.begin(), out.begin() + 4);
    std::sort(ids.begin(), ids.end());
    CHECK(ids == std::vector<float>({0.0f, 1.0f, 2.0f, 3.0f}));
  }
}

KVLOOM_TEST(the_order_puts_tokens_of_an_expert_side_by_side) {
  constexpr int kNumRows = 6, kNumExperts = 5, kNumChoices = 2;
  // The last three are no ids of experts.
  const float ids[] = {4, 0, 0, 2, 4, 2, 0, 4, 2, -1, 1e30f, kNaN};
  std::vector<float> routes;
  for (int row = 0; row < kNumRows; ++row) {
    routes.insert(routes.end(), {ids[2 * row], ids[2 * row + 1], 0.5f, 0.5f});
  }
  ExpertOrder order(kNumExperts, kNumChoices, kNumRows);
  for (int repeat = 0; repeat < 2; ++repeat) {
    order.sort(routes.data(), kNumRows);
    CHECK(order.num_chosen() == 3);
    CHECK(order.chosen(0) == 0 && order.chosen(1) == 2 && order.chosen(2) == 4);
    CHECK(order.count(0) == 6 && order.count(1) == 0 && order.count(4) == 3);
    for (int place = 0; place < kNumRows * kNumChoices; ++place) {
      const int choice = order.choice_at(place);
      CHECK(order.place_of(choice) == place);
      CHECK(order.expert_at(place) == expert_id(ids[choice], kNumExperts));
      CHECK(place == 0 || order.expert_at(place - 1) <= order.expert_at(place));
    }
  }
}

// Random matrices [num_matrices][num_outputs, num_inputs], packed.
struct Matrices {
  Matrices(Random& random, int num_matrices, int num_outputs, int num_inputs, OutputOrder order)
      : values(random.reals(num_matrices * num_outputs * num_inputs)) {
    const size_t num_bytes = packed_weight_bytes(Format::F32, order, num_outputs, num_inputs);
    memory = std::make_unique<Region>(num_bytes * static_cast<size_t>(num_matrices));
    stack = {{Format::F32, order, num_outputs, num_inputs, memory->data()}, num_matrices};
    for (int i = 0; i < num_matrices; ++i) {
      const float* own = values.data() + i * num_outputs * num_inputs;
      pack_outputs(stack.at(i),
                   {SourceFormat::F32, reinterpret_cast<const uint8_t*>(own), 0, num_outputs});
    }
  }

  double dot(int matrix, int output, const double* x) const {
    const int size = stack.first.num_inputs;
    const float* row = values.data() + (matrix * stack.first.num_outputs + output) * size;
    double sum = 0.0;
    for (int i = 0; i < size; ++i) sum += x[i] * row[i];
    return sum;
  }

  std::vector<float> values;
  std::unique_ptr<Region> memory;
  PackedStack stack;
};

constexpr int kSize = 40, kInner = 24, kNumExperts = 5, kNumChoices = 2, kNumRows = 13;

std::vector<double> expected_row(const Matrices& gate_up, const Matrices& down, const float* x,
                                 const float* route) {
  std::vector<double> sum(kSize, 0.0);
  const std::vector<double> row(x, x + kSize);
  for (int choice = 0; choice < kNumChoices; ++choice) {
    const int expert = static_cast<int>(route[choice]);
    std::vector<double> inner(kInner);
    for (int i = 0; i < kInner; ++i) {
      const double gate = gate_up.dot(expert, i, row.data());
      const double up = gate_up.dot(expert, kInner + i, row.data());
      inner[static_cast<size_t>(i)] = gate / (1.0 + std::exp(-gate)) * up;
    }
    for (int i = 0; i < kSize; ++i) {
      sum[static_cast<size_t>(i)] +=
          route[kNumChoices + choice] * down.dot(expert, i, inner.data());
    }
  }
  return sum;
}

void add_experts(Program& program, ExpertOrder& order, const Matrices& gate_up,
                 const Matrices& down) {
  const Operand x{0, RowCount::Tokens, kSize}, routes{1, RowCount::Tokens, 2 * kNumChoices};
  const RouteWeights weights{routes, nullptr};
  const auto add = [&](auto* instruction) {
    program.add(std::unique_ptr<Instruction>(instruction));
  };
  add(new OrderInstruction(order, routes));
  add(new PackExpertsInstruction(order, gate_up.stack, x, weights, false, 2));
  ExpertResult inner;
  inner.kind = EpilogueKind::GatedPack;
  inner.slot = 3;
  add(new ExpertsInstruction(order, gate_up.stack, RowCount::Tokens, 2, inner));
  ExpertResult result;
  result.slot = 4;
  add(new ExpertsInstruction(order, down.stack, RowCount::Tokens, 3, result));
  add(new SumExpertsInstruction(order, 4, weights, false, {5, RowCount::Tokens, kSize}));
}

KVLOOM_TEST(experts_by_definition) {
  Random random(4);
  const Matrices gate_up(random, kNumExperts, 2 * kInner, kSize, OutputOrder::GateUp);
  const Matrices down(random, kNumExperts, kSize, kInner, OutputOrder::Plain);
  ThreadTeam team(2);
  const size_t choices = kNumChoices;
  Program program(team,
                  {{RowCount::Tokens, kSize * sizeof(float)},
                   {RowCount::Tokens, 2 * choices * sizeof(float)},
                   {RowCount::Tokens, choices * stack_row_bytes(Format::F32, kSize)},
                   {RowCount::Tokens, choices * stack_row_bytes(Format::F32, kInner)},
                   {RowCount::Tokens, choices * kSize * sizeof(float)},
                   {RowCount::Tokens, kSize * sizeof(float)}},
                  {kNumRows, 1});
  ExpertOrder order(kNumExperts, kNumChoices, kNumRows);
  add_experts(program, order, gate_up, down);
  program.finish();
  for (const int num_rows : {kNumRows, 1}) {
    Step step;
    step.num_tokens = num_rows;
    float *x = program.arena().floats(0), *routes = program.arena().floats(1);
    for (int row = 0; row < num_rows; ++row) {
      const std::vector<float> values = random.reals(kSize);
      std::copy(values.begin(), values.end(), x + row * kSize);
      const float route[] = {static_cast<float>(row % 3), static_cast<float>(row % 2 + 3), 0.25f,
                             0.75f};
      std::copy(route, route + 4, routes + row * 4);
    }
    program.begin(step);
    program.run_segment(0);
    for (int row = 0; row < num_rows; ++row) {
      const std::vector<double> expected =
          expected_row(gate_up, down, x + row * kSize, routes + row * 4);
      const float* out = program.arena().floats(5) + row * kSize;
      for (int i = 0; i < kSize; ++i) CHECK_NEAR(out[i], expected[static_cast<size_t>(i)], 1e-4);
    }
  }
}

}  // namespace
}  // namespace kvloom
