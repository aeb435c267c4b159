// Choosing the next token of every row of logits. A work item is a row, and a row's token depends
// on that row alone. What is computed is defined by src/kvloom/sampling/{sampler,logits}.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "kvloom/best_outputs.hpp"
#include "kvloom/logprobs.hpp"
#include "kvloom/philox.hpp"
#include "kvloom/sample_adjust.hpp"
#include "kvloom/sample_draw.hpp"
#include "kvloom/sample_row.hpp"

namespace kvloom {

enum class SampleStatus : int32_t {
  Ok = 0,
  Nan = 1,           // the model's logits hold NaN
  OnlyMinusInf = 2,  // the model's logits are all -inf
  PlusInf = 3,       // the model's logits hold +inf
  NoTokenLeft = 4,   // masks leave no token
};

// All rows of a step. Whoever builds this has checked ids and spans.
struct SampleArgs {
  const float* logits;  // [num_rows, logits_stride], of which vocab_size count
  int64_t logits_stride;
  int32_t vocab_size;
  int64_t num_rows;
  bool are_best_only;     // the rows are BestOutputs, and all of them greedy without more
  const SampleRow* rows;  // [num_rows]
  SampleEdits edits;
  int32_t* token_ids;  // out [num_rows]; 0 where the status is not Ok
  int32_t* statuses;   // out [num_rows]: SampleStatus
  ScoreOutput scores;  // out, where num_logprobs >= 0 and the status is Ok
};

// A token, or why there is none.
struct SampledToken {
  SampleStatus status;
  int32_t token_id;
};

// What a model's largest logit says of them.
inline SampleStatus status_of(double peak) {
  if (std::isnan(peak)) return SampleStatus::Nan;
  if (std::isfinite(peak)) return SampleStatus::Ok;
  return peak > 0.0 ? SampleStatus::PlusInf : SampleStatus::OnlyMinusInf;
}

// Whether a row's token is that of the largest logit, and nothing else is asked.
inline bool wants_best_only(const SampleRow& row) {
  return row.temperature == 0.0 && row.num_logprobs < 0 && !has_adjustments(row);
}

inline SampledToken best_token(const float* row, int32_t vocab_size, SampleScratch& scratch) {
  const BestOutputs<const float> best(row, vocab_size);
  const double peak = scan_maxima(best.greatest, best.num_panels, scratch);
  const SampleStatus status = status_of(peak);
  if (status != SampleStatus::Ok) return {status, 0};
  const int32_t panel = first_index_of(best.greatest, best.num_panels, peak, scratch);
  return {status, std::min(panel * kPanelOutputs + best.lane(panel), vocab_size - 1)};
}

// The token of a row whose largest logit is `peak`; scratch.block_maxima are its.
template <class T>
int32_t choose_token(const T* logits, int32_t vocab_size, double peak, const SampleRow& row,
                     SampleScratch& scratch) {
  if (row.temperature == 0.0) return first_index_of(logits, vocab_size, peak, scratch);
  const DrawParams params{row.temperature, row.top_k, row.min_p, row.top_p,
                          draw_uniform(row.seed, static_cast<uint64_t>(row.output_index))};
  return draw_token(logits, vocab_size, peak, params, scratch);
}

inline SampledToken sample_row(const float* logits, int32_t vocab_size, const SampleRow& row,
                               const SampleEdits& edits, SampleScratch& scratch) {
  double peak = scan_maxima(logits, vocab_size, scratch);
  if (const SampleStatus status = status_of(peak); status != SampleStatus::Ok) return {status, 0};
  if (!has_adjustments(row)) {
    return {SampleStatus::Ok, choose_token(logits, vocab_size, peak, row, scratch)};
  }
  adjust_logits(logits, vocab_size, row, edits, scratch);
  const double* adjusted = scratch.logits.get();
  peak = scan_maxima(adjusted, vocab_size, scratch);
  if (peak == kMinusInf) return {SampleStatus::NoTokenLeft, 0};
  return {SampleStatus::Ok, choose_token(adjusted, vocab_size, peak, row, scratch)};
}

inline int64_t sample_num_items(const SampleArgs& args) { return args.num_rows; }

// Chooses and scores the token of row `item`. `scratch` belongs to the calling thread and was made
// for a vocabulary of at least args.vocab_size.
inline void sample_run_item(const SampleArgs& args, int64_t item, SampleScratch& scratch) {
  const float* logits = args.logits + item * args.logits_stride;
  const SampleRow& row = args.rows[item];
  const SampledToken sampled = args.are_best_only
                                   ? best_token(logits, args.vocab_size, scratch)
                                   : sample_row(logits, args.vocab_size, row, args.edits, scratch);
  args.token_ids[item] = sampled.token_id;
  args.statuses[item] = static_cast<int32_t>(sampled.status);
  if (sampled.status == SampleStatus::Ok && row.num_logprobs >= 0) {
    const ScoreRequest request{sampled.token_id, static_cast<int32_t>(row.num_logprobs), item};
    score_token(logits, args.vocab_size, request, args.scores, scratch);
  }
}

}  // namespace kvloom
