// The instructions of an attention layer: store keys and values, then attend.
#pragma once

#include <memory>

#include "kvloom/attention.hpp"
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
        plan_(shape, limits),
        states_(attention_states_floats(plan_) * sizeof(float)),
        scratch_(attention_scratch_bytes(shape) * static_cast<size_t>(limits.num_threads)) {}

  void plan(const Step& step) override {
    const KVGroupStep& group = step.groups[static_cast<size_t>(group_)];
    plan_.build(
        {step.num_requests, step.query_start, step.seq_lens, group.block_table, group.table_width});
  }

  int group() const { return group_; }
  const AttentionPlan& plan() const { return plan_; }
  float* states() const { return reinterpret_cast<float*>(states_.data()); }
  char* scratch() const { return reinterpret_cast<char*>(scratch_.data()); }

 private:
  int group_;
  AttentionPlan plan_;
  Region states_, scratch_;
};

// How q and k are rotated and normalised, and q scaled, before they are stored.
struct QueryKeyForm {
  const float* rotations = nullptr;  // [max_positions, 2 x num_pairs] cos, then sin
  int num_pairs = 0;
  const float* q_norm = nullptr;  // [head_size], or none
  const float* k_norm = nullptr;
  float norm_eps = 0.0f;
  float q_scale = 1.0f;  // softmax scale x log2(e)
};

// Columns q | k | v of a projection -> queries for attention, and keys and values in their slots.
class StoreQkvInstruction final : public Instruction {
 public:
  StoreQkvInstruction(const AttentionGroup& group, const KVStorage& storage,
                      const QueryKeyForm& form, int qkv_slot, int q_slot)
      : group_(group.group()), qkv_slot_(qkv_slot), q_slot_(q_slot) {
    const AttentionShape& shape = group.plan().shape();
    const KVLayout& layout = shape.layout;
    args_.layout = layout;
    args_.storage = storage;
    args_.num_heads = shape.num_heads;
    args_.qkv_stride = (shape.num_heads + layout.num_kv_heads) * layout.head_size +
                       layout.num_kv_heads * layout.head_size_v;
    args_.rotations = form.rotations;
    args_.num_pairs = form.num_pairs;
    args_.q_norm = form.q_norm;
    args_.k_norm = form.k_norm;
    args_.norm_eps = form.norm_eps;
    args_.q_scale = form.q_scale;
  }

  int prepare(const StepContext& context) override {
    args_.num_tokens = context.step.num_tokens;
    args_.qkv = context.arena.floats(qkv_slot_);
    args_.positions = context.step.positions;
    args_.slots = context.step.groups[static_cast<size_t>(group_)].slots;
    args_.q = context.arena.bytes(q_slot_);
    return kv_write_num_items(args_);
  }

  void run_item(int item, const ThreadContext&) override { kv_write_run_item(args_, item); }

 private:
  KVWriteArgs args_{};
  int group_, qkv_slot_, q_slot_;
};

// Queries over the stored blocks -> f32 rows.
class AttendInstruction final : public Instruction {
 public:
  AttendInstruction(const AttentionGroup& group, const KVStorage& storage, int q_slot, int out_slot)
      : group_(group), q_slot_(q_slot), out_slot_(out_slot) {
    const AttentionShape& shape = group.plan().shape();
    args_.plan = &group.plan();
    args_.storage = storage;
    args_.out.stride = int64_t{shape.num_heads} * shape.layout.head_size_v;
    args_.out.is_bf16 = false;
    args_.states = group.states();
    args_.scratch = group.scratch();
  }

  int prepare(const StepContext& context) override {
    args_.q = context.arena.bytes(q_slot_);
    args_.out.rows = context.arena.bytes(out_slot_);
    return group_.plan().num_items();
  }

  void run_item(int item, const ThreadContext& thread) override {
    attention_run_item(args_, item, -1, thread.index);
  }

 private:
  const AttentionGroup& group_;
  AttentionArgs args_{};
  int q_slot_, out_slot_;
};

}  // namespace kvloom
