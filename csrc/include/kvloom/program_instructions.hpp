// The instructions of a program: each binds one kernel to slots of the arena.
#pragma once

#include "kvloom/elementwise.hpp"
#include "kvloom/embedding.hpp"
#include "kvloom/gemm.hpp"
#include "kvloom/norm.hpp"
#include "kvloom/pack_rows.hpp"
#include "kvloom/program.hpp"

namespace kvloom {

// Where f32 rows lie in the arena.
struct Operand {
  int slot = 0;
  RowCount rows = RowCount::Tokens;
  int width = 0;  // floats per row, which follow each other
};

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

// Norms of f32 rows: over whole rows, or over each head of a row.
class RmsNormInstruction final : public Instruction {
 public:
  RmsNormInstruction(const NormWeight& norm, Operand x, Operand out)
      : x_(x), out_(out), rows_per_row_(x.width / norm.size) {
    args_.weight = norm.values;
    args_.size = args_.x_stride = args_.y_stride = norm.size;
    args_.eps = norm.eps;
  }

  int prepare(const StepContext& context) override {
    args_.x = context.arena.floats(x_.slot);
    args_.y = context.arena.floats(out_.slot);
    args_.num_rows = int64_t{num_rows_of(context.step, x_.rows)} * rows_per_row_;
    return static_cast<int>(rms_norm_num_items(args_));
  }

  void run_item(int item, const ThreadContext&) override { rms_norm_run_item(args_, item); }

 private:
  RmsNormArgs args_{};
  Operand x_, out_;
  int rows_per_row_;
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
    input_ = context.arena.floats(x_.slot);
    return rows_.num_rows == 0 ? 0 : num_tiles(rows_.num_rows);
  }

  // One tile, so that no two threads write the same cache lines.
  void run_item(int item, const ThreadContext& thread) override {
    const int first = first_row_of_tile(rows_.num_rows, item);
    const int end = first_row_of_tile(rows_.num_rows, item + 1);
    float* const normalised = reinterpret_cast<float*>(thread.scratch);
    for (int row = first; row < end; ++row) {
      const float* x = input_ + static_cast<size_t>(row) * x_.width;
      if (norm_.values != nullptr) {
        rms_norm_row(x, norm_.values, norm_.size, norm_.eps, normalised);
        x = normalised;
      }
      pack_row(rows_, row, x);
    }
  }

  size_t scratch_bytes() const override { return norm_.size * sizeof(float); }

 private:
  Operand x_;
  NormWeight norm_;
  Format weight_format_;
  int out_slot_;
  PackedRows rows_;
  const float* input_ = nullptr;
};

// What follows a matrix product. `out.rows` are those of x as well.
struct ProductResult {
  EpilogueKind kind = EpilogueKind::Store;
  Activation activation = Activation::Silu;
  const float* bias = nullptr;
  Operand out;                      // with GatedPack: the slot of packed rows
  Format packed_for = Format::F32;  // GatedPack: the weight that reads them
};

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
    plan_ = plan_gemm(gemm_, context.num_threads);
    return plan_.num_items;
  }

  void run_item(int item, const ThreadContext& thread) override {
    run_gemm_item(gemm_, plan_, item, thread.scratch);
  }

  size_t scratch_bytes() const override {
    return gemm_scratch_bytes(gemm_.weight.format, gemm_.weight.num_inputs);
  }

 private:
  int x_slot_;
  ProductResult result_;
  Gemm gemm_;
  GemmPlan plan_;
};

// out = a + b, where out may lie where a or b lies.
class AddInstruction final : public Instruction {
 public:
  AddInstruction(int a_slot, int b_slot, Operand out)
      : a_slot_(a_slot), b_slot_(b_slot), out_(out) {}

  int prepare(const StepContext& context) override {
    args_.a = context.arena.floats(a_slot_);
    args_.b = context.arena.floats(b_slot_);
    args_.out = context.arena.floats(out_.slot);
    args_.size = int64_t{num_rows_of(context.step, out_.rows)} * out_.width;
    return static_cast<int>(add_num_items(args_));
  }

  void run_item(int item, const ThreadContext&) override { add_run_item(args_, item); }

 private:
  AddArgs args_{};
  int a_slot_, b_slot_;
  Operand out_;
};

// The rows of x that logits are wanted of.
class SelectRowsInstruction final : public Instruction {
 public:
  SelectRowsInstruction(Operand x, int out_slot) : x_(x), out_slot_(out_slot) {
    args_.x_stride = args_.out_stride = args_.size = x.width;
  }

  int prepare(const StepContext& context) override {
    args_.x = context.arena.floats(x_.slot);
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
