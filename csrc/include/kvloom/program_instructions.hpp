// The instructions of a program: each binds one kernel to slots of the arena.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvloom/embedding.hpp"
#include "kvloom/gemm.hpp"
#include "kvloom/norm.hpp"
#include "kvloom/pack_rows.hpp"
#include "kvloom/program.hpp"
#include "kvloom/select_rows.hpp"

namespace kvloom {

// Where f32 rows lie in the arena: whole ones, or columns of wider ones.
struct Operand {
  int slot = 0;
  RowCount rows = RowCount::Tokens;
  int width = 0;   // floats per row, which follow each other
  int first = 0;   // float of the wider row where they begin
  int stride = 0;  // floats from row to row; 0 where rows follow each other

  int64_t row_stride() const { return stride == 0 ? width : stride; }
};

inline float* floats_of(const Arena& arena, const Operand& operand) {
  return arena.floats(operand.slot) + operand.first;
}

// Token embeddings: rows of a packed table.
class EmbeddingInstruction final : public Instruction {
 public:
  EmbeddingInstruction(const PackedWeight& table, int first_row, Operand out) : out_(out) {
    args_.table = table;
    args_.first_row = first_row;
    args_.out_stride = out.width;
  }

  int prepare(const StepContext& context) override {
    args_.token_ids = context.step.token_ids;
    args_.num_tokens = context.step.num_tokens;
    args_.out = context.arena.floats(out_.slot);
    return static_cast<int>(embedding_num_items(args_));
  }

  void run_item(int item, const ThreadContext&) override { embedding_run_item(args_, item); }

 private:
  EmbeddingArgs args_{};
  Operand out_;
};

struct NormWeight {
  const float* values = nullptr;  // [size]
  int size = 0;
  float eps = 0.0f;
};

// Rows of x, normalised if a norm is given, in the packed form that a weight's kernel reads.
class PackInstruction final : public Instruction {
 public:
  PackInstruction(Operand x, Format weight_format, int out_slot)
      : x_(x), weight_format_(weight_format), out_slot_(out_slot) {}
  PackInstruction(Operand x, const NormWeight& norm, Format weight_format, int out_slot)
      : x_(x), norm_(norm), weight_format_(weight_format), out_slot_(out_slot) {}

  int prepare(const StepContext& context) override {
    rows_.num_rows = num_rows_of(context.step, x_.rows);
    rows_.num_inputs = x_.width;
    rows_.format = row_format_for(weight_format_, rows_.num_rows);
    rows_.data = context.arena.bytes(out_slot_);
    input_ = floats_of(context.arena, x_);
    if (rows_.num_rows == 0) return 0;
    const int tiles = num_tiles(rows_.num_rows);
    const int tile_values = rows_.num_rows / tiles * x_.width;
    const auto wanted = static_cast<int>(cdiv(2 * context.num_threads, tiles));
    num_parts_ = std::max(1, std::min(wanted, tile_values / kItemValues));
    return tiles * num_parts_;
  }

  // Some groups of a tile, so that no two threads write the same cache lines. Each part of a tile
  // finds the mean of its rows anew: less work than to share it.
  void run_item(int item, const ThreadContext&) override {
    const int tile = item / num_parts_, part = item % num_parts_;
    const int groups = num_groups(x_.width);
    const GroupRange range{part_start(groups, part, num_parts_),
                           part_start(groups, part + 1, num_parts_)};
    if (norm_.values == nullptr) return pack_tile(rows_, tile, range, input_, x_.row_stride());
    const RmsNorm norm{norm_.values, norm_.size, norm_.eps};
    rms_norm_pack_tile(input_, x_.row_stride(), norm, rows_, tile, range);
  }

 private:
  static constexpr int kItemValues = 2048;  // about a microsecond

  Operand x_;
  NormWeight norm_;
  Format weight_format_;
  int out_slot_;
  PackedRows rows_;
  int num_parts_ = 1;  // of a tile
  const float* input_ = nullptr;
};

// What follows a matrix product. `out.rows` are those of x as well.
struct ProductResult {
  EpilogueKind kind = EpilogueKind::Store;
  Activation activation = Activation::Silu;
  const float* bias = nullptr;
  Operand out;                      // with GatedPack: the slot of packed rows
  bool are_logits = false;          // what is kept of them is up to the step
  bool are_screened = false;        // others find the best of them, if a step wants no more
  Format packed_for = Format::F32;  // GatedPack: the weight that reads them
};

inline MemoryRange weight_range(const PackedWeight& weight) {
  const int panels = num_panels(weight.order, weight.num_outputs);
  return {reinterpret_cast<uintptr_t>(group_at(weight, 0, 0)),
          reinterpret_cast<uintptr_t>(group_at(weight, panels, 0))};
}

// x W^T and its epilogue, from packed rows.
class GemmInstruction final : public Instruction {
 public:
  GemmInstruction(const PackedWeight& weight, int x_slot, const ProductResult& result)
      : x_slot_(x_slot), result_(result) {
    gemm_.weight = weight;
    gemm_.epilogue.kind = result.kind;
    gemm_.epilogue.activation = result.activation;
    gemm_.epilogue.bias = result.bias;
    gemm_.epilogue.out_stride = static_cast<size_t>(result.out.width);
  }

  int prepare(const StepContext& context) override {
    const int num_rows = num_rows_of(context.step, result_.out.rows);
    if (num_rows == 0) return 0;
    if (result_.are_screened && context.step.wants_best_only) return 0;
    gemm_.rows.num_rows = num_rows;
    gemm_.rows.num_inputs = gemm_.weight.num_inputs;
    gemm_.rows.format = row_format_for(gemm_.weight.format, num_rows);
    gemm_.rows.data = context.arena.bytes(x_slot_);
    uint8_t* const out = context.arena.bytes(result_.out.slot);
    if (result_.kind == EpilogueKind::GatedPack) {
      gemm_.epilogue.packed = {row_format_for(result_.packed_for, num_rows), num_rows,
                               result_.out.width, out};
    } else {
      gemm_.epilogue.out = reinterpret_cast<float*>(out);
    }
    if (result_.are_logits) {
      const bool keeps_best = context.step.wants_best_only;
      gemm_.epilogue.kind = keeps_best ? EpilogueKind::Best : EpilogueKind::Store;
    }
    plan_ = plan_gemm(gemm_, context.num_threads);
    return plan_.num_items;
  }

  void run_item(int item, const ThreadContext& thread) override {
    run_gemm_item(gemm_, plan_, item, thread.scratch, far_.of_item(item, plan_.num_items));
  }

  size_t scratch_bytes() const override {
    return gemm_scratch_bytes(gemm_.weight.format, gemm_.weight.num_inputs);
  }

  MemoryRange weights() const override { return weight_range(gemm_.weight); }

  int64_t num_spare_fetches() const override {
    return num_panels(gemm_.weight.order, gemm_.weight.num_outputs);
  }

  void bring_near(const FarShare& share) override { far_ = share; }

 private:
  int x_slot_;
  ProductResult result_;
  Gemm gemm_;
  GemmPlan plan_;
  FarShare far_;
};

// The rows of x that logits are wanted of.
class SelectRowsInstruction final : public Instruction {
 public:
  SelectRowsInstruction(Operand x, int out_slot) : x_(x), out_slot_(out_slot) {
    args_.x_stride = x.row_stride();
    args_.out_stride = args_.size = x.width;
  }

  int prepare(const StepContext& context) override {
    args_.x = floats_of(context.arena, x_);
    args_.rows = context.step.logits_rows;
    args_.num_rows = context.step.num_rows;
    args_.out = context.arena.floats(out_slot_);
    return static_cast<int>(select_rows_num_items(args_));
  }

  void run_item(int item, const ThreadContext&) override { select_rows_run_item(args_, item); }

 private:
  SelectRowsArgs args_{};
  Operand x_;
  int out_slot_;
};

}  // namespace kvloom
