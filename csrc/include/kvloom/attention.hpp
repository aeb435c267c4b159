// Softmax attention over a paged cache, for any mixture of prompts in chunks and single tokens.
//
// A row's result is the same, bit for bit, whatever else is in the step: see attention_plan.hpp.
#pragma once

#include <limits>

#include "kvloom/attention_formats.hpp"
#include "kvloom/attention_plan.hpp"
#include "kvloom/softmax_state.hpp"

namespace kvloom {

struct AttentionOutput {
  void* rows;      // [num_tokens, num_heads * head_size_v]
  int64_t stride;  // numbers from row to row
  bool is_bf16;    // else f32
};

struct AttentionArgs {
  const AttentionPlan* plan;  // built for this step
  KVStorage storage;          // of this layer
  const void* q;              // as kv_write writes it
  AttentionOutput out;
  float* states;  // [attention_states_floats(plan)] shared by the threads; layers may share it
  char* scratch;  // [num_threads][attention_scratch_bytes(shape)]
};

// Which keys a query sees. Windows and chunks differ in the first one.
struct FullMask {
  static constexpr int32_t first_visible(int32_t /*position*/) { return 0; }
};

inline size_t attention_states_floats(const AttentionPlan& plan) {
  const int floats = plan.shape().layout.head_size_v + kStateExtraFloats;
  return static_cast<size_t>(plan.max_num_states()) * static_cast<size_t>(floats);
}

// ---- A split of an item ----

// The keys of a split's sub-blocks that hold positions below `limit`; returns their number.
inline int find_keys(const AttentionArgs& args, const AttentionItem& item, int split, int limit,
                     std::array<const char*, kSplitSubBlocks>* keys) {
  const AttentionStep& step = args.plan->step();
  const KVLayout& layout = args.plan->shape().layout;
  const int first = split * kSplitKeys;
  const int num_keys = std::min(limit - first, kSplitKeys);
  const int32_t* blocks = step.block_table + item.request * step.table_stride;
  const int32_t* block = blocks + first / layout.block_size;
  int token = first % layout.block_size;
  int count = 0;
  for (int key = 0; key < num_keys; key += kSubBlockTokens) {
    (*keys)[static_cast<size_t>(count++)] =
        sub_block(layout, args.storage, *block, item.kv_head, token);
    token += kSubBlockTokens;
    if (token == layout.block_size) {
      token = 0;
      ++block;
    }
  }
  return count;
}

// Positions below this are visible to some row of the item.
inline int row_limit(const AttentionArgs& args, const AttentionItem& item) {
  const int last_row = item.first_row + item.num_rows - 1;
  return args.plan->step().num_computed(item.request) +
         last_row / args.plan->shape().heads_per_kv() + 1;
}

// Values of the last sub-block, with zeros for the tokens from num_tokens on: what is left there by
// earlier requests may be a NaN, and not even a weight of 0 would silence it.
inline void copy_tail(const KVLayout& layout, const char* values, int num_tokens, char* tail) {
  std::memcpy(tail, values, layout.value_bytes());
  const int size = layout.head_size_v;
  for (int token = num_tokens; token < kSubBlockTokens; ++token) {
    if (layout.format == KVFormat::F32) {
      std::memset(tail + token * size * 4, 0, static_cast<size_t>(size) * 4);
      continue;
    }
    char* numbers = tail + token / 2 * size * 4 + token % 2 * 2;
    for (int i = 0; i < size; ++i) std::memset(numbers + i * 4, 0, 2);
  }
}

template <class Kernel>
SplitView view_split(const AttentionArgs& args, const AttentionItem& item, int split,
                     const AttentionScratch& scratch) {
  const KVLayout& layout = args.plan->shape().layout;
  const int limit = row_limit(args, item);
  SplitView view;
  view.num_sub_blocks = find_keys(args, item, split, limit, &view.keys);
  const size_t count = static_cast<size_t>(view.num_sub_blocks);
  for (size_t i = 0; i < count; ++i) view.values[i] = view.keys[i] + layout.key_bytes();
  if (const int rest = limit % kSubBlockTokens;
      Kernel::kCopiesTail && rest != 0 && limit < (split + 1) * kSplitKeys) {
    copy_tail(layout, view.values[count - 1], rest, scratch.tail);
    view.values[count - 1] = scratch.tail;
  }
  return view;
}

// The keys of a split that a row sees, counted from the split's first.
struct VisibleKeys {
  int first;
  int end;
};

template <class Mask>
VisibleKeys visible_keys(int position, int split) {
  const int first = split * kSplitKeys;
  return {std::max(Mask::first_visible(position) - first, 0), std::max(position + 1 - first, 0)};
}

constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// Overwrites the scores of unseen keys; returns the greatest score, kUnseen if no key is seen.
inline float mask_scores(float* scores, VisibleKeys visible, int num_scores) {
  vf32 greatest = broadcast(kUnseen);
  for (int i = 0; i < num_scores; i += kLanes) {
    vf32 x = load(scores + i);
    if (i < visible.first || i + kLanes > visible.end) {
      const vi32 is_seen = first_lanes(visible.end - i) & ~first_lanes(visible.first - i);
      x = is_seen ? x : broadcast(kUnseen);
      store(scores + i, x);
    }
    greatest = vmax(greatest, x);
  }
  return reduce_max(greatest);
}

// Turns the scores of a row, [num_scores], into weights 2^(score - max), 0 for unseen keys. Writes
// them over the scores, or as bf16 to `rounded`. Returns their sum.
template <bool kIsBf16>
float weigh_scores(float* scores, int num_scores, float max, uint16_t* rounded) {
  const vf32 base = broadcast(max == kUnseen ? 0.0f : max);
  vf32 total = {};
  for (int i = 0; i < num_scores; i += kLanes) {
    const vf32 x = load(scores + i) - base;
    const vf32 weight = kIsBf16 ? rough_exp2(x) : exp2(x);
    total = total + weight;
    if (kIsBf16) {
      store_bf16(rounded + i, weight);
    } else {
      store(scores + i, weight);
    }
  }
  return reduce_add(total);
}

// ---- An item ----

// Runs one item: Kernel knows the format of keys and values, Mask which keys a query sees.
template <class Kernel, class Mask>
class AttentionRun {
 public:
  // next: the item to fetch the first keys of meanwhile, or nullptr.
  AttentionRun(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next,
               char* memory)
      : args_(args),
        shape_(args.plan->shape()),
        item_(item),
        next_(next),
        scratch_(attention_scratch_at(shape_, memory)),
        size_(shape_.layout.head_size_v),
        num_tiles_(static_cast<int>(cdiv(item.num_rows, kTileRows))) {
    const AttentionStep& step = args.plan->step();
    const int heads = shape_.heads_per_kv();
    int query = item.first_row / heads, head = item.first_row % heads;
    for (int row = 0; row < item.num_rows; ++row) {
      rows_[row] = {step.num_computed(item.request) + query, step.query_start[item.request] + query,
                    item.kv_head * heads + head};
      if (++head == heads) {
        head = 0;
        ++query;
      }
    }
  }

  void run() const {
    const bool is_part = item_.merge >= 0;
    const RowStates totals = is_part ? part_states(item_.first_split)
                                     : states_at(scratch_.totals, item_.num_rows, size_);
    pack_queries();
    for (int split = item_.first_split; split < item_.last_split; ++split) {
      add_split(split, totals);
    }
    if (!is_part) {
      write_rows(totals);
    } else if (args_.plan->finish_part(item_.merge)) {
      const RowStates first = part_states(0);
      for (int split = 1; split < args_.plan->merge(item_.merge).num_splits; ++split) {
        merge_states(first, part_states(split), item_.num_rows, size_);
      }
      write_rows(first);
    }
  }

 private:
  // Rows are cut into tiles as equal as possible; rows count from the item's first.
  int first_row(int tile) const { return item_.num_rows * tile / num_tiles_; }

  AttentionTileArgs tile_args(int tile) const {
    const int first = first_row(tile);
    return {&shape_, &scratch_, scratch_.queries + first * shape_.layout.head_size * 4,
            first_row(tile + 1) - first};
  }

  // States of one split of rows that are spread over items.
  RowStates part_states(int split) const {
    const int first = args_.plan->merge(item_.merge).first_state + split * item_.num_rows;
    const size_t floats = static_cast<size_t>(size_ + kStateExtraFloats);
    return states_at(args_.states + static_cast<size_t>(first) * floats, item_.num_rows, size_);
  }

  void pack_queries() const {
    const size_t query_bytes = static_cast<size_t>(shape_.layout.head_size) * Kernel::kQueryBytes;
    for (int t = 0; t < num_tiles_; ++t) {
      for (int row = first_row(t); row < first_row(t + 1); ++row) {
        const int64_t head = int64_t{rows_[row].token} * shape_.num_heads + rows_[row].head;
        Kernel::pack(tile_args(t),
                     static_cast<const char*>(args_.q) + static_cast<size_t>(head) * query_bytes,
                     row - first_row(t));
      }
    }
  }

  void add_split(int split, const RowStates& totals) const {
    SplitView view = view_split<Kernel>(args_, item_, split, scratch_);
    const int num_sub_blocks = view.num_sub_blocks;
    const bool is_first = split == item_.first_split;
    for (int t = 0; t < num_tiles_; ++t) {
      const int first = first_row(t), num_rows = first_row(t + 1) - first;
      const RowStates total = rows_from(totals, first, size_);
      const int num_keys = rows_[first + num_rows - 1].position + 1 - split * kSplitKeys;
      if (num_keys <= 0) {
        if (is_first) clear_states(total, num_rows, size_);
        continue;
      }
      view.num_sub_blocks =
          std::min(num_sub_blocks, static_cast<int>(cdiv(num_keys, kSubBlockTokens)));
      find_next_keys(split, t + 1 == num_tiles_, &view);
      const RowStates states = is_first ? total : states_at(scratch_.part, kTileRows, size_);
      attend_tile(split, t, view, states);
      if (!is_first) merge_states(total, states, num_rows, size_);
    }
  }

  // Keys to fetch while this split's values are summed: those of the next split, else of the next
  // item.
  void find_next_keys(int split, bool is_last_tile, SplitView* view) const {
    const bool has_more = split + 1 < item_.last_split;
    int count = 0;
    if (is_last_tile && (has_more || next_ != nullptr)) {
      const AttentionItem& then = has_more ? item_ : *next_;
      const int then_split = has_more ? split + 1 : then.first_split;
      count = find_keys(args_, then, then_split, row_limit(args_, then), &view->next_keys);
    }
    for (int i = count; i < view->num_sub_blocks; ++i) {  // near already: costs nothing
      view->next_keys[static_cast<size_t>(i)] = view->keys[static_cast<size_t>(i)];
    }
  }

  // The states of a tile's rows after one split alone.
  void attend_tile(int split, int tile, const SplitView& view, const RowStates& states) const {
    const AttentionTileArgs tile_of_rows = tile_args(tile);
    const int num_scores = view.num_sub_blocks * kSubBlockTokens;
    Kernel::score(tile_of_rows, view);
    for (int r = 0; r < tile_of_rows.num_rows; ++r) {
      const VisibleKeys visible = visible_keys<Mask>(rows_[first_row(tile) + r].position, split);
      float* scores = scratch_.scores + r * kSplitKeys;
      uint16_t* rounded = reinterpret_cast<uint16_t*>(scratch_.weights) + r * kSplitKeys;
      states.max[r] = mask_scores(scores, visible, num_scores);
      states.sum[r] =
          weigh_scores<Kernel::kHasBf16Weights>(scores, num_scores, states.max[r], rounded);
    }
    Kernel::weigh(tile_of_rows, view, states.values);
  }

  void write_rows(const RowStates& states) const {
    for (int row = 0; row < item_.num_rows; ++row) {
      const RowStates state = rows_from(states, row, size_);
      const vf32 factor = broadcast(1.0f / *state.sum);
      const int64_t at = rows_[row].token * args_.out.stride + int64_t{rows_[row].head} * size_;
      for (int i = 0; i < size_; i += kLanes) {
        const vf32 x = load(state.values + i) * factor;
        if (args_.out.is_bf16) {
          store_bf16(static_cast<uint16_t*>(args_.out.rows) + at + i, x);
        } else {
          store(static_cast<float*>(args_.out.rows) + at + i, x);
        }
      }
    }
  }

  struct Row {
    int position;
    int token;  // of the step
    int head;   // query head
  };

  const AttentionArgs& args_;
  const AttentionShape& shape_;
  const AttentionItem& item_;
  const AttentionItem* next_;
  const AttentionScratch scratch_;
  const int size_;  // numbers of a value head
  const int num_tiles_;
  Row rows_[kItemRows];
};

// Runs item `index` of plan->num_items(). `next_index` is what this thread runs next, so that its
// first keys are fetched meanwhile; -1 if it is not known.
inline void attention_run_item(const AttentionArgs& args, int index, int next_index,
                               int thread_index) {
  const AttentionPlan& plan = *args.plan;
  const AttentionItem& item = plan.item(index);
  const AttentionItem* next = next_index < 0 ? nullptr : &plan.item(next_index);
  char* memory =
      args.scratch + static_cast<size_t>(thread_index) * attention_scratch_bytes(plan.shape());
  switch (plan.shape().layout.format) {
    case KVFormat::F32:
      return AttentionRun<F32AttentionKernel, FullMask>(args, item, next, memory).run();
    case KVFormat::BF16:
      return AttentionRun<Bf16AttentionKernel, FullMask>(args, item, next, memory).run();
    case KVFormat::INT8:
      return AttentionRun<Int8AttentionKernel, FullMask>(args, item, next, memory).run();
  }
}

}  // namespace kvloom
