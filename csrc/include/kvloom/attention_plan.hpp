// How one step's attention of one KV cache group is cut into work items. Planned once per step and
// group; all layers of the group run the same items.
//
// A row is one query head of one token. The rows of a request that read one KV head are numbered
// query by query: row = query * heads_per_kv + head. Keys are processed in splits: split i holds
// the keys of positions [i * kSplitKeys, (i + 1) * kSplitKeys). Each split gives a row a softmax
// state by itself, and the states are merged in order of position. So how rows and splits are
// spread over items and threads changes no bit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "kvloom/kv_layout.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

constexpr int kSplitKeys = 256;
constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // rows whose accumulators fit the registers
constexpr int kItemRows = 4 * kTileRows;          // rows that share what is read of the cache

// Which keys a query sees: all up to its own, or fewer of them. They are a range that only moves on
// from query to query.
struct AttentionMask {
  int32_t window = 0;  // the last keys, its own included; 0: no window
  int32_t chunk = 0;   // those of its own aligned chunk of so many positions; 0: no chunks

  int32_t first_visible(int32_t position) const {
    if (window > 0) return std::max(position - window + 1, 0);
    return chunk > 0 ? position / chunk * chunk : 0;
  }

  bool operator==(const AttentionMask& other) const {
    return window == other.window && chunk == other.chunk;
  }
};

struct AttentionShape {
  KVLayout layout;
  int num_heads;  // query heads of this rank
  AttentionMask mask = {};

  int heads_per_kv() const { return num_heads / layout.num_kv_heads; }
};

// One group's view of a step: AttentionMetadata of ops/base.py.
struct AttentionStep {
  int num_reqs;
  const int32_t* query_start;  // [num_reqs + 1]
  const int32_t* seq_lens;     // [num_reqs] stored tokens, this step's included
  const int32_t* block_table;  // [num_reqs, table_stride]
  int64_t table_stride;
  // [num_reqs] the block of the text that a row of the table begins with; none: the first
  const int32_t* first_columns = nullptr;

  int first_column(int request) const {
    return first_columns == nullptr ? 0 : first_columns[request];
  }
  int num_queries(int request) const { return query_start[request + 1] - query_start[request]; }
  // Position of the request's first query.
  int num_computed(int request) const { return seq_lens[request] - num_queries(request); }
};

// Rows [first_row, first_row + num_rows) of a request and KV head over splits [first_split,
// last_split).
struct AttentionItem {
  int32_t request;
  int32_t kv_head;
  int32_t first_row;
  int32_t num_rows;
  int32_t first_split;
  int32_t last_split;
  int32_t merge;  // index of the merge this item is a part of; -1: the item holds all splits of its
                  // rows
  int64_t cost = 0;
};

// Rows whose splits are spread over items: whoever finishes last merges.
struct AttentionMerge {
  int32_t first_state;  // of num_splits x num_rows row states: split by split
  int32_t first_split;
  int32_t num_splits;
};

// Positions [first, end).
struct KeyRange {
  int first;
  int end;
};

struct AttentionLimits {
  int num_threads;
  int max_model_len;
};

class AttentionPlan {
 public:
  AttentionPlan(const AttentionShape& shape, const AttentionLimits& limits)
      : shape_(shape), limits_(limits) {
    // One request of the greatest length can always be spread over threads, and many short ones.
    const int64_t most = cdiv(limits.max_model_len, kSplitKeys) * shape.num_heads;
    max_num_states_ = static_cast<int>(most > kMinStates ? most : kMinStates);
    unfinished_ = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(max_num_states_));
  }

  // Plans a step; what `step` points to must outlive it.
  void build(const AttentionStep& step) {
    step_ = step;
    items_.clear();
    merges_.clear();
    num_states_ = 0;
    int64_t total_cost = 0;
    for (int request = 0; request < step.num_reqs; ++request) {
      total_cost += cost_of(request) * shape_.layout.num_kv_heads;
    }
    for (int request = 0; request < step.num_reqs; ++request) {
      add_request(request, total_cost / (kItemsPerThread * limits_.num_threads));
    }
    sort_items();
    for (size_t i = 0; i < merges_.size(); ++i) {
      unfinished_[i].store(merges_[i].num_splits, std::memory_order_relaxed);
    }
  }

  const AttentionShape& shape() const { return shape_; }
  const AttentionStep& step() const { return step_; }
  int num_items() const { return static_cast<int>(items_.size()); }
  const AttentionItem& item(int index) const { return items_[static_cast<size_t>(index)]; }
  const AttentionMerge& merge(int index) const { return merges_[static_cast<size_t>(index)]; }

  // Keys that some of a request's rows [first_row, first_row + num_rows) see.
  KeyRange visible_keys(int request, int first_row, int num_rows) const {
    const int first = position_of(request, first_row);
    return {shape_.mask.first_visible(first), position_of(request, first_row + num_rows - 1) + 1};
  }
  KeyRange visible_keys(const AttentionItem& item) const {
    return visible_keys(item.request, item.first_row, item.num_rows);
  }

  // Counts an unfinished part of a merge down; true for the last one, which sees all states
  // written. The count is then ready for the next layer.
  bool finish_part(int merge) const {
    std::atomic<int32_t>& unfinished = unfinished_[static_cast<size_t>(merge)];
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    unfinished.store(merges_[static_cast<size_t>(merge)].num_splits, std::memory_order_relaxed);
    return true;
  }

  // Row states that spread splits need, shared by the threads and reused by every layer of the
  // group.
  int max_num_states() const { return max_num_states_; }

 private:
  static constexpr int kMinStates = 4096;
  static constexpr int kItemsPerThread = 4;  // so that one slow core costs its share only

  // In units of a row's keys. What is read of the cache weighs as much as several rows' arithmetic.
  static int64_t cost_of(int64_t num_rows, int64_t num_keys) { return (num_rows + 6) * num_keys; }

  // Of all rows of a request that read one KV head.
  int64_t cost_of(int request) const {
    const int rows = num_rows(request);
    if (rows == 0) return 0;
    // Each row sees as many keys as the first and the last on average.
    const KeyRange first = visible_keys(request, 0, 1), last = visible_keys(request, rows - 1, 1);
    return cost_of(rows, (first.end - first.first + last.end - last.first) / 2);
  }

  int num_rows(int request) const { return step_.num_queries(request) * shape_.heads_per_kv(); }

  int position_of(int request, int row) const {
    return step_.num_computed(request) + row / shape_.heads_per_kv();
  }

  void add_request(int request, int64_t spread_cost) {
    const int rows = num_rows(request);
    if (rows == 0) return;
    const int pieces = static_cast<int>(cdiv(rows, kItemRows));
    const int step = static_cast<int>(
        pieces == 1 ? rows : round_up(cdiv(rows, pieces), kTileRows));  // whole tiles
    for (int first = 0; first < rows; first += step) {
      for (int head = 0; head < shape_.layout.num_kv_heads; ++head) {
        const int count = rows - first < step ? rows - first : step;
        add_rows({request, head, first, count, 0, 0, -1}, spread_cost);
      }
    }
  }

  void add_rows(AttentionItem item, int64_t spread_cost) {
    const KeyRange keys = visible_keys(item);
    item.first_split = keys.first / kSplitKeys;
    item.last_split = static_cast<int32_t>(cdiv(keys.end, kSplitKeys));
    item.cost = cost_of(item.num_rows, keys.end - keys.first);
    const int num_splits = item.last_split - item.first_split;
    const int num_states = num_splits * item.num_rows;
    if (num_splits == 1 || item.cost <= spread_cost || num_states_ + num_states > max_num_states_) {
      items_.push_back(item);
      return;
    }
    item.merge = static_cast<int32_t>(merges_.size());
    merges_.push_back({num_states_, item.first_split, num_splits});
    num_states_ += num_states;
    const int last_split = item.last_split;
    for (int split = item.first_split; split < last_split; ++split) {
      const int first = std::max(keys.first, split * kSplitKeys);
      item.first_split = split;
      item.last_split = split + 1;
      item.cost = cost_of(item.num_rows, std::min(keys.end, (split + 1) * kSplitKeys) - first);
      items_.push_back(item);
    }
  }

  // Big ones first, so that the threads end together; among equals, neighbours in the cache.
  void sort_items() {
    const auto key = [](const AttentionItem& item) {
      return std::make_tuple(-item.cost, item.request, item.first_split, item.first_row,
                             item.kv_head);
    };
    std::sort(items_.begin(), items_.end(),
              [&](const AttentionItem& a, const AttentionItem& b) { return key(a) < key(b); });
  }

  AttentionShape shape_;
  AttentionLimits limits_;
  AttentionStep step_ = {};
  int max_num_states_;
  int num_states_ = 0;
  std::vector<AttentionItem> items_;
  std::vector<AttentionMerge> merges_;
  std::unique_ptr<std::atomic<int32_t>[]> unfinished_;  // [max_num_states_]
};

}  // namespace kvloom
