// The instructions of an attention layer: store keys and values, then attend.
#pragma once

#include <memory>
#include <vector>

#include "kvloom/attention.hpp"
#include "kvloom/attention_ahead.hpp"
#include "kvloom/kv_write.hpp"
#include "kvloom/program.hpp"

namespace kvloom {

// Bytes that AttentionGroup allocates.
inline size_t attention_group_bytes(const AttentionShape& shape, const AttentionLimits& limits) {
  const AttentionPlan plan(shape, limits);
  return attention_states_floats(plan) * sizeof(float) +
         attention_scratch_bytes(shape) * static_cast<size_t>(limits.num_threads);
}

// What layers of one KV cache group with equal heads share: the plan of a step's attention.
class AttentionGroup final : public StepPlanner {
 public:
  AttentionGroup(int group, const AttentionShape& shape, const AttentionLimits& limits)
      : group_(group),
        num_threads_(limits.num_threads),
        plan_(shape, limits),
        states_(attention_states_floats(plan_) * sizeof(float)),
        scratch_(attention_scratch_bytes(shape) * static_cast<size_t>(limits.num_threads)) {}

  void plan(const Step& step) override {
    const KVGroupStep& group = step.groups[static_cast<size_t>(group_)];
    plan_.build({step.num_requests, step.query_start, step.seq_lens, group.block_table,
                 group.table_width, group.first_columns});
    far_blocks_.clear();
    add_far_blocks(plan_, num_threads_, &far_blocks_);
  }

  int group() const { return group_; }
  const AttentionPlan& plan() const { return plan_; }
  const std::vector<int32_t>& far_blocks() const { return far_blocks_; }
  float* states() const { return reinterpret_cast<float*>(states_.data()); }
  char* scratch() const { return reinterpret_cast<char*>(scratch_.data()); }

 private:
  int group_, num_threads_;
  AttentionPlan plan_;
  std::vector<int32_t> far_blocks_;
  Region states_, scratch_;
};

// f32 heads in the arena: they follow each other from float `first` of rows `stride` floats apart.
struct Columns {
  int slot = -1;  // -1: there are none
  int first = 0;
  int stride = 0;

  HeadRows rows(const Arena& arena) const {
    if (slot < 0) return {};
    return {arena.floats(slot) + first, stride};
  }
};

struct QueryKeyValue {
  Columns q, k, v;
};

// Heads q, k and v -> queries for attention, and keys and values in their slots. Without k nothing
// is stored; latent layouts have no v.
class StoreQkvInstruction final : public Instruction {
 public:
  StoreQkvInstruction(const AttentionGroup& group, const KVStorage& storage,
                      const QueryKeyForm& form, const QueryKeyValue& heads, int q_slot)
      : group_(group.group()), heads_(heads), q_slot_(q_slot) {
    const AttentionShape& shape = group.plan().shape();
    args_.layout = shape.layout;
    args_.storage = storage;
    args_.num_heads = shape.num_heads;
    args_.form = form;
  }

  int prepare(const StepContext& context) override {
    args_.num_tokens = context.step.num_tokens;
    args_.q = heads_.q.rows(context.arena);
    args_.k = heads_.k.rows(context.arena);
    args_.v = heads_.v.rows(context.arena);
    args_.positions = context.step.positions;
    args_.slots = context.step.groups[static_cast<size_t>(group_)].slots;
    args_.q_out = context.arena.bytes(q_slot_);
    return kv_write_num_items(args_);
  }

  void run_item(int item, const ThreadContext&) override { kv_write_run_item(args_, item); }

 private:
  KVWriteArgs args_{};
  int group_;
  QueryKeyValue heads_;
  int q_slot_;
};

// Queries over the stored blocks -> f32 rows.
class AttendInstruction final : public Instruction {
 public:
  AttendInstruction(const AttentionGroup& group, const KVStorage& storage,
                    const AttentionScoring& scoring, int q_slot, int out_slot)
      : group_(group),
        q_slot_(q_slot),
        out_slot_(out_slot),
        far_reads_(storage.base, storage.block_stride_bytes,
                   group.plan().shape().layout.block_bytes(), group.far_blocks()) {
    const AttentionShape& shape = group.plan().shape();
    args_.plan = &group.plan();
    args_.storage = storage;
    args_.out.stride = int64_t{shape.num_heads} * shape.layout.head_size_v;
    args_.out.is_bf16 = false;
    args_.states = group.states();
    args_.scratch = group.scratch();
    args_.scoring = scoring;
  }

  int prepare(const StepContext& context) override {
    args_.q = context.arena.bytes(q_slot_);
    args_.out.rows = context.arena.bytes(out_slot_);
    return group_.plan().num_items();
  }

  // A thread takes items in their order, so it most likely goes on with the one behind this.
  void run_item(int item, const ThreadContext& thread) override {
    const int next = item + 1 < group_.plan().num_items() ? item + 1 : -1;
    attention_run_item(args_, item, next, thread.index);
  }

  const FarReads* far_reads() const override { return &far_reads_; }

 private:
  const AttentionGroup& group_;
  AttentionArgs args_{};
  int q_slot_, out_slot_;
  FarReads far_reads_;
};

}  // namespace kvloom
