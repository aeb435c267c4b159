// The instructions of a program that work on f32 rows as they are, without packing them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvloom/program_instructions.hpp"
#include "kvloom/rope.hpp"
#include "kvloom/rowwise.hpp"

namespace kvloom {

// How rows are dealt to items: some rows each, or parts of a row that is long.
struct RowItems {
  int64_t num_rows = 0;
  int64_t rows_per_item = 1;
  int64_t parts_per_row = 1;

  int count() const { return static_cast<int>(cdiv(num_rows, rows_per_item) * parts_per_row); }
};

// About a microsecond each. A row may be cut only where its values need nothing of each other.
inline RowItems deal_rows(int64_t num_rows, int64_t width, bool can_cut_rows) {
  constexpr int64_t kItemValues = 4096;
  RowItems items;
  items.num_rows = num_rows;
  items.rows_per_item = std::max<int64_t>(1, kItemValues / width);
  if (can_cut_rows) items.parts_per_row = std::max<int64_t>(1, width / kItemValues);
  return items;
}

// The second operand of a map: a value of its own, or a weight or number that all rows share.
struct MapSecond {
  Operand operand;                // where there is no shared one
  const float* shared = nullptr;  // [size], or a single value
  bool is_one = false;            // one value for each run of a's, or for all
};

// out = map(a, b), where a row of a and of out is cut into runs of `size`.
class MapInstruction final : public Instruction {
 public:
  MapInstruction(MapKind kind, Operand a, const MapSecond& b, int size, int out_slot)
      : kind_(kind), a_(a), b_(b), size_(size), out_slot_(out_slot) {}
  // The second operand is a number of its own.
  MapInstruction(MapKind kind, Operand a, float number, int out_slot)
      : kind_(kind), a_(a), size_(a.width), out_slot_(out_slot), number_(number) {
    b_.shared = &number_;
    b_.is_one = true;
  }

  int prepare(const StepContext& context) override {
    x_ = floats_of(context.arena, a_);
    y_ = b_.shared != nullptr ? b_.shared : floats_of(context.arena, b_.operand);
    out_ = context.arena.floats(out_slot_);
    items_ = deal_rows(num_rows_of(context.step, a_.rows), a_.width, size_ == a_.width);
    return items_.count();
  }

  void run_item(int item, const ThreadContext&) override {
    const int64_t block = item / items_.parts_per_row, part = item % items_.parts_per_row;
    const int64_t first = block * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    const int64_t start = size_ * part / items_.parts_per_row;
    const int64_t count = size_ * (part + 1) / items_.parts_per_row - start;
    const int64_t b_stride = b_.shared != nullptr ? 0 : b_.operand.row_stride();
    const int64_t b_run = b_.shared != nullptr ? 0 : (b_.is_one ? 1 : size_);
    for (int64_t row = first; row < end; ++row) {
      for (int64_t run = 0; run * size_ < a_.width; ++run) {
        const float* a = x_ + row * a_.row_stride() + run * size_ + start;
        const float* b = y_ + row * b_stride + run * b_run + (b_.is_one ? 0 : start);
        float* out = out_ + row * a_.width + run * size_ + start;
        map_run(kind_, a, b, b_.is_one, count, out);
      }
    }
  }

 private:
  MapKind kind_;
  Operand a_;
  MapSecond b_;
  int64_t size_;
  int out_slot_;
  float number_ = 0.0f;
  const float *x_ = nullptr, *y_ = nullptr;
  float* out_ = nullptr;
  RowItems items_;
};

// What is done to a run as a whole.
enum class RunKind {
  RmsNorm,      // weight, number = eps
  LayerNorm,    // weight, number = eps
  AddNorm,      // y + RmsNorm of x; weight, number = eps
  GaussianTop,  // number = num_deviations
  MatchRms,     // y is the target; number = the least rms
  Gated,        // activation; x is gate and up side by side: a run of out is half as long
};

struct RunOperation {
  RunKind kind = RunKind::RmsNorm;
  int size = 0;                   // of a run of x
  const float* weight = nullptr;  // [size]
  float number = 0.0f;
  Activation activation = Activation::Silu;
};

// Runs of x, and of y where the operation has a second operand, to runs of out.
class RunInstruction final : public Instruction {
 public:
  RunInstruction(const RunOperation& operation, Operand x, Operand y, int out_slot)
      : operation_(operation), x_(x), y_(y), out_slot_(out_slot) {}

  int prepare(const StepContext& context) override {
    from_ = floats_of(context.arena, x_);
    other_ = floats_of(context.arena, y_);
    out_ = context.arena.floats(out_slot_);
    items_ = deal_rows(num_rows_of(context.step, x_.rows), x_.width, false);
    return items_.count();
  }

  void run_item(int item, const ThreadContext&) override {
    const int64_t first = item * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    const int64_t out_size = operation_.kind == RunKind::Gated ? size() / 2 : size();
    const int64_t num_runs = x_.width / size();
    for (int64_t row = first; row < end; ++row) {
      for (int64_t run = 0; run < num_runs; ++run) {
        run_one(from_ + row * x_.row_stride() + run * size(),
                other_ + row * y_.row_stride() + run * size(),
                out_ + (row * num_runs + run) * out_size);
      }
    }
  }

 private:
  int64_t size() const { return operation_.size; }

  void run_one(const float* x, const float* y, float* out) const {
    const RunOperation& o = operation_;
    switch (o.kind) {
      case RunKind::RmsNorm:
        return rms_norm_row(x, o.weight, size(), o.number, out);
      case RunKind::LayerNorm:
        return layer_norm_run(x, o.weight, size(), o.number, out);
      case RunKind::AddNorm:
        return add_norm_run(y, x, {o.weight, size(), o.number}, out);
      case RunKind::GaussianTop:
        return gaussian_top_run(x, o.number, size(), out);
      case RunKind::MatchRms:
        return match_rms_run(x, y, o.number, size(), out);
      case RunKind::Gated:
        return gated_run(o.activation, x, x + size() / 2, size() / 2, out);
    }
  }

  RunOperation operation_;
  Operand x_, y_;
  int out_slot_;
  const float *from_ = nullptr, *other_ = nullptr;
  float* out_ = nullptr;
  RowItems items_;
};

// Some columns of each run of a row, and where they go.
struct ColumnCopy {
  Operand from;      // its first run
  int from_run = 0;  // floats from run to run
  Operand to;
  int to_run = 0;
  int size = 0;  // floats of each run
};

// Columns put side by side, or taken apart.
class CopyInstruction final : public Instruction {
 public:
  CopyInstruction(std::vector<ColumnCopy> copies, int num_runs)
      : copies_(std::move(copies)), num_runs_(num_runs) {}

  int prepare(const StepContext& context) override {
    arena_ = &context.arena;
    int64_t width = 0;
    for (const ColumnCopy& copy : copies_) width += int64_t{copy.size} * num_runs_;
    items_ = deal_rows(num_rows_of(context.step, copies_[0].from.rows), width, false);
    return items_.count();
  }

  void run_item(int item, const ThreadContext&) override {
    const int64_t first = item * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    for (const ColumnCopy& copy : copies_) {
      const float* from = floats_of(*arena_, copy.from);
      float* to = floats_of(*arena_, copy.to);
      for (int64_t row = first; row < end; ++row) {
        for (int run = 0; run < num_runs_; ++run) {
          const float* x = from + row * copy.from.row_stride() + int64_t{run} * copy.from_run;
          std::copy(x, x + copy.size, to + row * copy.to.row_stride() + int64_t{run} * copy.to_run);
        }
      }
    }
  }

 private:
  std::vector<ColumnCopy> copies_;
  int num_runs_;
  const Arena* arena_ = nullptr;
  RowItems items_;
};

// Heads rotated by their positions, or rows times a factor of their positions.
struct PositionTable {
  const float* rows = nullptr;  // [max_positions, width]
  int width = 0;                // cos, then sin of each pair; 1 for a factor
  bool is_interleaved = false;
};

class RotateInstruction final : public Instruction {
 public:
  RotateInstruction(const PositionTable& table, Operand x, int head_size, int out_slot)
      : table_(table), x_(x), head_size_(head_size), out_slot_(out_slot) {}

  int prepare(const StepContext& context) override {
    from_ = floats_of(context.arena, x_);
    out_ = context.arena.floats(out_slot_);
    positions_ = context.step.positions;
    items_ = deal_rows(context.step.num_tokens, x_.width, false);
    return items_.count();
  }

  void run_item(int item, const ThreadContext&) override {
    const int64_t first = item * items_.rows_per_item;
    const int64_t end = std::min(first + items_.rows_per_item, items_.num_rows);
    for (int64_t row = first; row < end; ++row) {
      const float* x = from_ + row * x_.row_stride();
      float* out = out_ + row * x_.width;
      const float* entry = table_.rows + positions_[row] * table_.width;
      if (table_.width == 1) {
        map_run(MapKind::Multiply, x, entry, true, x_.width, out);
        continue;
      }
      std::copy(x, x + x_.width, out);
      for (int64_t head = 0; head < x_.width; head += head_size_) rotate(out + head, entry);
    }
  }

 private:
  void rotate(float* head, const float* entry) const {
    if (table_.is_interleaved) return rotate_neighbours(head, entry, table_.width / 2, head);
    rotate_head(head, entry, table_.width / 2, head);
  }

  PositionTable table_;
  Operand x_;
  int head_size_, out_slot_;
  const float* from_ = nullptr;
  float* out_ = nullptr;
  const int64_t* positions_ = nullptr;
  RowItems items_;
};

}  // namespace kvloom
