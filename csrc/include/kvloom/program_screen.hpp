// The head of a program, screened: see screen.hpp. These instructions run in steps that want the
// best of their logits only, and one that is left over where too much would have to be exact.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvloom/program_instructions.hpp"
#include "kvloom/screen.hpp"

namespace kvloom {

// What the instructions share.
struct ScreenedHead {
  ScreenedHead(const Screen& screen, int x_slot, const Operand& out, int max_num_rows)
      : screen(screen),
        x_slot(x_slot),
        out(out),
        coarse_memory(coarse_bytes(max_num_rows, screen.exact().num_inputs)),
        bounds_memory(bounds_bytes(max_num_rows, screen.exact().num_outputs)),
        row_bounds(static_cast<size_t>(max_num_rows)),
        least(static_cast<size_t>(max_num_rows)),
        bounds{screen.norms(),    screen.errors(),
               row_bounds.data(), num_panels(OutputOrder::Plain, screen.exact().num_outputs),
               max_num_rows,      reinterpret_cast<float*>(bounds_memory.data())} {
    bounds.clear();
  }

  static size_t coarse_bytes(int max_num_rows, int num_inputs) {
    return packed_rows_bytes(RowFormat::S8, max_num_rows, num_inputs);
  }
  static size_t bounds_bytes(int max_num_rows, int num_outputs) {
    const int panels = num_panels(OutputOrder::Plain, num_outputs);
    return sizeof(float) * OutputBounds::num_kept(panels, max_num_rows);
  }
  static size_t num_bytes(int max_num_rows, int num_outputs, int num_inputs) {
    return coarse_bytes(max_num_rows, num_inputs) + bounds_bytes(max_num_rows, num_outputs) +
           (sizeof(RowBound) + sizeof(float)) * static_cast<size_t>(max_num_rows);
  }

  // Rows of this step.
  PackedRows exact_rows(const StepContext& context) const {
    return {RowFormat::BF16, context.step.num_rows, screen.exact().num_inputs,
            context.arena.bytes(x_slot)};
  }
  PackedRows coarse_rows(const StepContext& context) const {
    return {RowFormat::S8, context.step.num_rows, screen.exact().num_inputs, coarse_memory.data()};
  }

  const Screen& screen;
  const int x_slot;
  const Operand out;
  const Region coarse_memory, bounds_memory;
  std::vector<RowBound> row_bounds;
  std::vector<float> least;  // [max_num_rows] what a row's greatest output is at least
  const OutputBounds bounds;
  // Panels that single rows are to be multiplied with, and how many take no longer than all do.
  std::atomic<int64_t> num_candidates{0};
  int64_t max_candidates = 0;

  bool is_whole_wanted() const { return num_candidates > max_candidates; }
};

// Rows in int8, with their bounds.
class CoarseRowsInstruction final : public Instruction {
 public:
  explicit CoarseRowsInstruction(std::shared_ptr<ScreenedHead> head) : head_(std::move(head)) {}

  int prepare(const StepContext& context) override {
    if (!context.step.wants_best_only || context.step.num_rows == 0) return 0;
    head_->num_candidates = 0;
    exact_ = head_->exact_rows(context);
    coarse_ = head_->coarse_rows(context);
    return num_tiles(exact_.num_rows);
  }

  void run_item(int tile, const ThreadContext& thread) override {
    auto* values = reinterpret_cast<uint16_t*>(thread.scratch);
    const int end = first_row_of_tile(exact_.num_rows, tile + 1);
    for (int row = first_row_of_tile(exact_.num_rows, tile); row < end; ++row) {
      unpack_bf16_row(exact_, row, values);
      head_->row_bounds[static_cast<size_t>(row)] = pack_coarse_row(coarse_, row, values);
    }
  }

  size_t scratch_bytes() const override {
    return packed_rows_bytes(RowFormat::BF16, 1, head_->screen.exact().num_inputs);
  }

 private:
  std::shared_ptr<ScreenedHead> head_;
  PackedRows exact_, coarse_;
};

// Estimates of all outputs, of which the bounds of each panel are kept.
class EstimateInstruction final : public Instruction {
 public:
  explicit EstimateInstruction(std::shared_ptr<ScreenedHead> head) : head_(std::move(head)) {}

  int prepare(const StepContext& context) override {
    plan_ = {};
    if (!context.step.wants_best_only || context.step.num_rows == 0) return 0;
    gemm_ = {head_->screen.coarse(), head_->coarse_rows(context), {}};
    gemm_.epilogue.kind = EpilogueKind::Bounds;
    gemm_.epilogue.bounds = &head_->bounds;
    plan_ = plan_gemm(gemm_, context.num_threads);
    return plan_.num_items;
  }

  void run_item(int item, const ThreadContext& thread) override {
    run_gemm_item(gemm_, plan_, item, thread.scratch);
  }

  MemoryRange weights() const override { return weight_range(head_->screen.coarse()); }

 private:
  std::shared_ptr<ScreenedHead> head_;
  Gemm gemm_;
  GemmPlan plan_;
};

// How many panels may hold the greatest output of a row.
class CountCandidatesInstruction final : public Instruction {
 public:
  explicit CountCandidatesInstruction(std::shared_ptr<ScreenedHead> head)
      : head_(std::move(head)) {}

  int prepare(const StepContext& context) override {
    if (!context.step.wants_best_only) return 0;
    // One after another they take about this share of the panels' time for a tile of rows.
    head_->max_candidates =
        int64_t{head_->bounds.num_panels} * (num_tiles(context.step.num_rows) + 1) / 5;
    return context.step.num_rows;
  }

  void run_item(int row, const ThreadContext&) override {
    const PanelBounds bounds = head_->bounds.of_row(row);
    const float least = least_maximum(bounds);
    head_->least[static_cast<size_t>(row)] = least;
    head_->num_candidates +=
        std::isfinite(least) ? count_candidates(bounds, least) : head_->max_candidates + 1;
  }

 private:
  std::shared_ptr<ScreenedHead> head_;
};

// The panels of a row that may hold its greatest output, exactly.
class CandidatesInstruction final : public Instruction {
 public:
  explicit CandidatesInstruction(std::shared_ptr<ScreenedHead> head) : head_(std::move(head)) {}

  int prepare(const StepContext& context) override {
    if (!context.step.wants_best_only) return 0;
    rows_ = head_->exact_rows(context);
    out_ = context.arena.floats(head_->out.slot);
    return rows_.num_rows;
  }

  void run_item(int row, const ThreadContext& thread) override {
    if (head_->is_whole_wanted()) return;
    const PackedWeight& exact = head_->screen.exact();
    auto* values = reinterpret_cast<uint16_t*>(thread.scratch);
    unpack_bf16_row(rows_, row, values);
    const BestOutputs<float> kept(out_ + int64_t{row} * head_->out.width, exact.num_outputs);
    finish_candidates({exact, values, kept}, head_->bounds.of_row(row),
                      head_->least[static_cast<size_t>(row)]);
  }

  size_t scratch_bytes() const override {
    return packed_rows_bytes(RowFormat::BF16, 1, head_->screen.exact().num_inputs);
  }

 private:
  std::shared_ptr<ScreenedHead> head_;
  PackedRows rows_;
  float* out_ = nullptr;
};

// The best of the whole product, where the candidates were too many.
class WholeHeadInstruction final : public Instruction {
 public:
  explicit WholeHeadInstruction(std::shared_ptr<ScreenedHead> head) : head_(std::move(head)) {}

  int prepare(const StepContext& context) override {
    if (!context.step.wants_best_only || context.step.num_rows == 0) return 0;
    gemm_ = {head_->screen.exact(), head_->exact_rows(context), {}};
    gemm_.epilogue.kind = EpilogueKind::Best;
    gemm_.epilogue.out = context.arena.floats(head_->out.slot);
    gemm_.epilogue.out_stride = static_cast<size_t>(head_->out.width);
    plan_ = plan_gemm(gemm_, context.num_threads);
    num_parts_ = std::min(plan_.num_items, kPartsPerThread * context.num_threads);
    return num_parts_;
  }

  void run_item(int part, const ThreadContext& thread) override {
    if (!head_->is_whole_wanted()) return;
    const int end = part_start(plan_.num_items, part + 1, num_parts_);
    for (int item = part_start(plan_.num_items, part, num_parts_); item < end; ++item) {
      run_gemm_item(gemm_, plan_, item, thread.scratch);
    }
  }

 private:
  static constexpr int kPartsPerThread = 8;  // few, since mostly nothing is to be done

  std::shared_ptr<ScreenedHead> head_;
  Gemm gemm_;
  GemmPlan plan_;
  int num_parts_ = 0;
};

}  // namespace kvloom
