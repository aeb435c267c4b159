// Which blocks a step's attention reads, for others to bring near.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvloom/attention_plan.hpp"

namespace kvloom {

// The blocks that an item reads, if it is the one of its request that reads most of them.
inline void add_item_blocks(const AttentionPlan& plan, const AttentionItem& item,
                            std::vector<int32_t>* blocks) {
  const AttentionStep& step = plan.step();
  const int num_rows = step.num_queries(item.request) * plan.shape().heads_per_kv();
  if (item.kv_head != 0 || item.first_row + item.num_rows < num_rows) return;
  const KeyRange keys = plan.visible_keys(item);
  const int first = std::max(keys.first, item.first_split * kSplitKeys);
  const int end = std::min(keys.end, item.last_split * kSplitKeys);
  const int block_size = plan.shape().layout.block_size;
  const int32_t* table = step.block_table + item.request * step.table_stride;
  for (int i = first / block_size; i * block_size < end; ++i) {
    blocks->push_back(table[i - step.first_column(item.request)]);
  }
}

// Adds the blocks in the order of the items that read them, for each thread those of its first
// items: as much as its part of a usual last cache holds besides weights.
inline void add_far_blocks(const AttentionPlan& plan, int num_threads,
                           std::vector<int32_t>* blocks) {
  constexpr size_t kThreadBytes = 4 << 20;
  const size_t most = kThreadBytes / plan.shape().layout.block_bytes();
  for (int thread = 0; thread < num_threads; ++thread) {
    const int64_t num_items = plan.num_items();
    const auto end = static_cast<int>(num_items * (thread + 1) / num_threads);
    const size_t start = blocks->size();
    for (auto i = static_cast<int>(num_items * thread / num_threads); i < end; ++i) {
      add_item_blocks(plan, plan.item(i), blocks);
    }
    blocks->resize(std::min(blocks->size(), start + most));
  }
}

}  // namespace kvloom
