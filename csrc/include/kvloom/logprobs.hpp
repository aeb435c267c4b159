// Log-probabilities of tokens under the model's own distribution. Defined by
// src/kvloom/sampling/logprobs.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvloom/sample_scan.hpp"

namespace kvloom {

// Where scores go. A row that asks for fewer than `max_top` tokens, or whose vocabulary has fewer,
// leaves the rest of its top_* untouched.
struct ScoreOutput {
  double* logprobs;      // [num_rows] of the token
  int32_t* ranks;        // [num_rows]: 1 + number of strictly more likely tokens
  int32_t* top_ids;      // [num_rows, max_top], best first; the lower id first among equals
  double* top_logprobs;  // [num_rows, max_top]
  int64_t max_top;
};

// Prompt tokens to score: row i of logits scores token_ids[i].
struct TokenScoreArgs {
  const float* logits;  // [num_rows, logits_stride], of which vocab_size count
  int64_t logits_stride;
  int32_t vocab_size;
  int64_t num_rows;
  const int32_t* token_ids;  // [num_rows]
  const int32_t* num_top;    // [num_rows], at most max_top
  ScoreOutput scores;
};

// One token to score, and where its scores go: row `row` of the output.
struct ScoreRequest {
  int32_t token_id;
  int32_t num_top;
  int64_t row;
};

inline int32_t count_greater(const float* logits, int32_t vocab_size, float limit) {
  vi32 count = {};
  int32_t i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) count -= load(logits + i) > broadcast(limit);
  const vf32 rest = load_partial(logits + i, vocab_size - i, limit);
  return reduce_add(count - (rest > broadcast(limit)));
}

// The `count` best tokens of a row to scratch.order, best first; scratch.block_maxima are its.
inline void order_top(const float* logits, int32_t vocab_size, int32_t count,
                      SampleScratch& scratch) {
  const double floor = floor_of_top(vocab_size, count, scratch);
  const int32_t found = gather_tokens(logits, vocab_size, floor, scratch);
  WeightedIndex* order = scratch.order.get();
  for (int32_t i = 0; i < found; ++i) order[i] = {scratch.values[i], scratch.ids[i]};
  std::partial_sort(order, order + count, order + found,
                    [](const WeightedIndex& a, const WeightedIndex& b) {
                      return a.weight > b.weight || (a.weight == b.weight && a.index < b.index);
                    });
}

// Scores one token of one row. A row with NaN or without a finite maximum has no distribution: its
// log-probabilities are NaN, and its best tokens are the first ones.
inline void score_token(const float* logits, int32_t vocab_size, const ScoreRequest& request,
                        const ScoreOutput& out, SampleScratch& scratch) {
  const int32_t num_top = std::min(request.num_top, vocab_size);
  const double peak = scan_maxima(logits, vocab_size, scratch);
  const bool has_distribution = std::isfinite(peak);
  double log_sum = std::numeric_limits<double>::quiet_NaN();
  if (has_distribution) {
    log_sum = std::log(weigh_tokens(logits, vocab_size, Weighing(peak, 1.0), scratch));
  }
  const float logit = logits[request.token_id];
  out.logprobs[request.row] = static_cast<double>(logit) - peak - log_sum;
  out.ranks[request.row] = 1 + count_greater(logits, vocab_size, logit);
  if (num_top <= 0) return;
  if (has_distribution) {
    order_top(logits, vocab_size, num_top, scratch);
  } else {
    for (int32_t i = 0; i < num_top; ++i) scratch.order[i] = {log_sum, i};
  }
  for (int32_t i = 0; i < num_top; ++i) {
    const WeightedIndex& top = scratch.order[i];
    out.top_ids[request.row * out.max_top + i] = top.index;
    out.top_logprobs[request.row * out.max_top + i] = top.weight - peak - log_sum;
  }
}

inline int64_t score_num_items(const TokenScoreArgs& args) { return args.num_rows; }

inline void score_run_item(const TokenScoreArgs& args, int64_t item, SampleScratch& scratch) {
  score_token(args.logits + item * args.logits_stride, args.vocab_size,
              {args.token_ids[item], args.num_top[item], item}, args.scores, scratch);
}

}  // namespace kvloom
