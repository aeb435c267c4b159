// The instructions of a program that multiply by stacks of matrices: a map per head, and experts.
//
// Experts run in five: their tokens are ordered, rows are packed for each expert, multiplied with
// gate and up, then with down, and each token's results are summed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvloom/program_rowwise.hpp"
#include "kvloom/route.hpp"
#include "kvloom/stack.hpp"

namespace kvloom {

// Rows of each head, packed for its matrix: heads' rows one head after another.
class PackHeadsInstruction final : public Instruction {
 public:
  PackHeadsInstruction(Operand x, const PackedStack& weight, int out_slot)
      : x_(x), num_heads_(weight.num_matrices), out_slot_(out_slot) {
    rows_.weight = weight.first.format;
    rows_.num_inputs = weight.first.num_inputs;
  }

  int prepare(const StepContext& context) override {
    num_rows_ = num_rows_of(context.step, x_.rows);
    rows_.data = context.arena.bytes(out_slot_);
    input_ = floats_of(context.arena, x_);
    return num_rows_ == 0 ? 0 : num_heads_ * num_tiles(num_rows_);
  }

  void run_item(int item, const ThreadContext&) override {
    const int head = item / num_tiles(num_rows_), tile = item % num_tiles(num_rows_);
    const PackedRows packed = rows_.at(head * num_rows_, num_rows_);
    const float* x = input_ + int64_t{head} * rows_.num_inputs;
    const int end = first_row_of_tile(num_rows_, tile + 1);
    for (int row = first_row_of_tile(num_rows_, tile); row < end; ++row) {
      pack_row(packed, row, x + row * x_.row_stride());
    }
  }

 private:
  Operand x_;
  int num_heads_, out_slot_;
  StackRows rows_;
  int num_rows_ = 0;
  const float* input_ = nullptr;
};

// [num_rows, num_heads x num_outputs] from packed heads.
class HeadLinearInstruction final : public Instruction {
 public:
  HeadLinearInstruction(const PackedStack& weight, int x_slot, Operand out)
      : weight_(weight), x_slot_(x_slot), out_(out) {
    rows_.weight = weight.first.format;
    rows_.num_inputs = weight.first.num_inputs;
  }

  int prepare(const StepContext& context) override {
    num_rows_ = num_rows_of(context.step, out_.rows);
    if (num_rows_ == 0) return 0;
    rows_.data = context.arena.bytes(x_slot_);
    result_ = context.arena.floats(out_.slot);
    num_chunks_ = num_stack_chunks(weight_.first, EpilogueKind::Store, num_rows_,
                                   weight_.num_matrices, context.num_threads);
    return weight_.num_matrices * num_chunks_;
  }

  void run_item(int item, const ThreadContext& thread) override {
    const int head = item / num_chunks_;
    Gemm gemm;
    gemm.weight = weight_.at(head);
    gemm.rows = rows_.at(head * num_rows_, num_rows_);
    gemm.epilogue.out = result_ + int64_t{head} * weight_.first.num_outputs;
    gemm.epilogue.out_stride = static_cast<size_t>(out_.width);
    run_stack_chunk(gemm, item % num_chunks_, num_chunks_, thread.scratch);
  }

  size_t scratch_bytes() const override {
    return gemm_scratch_bytes(weight_.first.format, weight_.first.num_inputs);
  }

 private:
  PackedStack weight_;
  int x_slot_;
  Operand out_;
  StackRows rows_;
  int num_rows_ = 0, num_chunks_ = 1;
  float* result_ = nullptr;
};

// Router logits -> ids and weights of each row's experts.
class RouteInstruction final : public Instruction {
 public:
  RouteInstruction(const Routing& routing, const float* bias, Operand logits, int out_slot)
      : routing_(routing), bias_(bias), logits_(logits), out_slot_(out_slot) {}

  int prepare(const StepContext& context) override {
    from_ = floats_of(context.arena, logits_);
    out_ = context.arena.floats(out_slot_);
    items_ = deal_rows(num_rows_of(context.step, logits_.rows),
                       int64_t{routing_.num_experts} * routing_.num_choices, false);
    return items_.count();
  }

  void run_item(int item, const ThreadContext& thread) override {
    const int64_t first = item * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    for (int64_t row = first; row < end; ++row) {
      route_row(routing_, from_ + row * logits_.row_stride(), bias_,
                reinterpret_cast<float*>(thread.scratch), out_ + row * 2 * routing_.num_choices);
    }
  }

  size_t scratch_bytes() const override { return sizeof(float) * route_scratch_floats(routing_); }

 private:
  Routing routing_;
  const float* bias_;
  Operand logits_;
  int out_slot_;
  const float* from_ = nullptr;
  float* out_ = nullptr;
  RowItems items_;
};

// Orders the tokens of a layer's experts. Little work, and all of it depends on all of it.
class OrderInstruction final : public Instruction {
 public:
  OrderInstruction(ExpertOrder& order, Operand routes) : order_(order), routes_(routes) {}

  int prepare(const StepContext& context) override {
    num_rows_ = num_rows_of(context.step, routes_.rows);
    from_ = context.arena.floats(routes_.slot);
    return num_rows_ == 0 ? 0 : 1;
  }

  void run_item(int, const ThreadContext&) override { order_.sort(from_, num_rows_); }

 private:
  ExpertOrder& order_;
  Operand routes_;
  int num_rows_ = 0;
  const float* from_ = nullptr;
};

// The weight of a token's expert: its route's, times the expert's own scale if there are scales.
struct RouteWeights {
  Operand routes;
  const float* scales = nullptr;  // [num_experts], or none

  float of(const ExpertOrder& order, const float* all_routes, int choice) const {
    const int num_choices = order.num_choices();
    const int row = choice / num_choices, index = choice % num_choices;
    const float* route = all_routes + int64_t{2} * row * num_choices;
    const float weight = route[num_choices + index];
    if (scales == nullptr) return weight;
    return weight * scales[expert_id(route[index], order.num_experts())];
  }
};

// Rows of x, each packed for every expert that it goes to, in the experts' order.
class PackExpertsInstruction final : public Instruction {
 public:
  // `weighs_input`: rows are multiplied by their weights.
  PackExpertsInstruction(const ExpertOrder& order, const PackedStack& weight, Operand x,
                         const RouteWeights& weights, bool weighs_input, int out_slot)
      : order_(order), x_(x), weights_(weights), weighs_input_(weighs_input), out_slot_(out_slot) {
    rows_.weight = weight.first.format;
    rows_.num_inputs = weight.first.num_inputs;
  }

  int prepare(const StepContext& context) override {
    rows_.data = context.arena.bytes(out_slot_);
    input_ = floats_of(context.arena, x_);
    routes_ = context.arena.floats(weights_.routes.slot);
    items_ = deal_rows(int64_t{num_rows_of(context.step, x_.rows)} * order_.num_choices(), x_.width,
                       false);
    return items_.count();
  }

  void run_item(int item, const ThreadContext& thread) override {
    const int64_t first = item * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    int expert = -1;
    for (int place = static_cast<int>(first); place < end; ++place) {
      const int choice = order_.choice_at(place);
      // Places of one expert follow each other, so this moves on rarely.
      if (expert < 0 || place >= order_.first_place(expert) + order_.count(expert)) {
        expert = order_.expert_at(place);
      }
      const int start = order_.first_place(expert);
      const PackedRows packed = rows_.at(start, order_.count(expert));
      const float* x = input_ + choice / order_.num_choices() * x_.row_stride();
      if (weighs_input_) {
        const float weight = weights_.of(order_, routes_, choice);
        float* scaled = reinterpret_cast<float*>(thread.scratch);
        map_run(MapKind::Multiply, x, &weight, true, x_.width, scaled);
        x = scaled;
      }
      pack_row(packed, place - start, x);
    }
  }

  size_t scratch_bytes() const override { return sizeof(float) * static_cast<size_t>(x_.width); }

 private:
  const ExpertOrder& order_;
  Operand x_;
  RouteWeights weights_;
  bool weighs_input_;
  int out_slot_;
  StackRows rows_;
  const float *input_ = nullptr, *routes_ = nullptr;
  RowItems items_;
};

// What follows the product with an expert's matrix.
struct ExpertResult {
  EpilogueKind kind = EpilogueKind::Store;  // or GatedPack
  Activation activation = Activation::Silu;
  const float* bias = nullptr;      // [num_experts, num_outputs], or none
  Format packed_for = Format::F32;  // GatedPack: the weight that reads the result
  int slot = 0;
};

// The product of each chosen expert's rows with its matrix. Experts without rows are never read.
class ExpertsInstruction final : public Instruction {
 public:
  ExpertsInstruction(const ExpertOrder& order, const PackedStack& weight, RowCount rows, int x_slot,
                     const ExpertResult& result)
      : order_(order), weight_(weight), row_count_(rows), x_slot_(x_slot), result_(result) {
    rows_.weight = weight.first.format;
    rows_.num_inputs = weight.first.num_inputs;
    packed_.weight = result.packed_for;
    packed_.num_inputs = weight.first.num_outputs / 2;
  }

  int prepare(const StepContext& context) override {
    const int num_places = num_rows_of(context.step, row_count_) * order_.num_choices();
    if (num_places == 0) return 0;
    rows_.data = context.arena.bytes(x_slot_);
    packed_.data = context.arena.bytes(result_.slot);
    const int most_chosen = std::min(num_places, order_.num_experts());
    num_chunks_ = num_stack_chunks(weight_.first, result_.kind, num_places / most_chosen,
                                   most_chosen, context.num_threads);
    return most_chosen * num_chunks_;
  }

  void run_item(int item, const ThreadContext& thread) override {
    const int index = item / num_chunks_;
    if (index >= order_.num_chosen()) return;  // fewer experts than could have been chosen
    const int expert = order_.chosen(index);
    const int first = order_.first_place(expert), count = order_.count(expert);
    const int num_outputs = weight_.first.num_outputs;
    Gemm gemm;
    gemm.weight = weight_.at(expert);
    gemm.rows = rows_.at(first, count);
    gemm.epilogue.kind = result_.kind;
    gemm.epilogue.activation = result_.activation;
    if (result_.bias != nullptr) gemm.epilogue.bias = result_.bias + int64_t{expert} * num_outputs;
    if (result_.kind == EpilogueKind::GatedPack) {
      gemm.epilogue.packed = packed_.at(first, count);
    } else {
      gemm.epilogue.out = reinterpret_cast<float*>(packed_.data) + int64_t{first} * num_outputs;
      gemm.epilogue.out_stride = static_cast<size_t>(num_outputs);
    }
    run_stack_chunk(gemm, item % num_chunks_, num_chunks_, thread.scratch);
  }

  size_t scratch_bytes() const override {
    return gemm_scratch_bytes(weight_.first.format, weight_.first.num_inputs);
  }

 private:
  const ExpertOrder& order_;
  PackedStack weight_;
  RowCount row_count_;
  int x_slot_;
  ExpertResult result_;
  StackRows rows_, packed_;
  int num_chunks_ = 1;
};

// out = the sum of a row's results, weighed unless their inputs were.
class SumExpertsInstruction final : public Instruction {
 public:
  SumExpertsInstruction(const ExpertOrder& order, int y_slot, const RouteWeights& weights,
                        bool weighs_input, Operand out)
      : order_(order), y_slot_(y_slot), weights_(weights), weighs_input_(weighs_input), out_(out) {}

  int prepare(const StepContext& context) override {
    results_ = context.arena.floats(y_slot_);
    routes_ = context.arena.floats(weights_.routes.slot);
    sums_ = context.arena.floats(out_.slot);
    items_ = deal_rows(num_rows_of(context.step, out_.rows),
                       int64_t{out_.width} * order_.num_choices(), true);
    items_.parts_per_row = std::min<int64_t>(items_.parts_per_row, cdiv(out_.width, kLanes));
    return items_.count();
  }

  void run_item(int item, const ThreadContext&) override {
    const int64_t block = item / items_.parts_per_row, part = item % items_.parts_per_row;
    const int64_t first = block * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    const int64_t start = part_of(part), stop = part_of(part + 1);
    for (int64_t row = first; row < end; ++row) {
      for (int64_t i = start; i < stop; i += kLanes) {
        sum_lanes(static_cast<int>(row), i, static_cast<int>(std::min<int64_t>(stop - i, kLanes)));
      }
    }
  }

 private:
  int64_t part_of(int64_t part) const { return out_.width * part / items_.parts_per_row; }

  void sum_lanes(int row, int64_t column, int count) const {
    const int num_choices = order_.num_choices();
    vf32 sum = {};
    for (int choice = row * num_choices; choice < (row + 1) * num_choices; ++choice) {
      const float* y = results_ + int64_t{order_.place_of(choice)} * out_.width + column;
      const vf32 value = count == kLanes ? load(y) : load_partial(y, count);
      const float weight = weighs_input_ ? 1.0f : weights_.of(order_, routes_, choice);
      sum = fma(broadcast(weight), value, sum);
    }
    float* out = sums_ + int64_t{row} * out_.width + column;
    if (count == kLanes) return store(out, sum);
    store_partial(out, sum, count);
  }

  const ExpertOrder& order_;
  int y_slot_;
  RouteWeights weights_;
  bool weighs_input_;
  Operand out_;
  const float *results_ = nullptr, *routes_ = nullptr;
  float* sums_ = nullptr;
  RowItems items_;
};

}  // namespace kvloom
