// A step as Python hands it over, checked number by number: no batch can make a kernel read or
// write outside its memory.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/attention_plan.hpp"
#include "kvloom/step.hpp"
#include "kvloom/types.hpp"

namespace kvloom {

namespace nb = nanobind;

template <class T, size_t N>
using StepArray = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// Tokens of a batch that a sampler has yet to choose.
struct LateArrays {
  StepArray<int64_t, 1> places;  // in the batch
  StepArray<int64_t, 1> rows;    // of sampled_ids
  StepArray<int32_t, 1> sampled_ids;
};

// The arrays of `Batch` and of one entry of its `attention`.
struct BatchArrays {
  StepArray<int64_t, 1> token_ids;
  StepArray<int64_t, 1> positions;
  StepArray<int64_t, 1> logits_rows;
  StepArray<int32_t, 1> query_start;
  StepArray<int32_t, 1> seq_lens;
  bool wants_best_only;
};
struct GroupArrays {
  StepArray<int32_t, 2> block_table;
  StepArray<int64_t, 1> slots;
  std::optional<StepArray<int32_t, 1>> first_columns;
};

// What the numbers of a step must lie below.
struct StepLimits {
  int max_num_tokens = 0;
  int max_num_rows = 0;
  int max_num_requests = 0;
  int max_model_len = 0;
};
struct GroupLimits {
  int block_size = 0;
  int64_t num_blocks = 0;
  AttentionMask mask = {};
};

// Holds copies of a step's arrays, so that nobody can change them while the step runs.
class CheckedStep {
 public:
  CheckedStep(const StepLimits& limits, std::vector<GroupLimits> groups)
      : limits_(limits), group_limits_(std::move(groups)), groups_(group_limits_.size()) {}

  // Throws nb::value_error that names what is wrong.
  void set(const BatchArrays& batch, const std::vector<GroupArrays>& groups,
           const LateArrays* late = nullptr) {
    check(groups.size() == groups_.size(), "a step needs the metadata of each KV cache group");
    step_.late = {};
    late_ids_.reset();
    step_.wants_best_only = batch.wants_best_only;
    set_tokens(batch);
    set_requests(batch);
    for (size_t i = 0; i < groups.size(); ++i) set_group(i, groups[i]);
    if (late != nullptr) set_late(*late);
    publish();
  }

  const Step& step() const { return step_; }

 private:
  struct Group {
    std::vector<int32_t> block_table;
    int table_width = 0;
    std::vector<int64_t> slots;
    std::vector<int32_t> first_columns;
  };

  static void check(bool is_valid, const char* message) {
    if (!is_valid) throw nb::value_error(message);
  }

  void set_tokens(const BatchArrays& batch) {
    const size_t num_tokens = batch.token_ids.shape(0);
    check(num_tokens <= static_cast<size_t>(limits_.max_num_tokens),
          "the step has more tokens than the program was made for");
    check(batch.positions.shape(0) == num_tokens, "positions: one per token");
    check(batch.logits_rows.shape(0) <= static_cast<size_t>(limits_.max_num_rows),
          "the step has more rows of logits than the program was made for");
    token_ids_.resize(num_tokens);
    positions_.resize(num_tokens);
    for (size_t i = 0; i < num_tokens; ++i) {
      const int64_t id = batch.token_ids(i), position = batch.positions(i);
      check(id >= 0 && id <= INT32_MAX, "token_ids: an id is out of range");
      check(position >= 0 && position < limits_.max_model_len,
            "positions: a position is out of range");
      token_ids_[i] = static_cast<int32_t>(id);
      positions_[i] = position;
    }
    logits_rows_.resize(batch.logits_rows.shape(0));
    for (size_t i = 0; i < logits_rows_.size(); ++i) {
      const int64_t row = batch.logits_rows(i);
      check(row >= 0 && row < static_cast<int64_t>(num_tokens),
            "logits_rows: a row is out of range");
      logits_rows_[i] = static_cast<int32_t>(row);
    }
  }

  void set_requests(const BatchArrays& batch) {
    const size_t num_requests = batch.seq_lens.shape(0);
    check(num_requests <= static_cast<size_t>(limits_.max_num_requests),
          "the step has more requests than the program was made for");
    check(batch.query_start.shape(0) == num_requests + 1, "query_start: one more than requests");
    query_start_.assign(batch.query_start.data(), batch.query_start.data() + num_requests + 1);
    seq_lens_.assign(batch.seq_lens.data(), batch.seq_lens.data() + num_requests);
    check(query_start_[0] == 0, "query_start: begins with 0");
    for (size_t i = 0; i < num_requests; ++i) {
      check(query_start_[i + 1] >= query_start_[i], "query_start: never falls");
      const int64_t num_queries = int64_t{query_start_[i + 1]} - query_start_[i];
      check(seq_lens_[i] >= num_queries && seq_lens_[i] <= limits_.max_model_len,
            "seq_lens: a length is out of range");
    }
    check(query_start_[num_requests] <= static_cast<int64_t>(token_ids_.size()),
          "query_start: ends with the number of tokens, or earlier");
  }

  void set_group(size_t index, const GroupArrays& arrays) {
    const GroupLimits& limits = group_limits_[index];
    Group& group = groups_[index];
    const size_t width = arrays.block_table.shape(1);
    check(arrays.block_table.shape(0) == seq_lens_.size(), "block_table: one row per request");
    check(width <= static_cast<size_t>(limits_.max_model_len), "block_table: too wide");
    const int32_t* table = arrays.block_table.data();
    group.block_table.assign(table, table + seq_lens_.size() * width);
    group.table_width = static_cast<int>(width);
    set_first_columns(limits, arrays, group);
    for (size_t i = 0; i < seq_lens_.size(); ++i) {
      const int64_t num_blocks = cdiv(seq_lens_[i], limits.block_size) - group.first_columns[i];
      check(num_blocks <= static_cast<int64_t>(width), "block_table: narrower than a request");
      for (int64_t column = 0; column < num_blocks; ++column) {
        const int32_t block = group.block_table[i * width + static_cast<size_t>(column)];
        check(block >= 0 && block < limits.num_blocks, "block_table: a block id is out of range");
      }
    }
    check(arrays.slots.shape(0) == token_ids_.size(), "slot_mapping: one per token");
    group.slots.assign(arrays.slots.data(), arrays.slots.data() + token_ids_.size());
    for (const int64_t slot : group.slots) {
      check(slot >= -1 && slot < limits.num_blocks * limits.block_size,
            "slot_mapping: a slot is out of range");
    }
  }

  void set_first_columns(const GroupLimits& limits, const GroupArrays& arrays, Group& group) const {
    group.first_columns.assign(seq_lens_.size(), 0);
    if (!arrays.first_columns) return;
    check(arrays.first_columns->shape(0) == seq_lens_.size(), "first_columns: one per request");
    for (size_t i = 0; i < seq_lens_.size(); ++i) {
      const int32_t first = (*arrays.first_columns)(i);
      const int32_t position = seq_lens_[i] - (query_start_[i + 1] - query_start_[i]);
      check(first >= 0 && first <= limits.mask.first_visible(position) / limits.block_size,
            "first_columns: a query sees a block before them");
      group.first_columns[i] = first;
    }
  }

  void set_late(const LateArrays& late) {
    const size_t count = late.places.shape(0), num_rows = late.sampled_ids.shape(0);
    check(late.rows.shape(0) == count, "late tokens: one row per place");
    for (size_t i = 0; i < count; ++i) {
      const int64_t place = late.places(i), row = late.rows(i);
      check(place >= 0 && place < static_cast<int64_t>(token_ids_.size()),
            "late tokens: a place is out of range");
      check(row >= 0 && row < static_cast<int64_t>(num_rows), "late tokens: a row is out of range");
      step_.late.tokens.push_back({static_cast<int32_t>(place), static_cast<int32_t>(row)});
    }
    late_ids_ = late.sampled_ids;
    step_.late.sampled_ids = late_ids_->data();
  }

  void publish() {
    step_.num_tokens = static_cast<int>(token_ids_.size());
    step_.num_rows = static_cast<int>(logits_rows_.size());
    step_.num_requests = static_cast<int>(seq_lens_.size());
    step_.token_ids = token_ids_.data();
    step_.positions = positions_.data();
    step_.logits_rows = logits_rows_.data();
    step_.query_start = query_start_.data();
    step_.seq_lens = seq_lens_.data();
    step_.groups.resize(groups_.size());
    for (size_t i = 0; i < groups_.size(); ++i) {
      const Group& group = groups_[i];
      step_.groups[i] = {group.block_table.data(), group.table_width, group.slots.data(),
                         group_limits_[i].block_size, group.first_columns.data()};
    }
  }

  StepLimits limits_;
  std::vector<GroupLimits> group_limits_;
  std::vector<int32_t> token_ids_, logits_rows_, query_start_, seq_lens_;
  std::vector<int64_t> positions_;
  std::vector<Group> groups_;
  std::optional<StepArray<int32_t, 1>> late_ids_;  // held until another step is set
  Step step_;
};

}  // namespace kvloom
