// Softmax attention over a paged cache, for any mixture of prompts in chunks and single tokens,
// with any mask whose queries see a range of keys.
//
// A row's result is the same, bit for bit, whatever else is in the step: see attention_plan.hpp.
// Nothing is read of blocks left of what the item's first row sees.
#pragma once

#include "kvloom/attention_scores.hpp"
#include "kvloom/attention_split.hpp"
#include "kvloom/softmax_state.hpp"

namespace kvloom {

// Runs one item; Kernel knows the format of keys and values.
template <class Kernel>
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
      const AttentionMerge& merge = args_.plan->merge(item_.merge);
      const RowStates first = part_states(merge.first_split);
      for (int i = 1; i < merge.num_splits; ++i) {
        merge_states(first, part_states(merge.first_split + i), item_.num_rows, size_);
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
    const AttentionMerge& merge = args_.plan->merge(item_.merge);
    const int first = merge.first_state + (split - merge.first_split) * item_.num_rows;
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
    const SplitView whole = view_split<Kernel>(args_, item_, split, scratch_);
    const bool is_first = split == item_.first_split;
    for (int t = 0; t < num_tiles_; ++t) {
      const int first = first_row(t), num_rows = first_row(t + 1) - first;
      const RowStates total = rows_from(totals, first, size_);
      const SubBlockRange seen = sub_blocks_of(visible_keys(first, first + num_rows - 1), split);
      if (seen.first >= seen.end) {
        if (is_first) clear_states(total, num_rows, size_);
        continue;
      }
      SplitView view = whole;
      view.first = seen.first;
      view.end = seen.end;
      find_next_keys(split, t + 1 == num_tiles_, &view);
      const RowStates states = is_first ? total : states_at(scratch_.part, kTileRows, size_);
      attend_tile(split, t, view, states);
      if (!is_first) merge_states(total, states, num_rows, size_);
    }
  }

  // Keys that some of the item's rows [first, last] see.
  KeyRange visible_keys(int first, int last) const {
    return {shape_.mask.first_visible(rows_[first].position), rows_[last].position + 1};
  }

  // Keys to fetch while this split's values are summed: those of the next split, else of the next
  // item.
  void find_next_keys(int split, bool is_last_tile, SplitView* view) const {
    const bool has_more = split + 1 < item_.last_split;
    SubBlockRange range = {0, 0};
    if (is_last_tile && (has_more || next_ != nullptr)) {
      const AttentionItem& then = has_more ? item_ : *next_;
      const int then_split = has_more ? split + 1 : then.first_split;
      range = sub_blocks_of(args_.plan->visible_keys(then), then_split);
      range.end = std::min(range.end, range.first + view->end - view->first);
      find_keys(args_, then, then_split, range, view->next_keys.data() + view->first);
    }
    for (int i = view->first + range.end - range.first; i < view->end; ++i) {
      // Near already: costs nothing.
      view->next_keys[static_cast<size_t>(i)] = view->keys[static_cast<size_t>(i)];
    }
  }

  // The states of a tile's rows after one split alone.
  void attend_tile(int split, int tile, const SplitView& view, const RowStates& states) const {
    const AttentionTileArgs tile_of_rows = tile_args(tile);
    const KeyRange range = {view.first * kSubBlockTokens, view.end * kSubBlockTokens};
    Kernel::score(tile_of_rows, view);
    for (int r = 0; r < tile_of_rows.num_rows; ++r) {
      const int row = first_row(tile) + r;
      KeyRange seen = visible_keys(row, row);
      seen.first -= split * kSplitKeys;
      seen.end -= split * kSplitKeys;
      float* scores = scratch_.scores + r * kSplitKeys;
      const float soft_cap = args_.scoring.soft_cap;
      if (soft_cap > 0.0f) cap_scores(scores, range, soft_cap);
      states.max[r] = mask_scores(scores, range, seen);
    }
    const WeightRows rows = {scratch_.scores, reinterpret_cast<uint16_t*>(scratch_.weights),
                             states.max, states.sum};
    weigh_scores<Kernel::kHasBf16Weights>(rows, tile_of_rows.num_rows, range);
    Kernel::weigh(tile_of_rows, view, states.values);
  }

  void write_rows(const RowStates& states) const {
    for (int row = 0; row < item_.num_rows; ++row) {
      const RowStates state = rows_from(states, row, size_);
      const float* sinks = args_.scoring.sinks;
      const float sink = sinks == nullptr ? kUnseen : sinks[rows_[row].head];
      const vf32 factor = broadcast(values_factor(state, sink));
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
      return AttentionRun<F32AttentionKernel>(args, item, next, memory).run();
    case KVFormat::BF16:
      return AttentionRun<Bf16AttentionKernel>(args, item, next, memory).run();
    case KVFormat::INT8:
      return AttentionRun<Int8AttentionKernel>(args, item, next, memory).run();
  }
}

}  // namespace kvloom
