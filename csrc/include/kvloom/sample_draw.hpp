// Drawing a token from a row of logits: temperature, then top_k, min_p and top_p, then the draw.
// Defined by keep_tokens and _draw of src/kvloom/sampling.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvloom/sample_scan.hpp"
#include "kvloom/sample_top_p.hpp"

namespace kvloom {

// Which tokens may be drawn, and where in their mass the draw falls.
struct DrawParams {
  double temperature;  // above 0
  int64_t top_k;       // 0 keeps all
  double min_p;        // 0 keeps all
  double top_p;        // 1 keeps all
  double uniform;      // within [0, 1)
};

// Where a draw falls. Rounding must not reach the end: beyond it there is nothing, and before it
// may be weights of 0.
inline double draw_point(double uniform, double total) {
  return std::min(uniform * total, std::nextafter(total, 0.0));
}

// Draws among scratch.ids [count] by the weights in scratch.values.
inline int32_t draw_candidate(int32_t count, double uniform, const SampleScratch& scratch) {
  double total = 0.0;
  for (int32_t i = 0; i < count; ++i) total += scratch.values[i];
  const double point = draw_point(uniform, total);
  double mass = 0.0;
  int32_t i = 0;
  while (i < count - 1 && (mass += scratch.values[i]) <= point) ++i;
  return scratch.ids[i];
}

// Draws among all tokens by scratch.weights, whose blocks sum up to scratch.block_values and those
// to `total`.
inline int32_t draw_from_weights(double total, double uniform, const SampleScratch& scratch) {
  const double point = draw_point(uniform, total);
  double mass = 0.0;
  int32_t block = 0;
  while (mass + scratch.block_values[block] <= point) mass += scratch.block_values[block++];
  const int32_t first = block * kSampleBlock;
  int32_t last = first;  // with a weight: rounding may leave the block's end short of the point
  for (int32_t i = first; i < first + kSampleBlock; ++i) {
    if (scratch.weights[i] > 0.0) last = i;
    if ((mass += scratch.weights[i]) > point) break;
  }
  return last;
}

// Drops the candidates that weigh less than `min_p`; returns how many stay.
inline int32_t keep_min_p(int32_t count, double min_p, SampleScratch& scratch) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    scratch.ids[kept] = scratch.ids[i];
    scratch.values[kept] = scratch.values[i];
    kept += scratch.values[kept] >= min_p;
  }
  return kept;
}

inline double sum_of_values(int32_t count, const SampleScratch& scratch) {
  double sum = 0.0;
  for (int32_t i = 0; i < count; ++i) sum += scratch.values[i];
  return sum;
}

// A token of a row whose largest logit is `peak`, which is finite; scratch.block_maxima are its.
template <class T>
int32_t draw_token(const T* logits, int32_t vocab_size, double peak, const DrawParams& params,
                   SampleScratch& scratch) {
  const Weighing weighing(peak, params.temperature);
  const bool has_top_k = params.top_k > 0 && params.top_k < vocab_size;
  if (!has_top_k && params.min_p <= 0.0) {
    double total = weigh_tokens(logits, vocab_size, weighing, scratch);
    if (params.top_p < 1.0) {
      total = drop_beyond_top_p(vocab_size, weighing, {total, params.top_p * total}, scratch);
    }
    return draw_from_weights(total, params.uniform, scratch);
  }
  // A superset in logits, then what stays by the exponents; -inf weighs nothing.
  double floor = std::numeric_limits<double>::lowest();
  if (params.min_p > 0.0) floor = std::max(floor, weighing.floor_at(std::log(params.min_p) - 1e-6));
  if (has_top_k) {
    const int32_t top_k = static_cast<int32_t>(params.top_k);
    floor = std::max(floor, weighing.below(floor_of_top(vocab_size, top_k, scratch)));
  }
  int32_t count = gather_tokens(logits, vocab_size, floor, scratch);
  scale_values(weighing, count, scratch);
  if (has_top_k) count = keep_largest(count, static_cast<int32_t>(params.top_k), scratch);
  weigh_values(count, scratch);
  count = keep_min_p(count, params.min_p, scratch);
  if (params.top_p < 1.0) {
    count = keep_top_p(count, params.top_p * sum_of_values(count, scratch), scratch);
  }
  return draw_candidate(count, params.uniform, scratch);
}

}  // namespace kvloom
