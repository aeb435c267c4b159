// One split of an item's keys: where they lie.
#pragma once

#include "kvloom/attention_formats.hpp"
#include "kvloom/attention_latent.hpp"
#include "kvloom/attention_plan.hpp"

namespace kvloom {

struct AttentionOutput {
  void* rows;      // [num_tokens, num_heads * head_size_v]
  int64_t stride;  // numbers from row to row
  bool is_bf16;    // else f32
};

// What a layer does to its scores. They are in base 2, and so are these: a model's numbers times
// log2(e).
struct AttentionScoring {
  float soft_cap = 0.0f;         // scores become soft_cap * tanh(score / soft_cap); 0: they do not
  const float* sinks = nullptr;  // [num_heads] a score without a value, of each row once; or none
};

struct AttentionArgs {
  const AttentionPlan* plan;  // built for this step
  KVStorage storage;          // of this layer
  const void* q;              // as kv_write writes it
  AttentionOutput out;
  float* states;  // [attention_states_floats(plan)] shared by the threads; layers may share it
  char* scratch;  // [num_threads][attention_scratch_bytes(shape)]
  AttentionScoring scoring = {};
};

inline size_t attention_states_floats(const AttentionPlan& plan) {
  const int floats = plan.shape().layout.head_size_v + kStateExtraFloats;
  return static_cast<size_t>(plan.max_num_states()) * static_cast<size_t>(floats);
}

// ---- Where keys and values lie ----

// Sub-blocks [first, end) of a split.
struct SubBlockRange {
  int first;
  int end;
};

// Those of a split that hold some of the keys.
inline SubBlockRange sub_blocks_of(KeyRange keys, int split) {
  const int start = split * kSplitKeys;
  const int first = std::max(keys.first - start, 0), end = std::min(keys.end - start, kSplitKeys);
  return {first / kSubBlockTokens, static_cast<int>(cdiv(std::max(end, 0), kSubBlockTokens))};
}

// The keys of a split's sub-blocks: `keys` has one entry for each of the range.
inline void find_keys(const AttentionArgs& args, const AttentionItem& item, int split,
                      SubBlockRange range, const char** keys) {
  const AttentionStep& step = args.plan->step();
  const KVLayout& layout = args.plan->shape().layout;
  const int32_t* blocks = step.block_table + item.request * step.table_stride;
  const int first = split * kSplitKeys + range.first * kSubBlockTokens;
  const int32_t* block = blocks + first / layout.block_size - step.first_column(item.request);
  int token = first % layout.block_size;
  for (int i = range.first; i < range.end; ++i) {
    *keys++ = sub_block(layout, args.storage, *block, item.kv_head, token);
    token += kSubBlockTokens;
    if (token == layout.block_size) {
      token = 0;
      ++block;
    }
  }
}

// Zeros for the tokens of a sub-block from num_tokens on: what is left there by earlier requests
// may be a NaN, and not even a weight of 0 would silence it.
inline void clear_tail(const KVLayout& layout, int num_tokens, char* values) {
  const int size = layout.head_size_v;
  for (int token = num_tokens; token < kSubBlockTokens; ++token) {
    if (layout.format == KVFormat::F32) {
      std::memset(values + token * size * 4, 0, static_cast<size_t>(size) * 4);
      continue;
    }
    char* numbers = values + token / 2 * size * 4 + token % 2 * 2;
    for (int i = 0; i < size; ++i) std::memset(numbers + i * 4, 0, 2);
  }
}

// The values of a latent layout.
inline void view_latent_values(const KVLayout& layout, char* memory, SplitView* view) {
  for (size_t i = static_cast<size_t>(view->first); i < static_cast<size_t>(view->end); ++i) {
    char* values = memory + i * layout.value_bytes();
    latent_values(layout, view->keys[i], values);
    view->values[i] = values;
  }
}

// What an item reads of a split. `Kernel` knows the format.
template <class Kernel>
SplitView view_split(const AttentionArgs& args, const AttentionItem& item, int split,
                     const AttentionScratch& scratch) {
  const KVLayout& layout = args.plan->shape().layout;
  const KeyRange keys = args.plan->visible_keys(item);
  const SubBlockRange range = sub_blocks_of(keys, split);
  SplitView view;
  view.first = range.first;
  view.end = range.end;
  find_keys(args, item, split, range, view.keys.data() + range.first);
  if (layout.is_latent) {
    view_latent_values(layout, scratch.latent, &view);
  } else {
    for (size_t i = static_cast<size_t>(range.first); i < static_cast<size_t>(range.end); ++i) {
      view.values[i] = view.keys[i] + layout.key_bytes();
    }
  }
  const int num_unwritten = split * kSplitKeys + range.end * kSubBlockTokens - keys.end;
  if (Kernel::kHasTail && num_unwritten > 0) {
    const size_t last = static_cast<size_t>(range.end - 1);
    std::memcpy(scratch.tail, view.values[last], layout.value_bytes());
    clear_tail(layout, kSubBlockTokens - num_unwritten, scratch.tail);
    view.values[last] = scratch.tail;
  }
  return view;
}

}  // namespace kvloom
