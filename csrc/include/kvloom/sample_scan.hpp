// Looking over a row of logits [vocab_size]: its maximum, its best tokens, its weights.
//
// One pass notes the maximum of each block of 64. Whatever asks for the best tokens afterwards
// reads those few blocks that can hold one. T is float for the model's own logits, and double for
// those that penalties or masks changed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#include "kvloom/sample_exp.hpp"
#include "kvloom/sample_scratch.hpp"

namespace kvloom {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// Block `block` of a row; the last one, if it is short, is completed in `padding` with -inf.
template <class T>
KVLOOM_INLINE const T* sample_block(const T* logits, int32_t vocab_size, int32_t block,
                                    T* padding) {
  const int32_t first = block * kSampleBlock;
  const int32_t size = std::min(kSampleBlock, vocab_size - first);
  if (size == kSampleBlock) return logits + first;
  std::fill(padding, padding + kSampleBlock, static_cast<T>(kMinusInf));
  std::copy(logits + first, logits + vocab_size, padding);
  return padding;
}

// The largest of 64 values; what it is among NaNs does not matter.
KVLOOM_INLINE double block_maximum(const float* values) {
  vf32 best = load(values);
  for (int i = kLanes; i < kSampleBlock; i += kLanes) best = vmax(load(values + i), best);
  return reduce_max(best);
}
KVLOOM_INLINE double block_maximum(const double* values) {
  vf64 best = load_f64(values);
  for (int i = kLanes64; i < kSampleBlock; i += kLanes64) {
    const vf64 next = load_f64(values + i);
    best = next > best ? next : best;
  }
  double maximum = best[0];
  for (int i = 1; i < kLanes64; ++i) maximum = std::max(maximum, double{best[i]});
  return maximum;
}

// Not 0 in some lane if there is a NaN among 64 values.
KVLOOM_INLINE vi32 block_nans(const float* values) {
  vi32 found = {};
  for (int i = 0; i < kSampleBlock; i += kLanes) {
    const vf32 next = load(values + i);
    found |= next != next;
  }
  return found;
}
// The sampler's own numbers have none.
KVLOOM_INLINE vi32 block_nans(const double*) { return broadcast(0); }

// Fills scratch.block_maxima and returns the row's largest logit; NaN if one of them is.
template <class T>
double scan_maxima(const T* logits, int32_t vocab_size, SampleScratch& scratch) {
  const int32_t num_blocks = num_sample_blocks(vocab_size);
  T padding[kSampleBlock];
  double peak = kMinusInf;
  vi32 nans = {};
  for (int32_t block = 0; block < num_blocks; ++block) {
    const T* values = sample_block(logits, vocab_size, block, padding);
    const double maximum = block_maximum(values);
    scratch.block_maxima[block] = maximum;
    peak = std::max(peak, maximum);
    nans |= block_nans(values);
  }
  return reduce_add(nans) == 0 ? peak : std::numeric_limits<double>::quiet_NaN();
}

// The lowest token whose logit is `peak`, the largest of the row.
template <class T>
int32_t first_index_of(const T* logits, int32_t vocab_size, double peak,
                       const SampleScratch& scratch) {
  int32_t block = 0;
  while (scratch.block_maxima[block] != peak) ++block;
  int32_t i = block * kSampleBlock;
  while (i < vocab_size - 1 && static_cast<double>(logits[i]) != peak) ++i;
  return i;
}

// Tokens whose logit is at least `floor`, ascending, in scratch.ids and scratch.values.
template <class T>
int32_t gather_tokens(const T* logits, int32_t vocab_size, double floor, SampleScratch& scratch) {
  const int32_t num_blocks = num_sample_blocks(vocab_size);
  int32_t count = 0;
  for (int32_t block = 0; block < num_blocks; ++block) {
    if (scratch.block_maxima[block] < floor) continue;
    const int32_t end = std::min((block + 1) * kSampleBlock, vocab_size);
    for (int32_t i = block * kSampleBlock; i < end; ++i) {
      const double value = static_cast<double>(logits[i]);
      scratch.ids[count] = i;
      scratch.values[count] = value;
      count += value >= floor;  // without a branch: which ones stay cannot be foretold
    }
  }
  return count;
}

// At least `count` tokens have logits of at least this: each block maximum is one of them.
inline double floor_of_top(int32_t vocab_size, int32_t count, SampleScratch& scratch) {
  const int32_t num_blocks = num_sample_blocks(vocab_size);
  if (count > num_blocks) return kMinusInf;
  double* maxima = scratch.block_values.get();
  std::copy_n(scratch.block_maxima.get(), num_blocks, maxima);
  std::nth_element(maxima, maxima + count - 1, maxima + num_blocks, std::greater<double>());
  return maxima[count - 1];
}

// Keeps the `count` largest of scratch.values [size] and all that tie with the last of them, with
// their ids, in their order; returns how many. count > 0.
inline int32_t keep_largest(int32_t size, int32_t count, SampleScratch& scratch) {
  if (size <= count) return size;
  WeightedIndex* order = scratch.order.get();
  for (int32_t i = 0; i < size; ++i) order[i] = {scratch.values[i], i};
  std::nth_element(
      order, order + count - 1, order + size,
      [](const WeightedIndex& a, const WeightedIndex& b) { return a.weight > b.weight; });
  const double last = order[count - 1].weight;
  int32_t kept = 0;
  for (int32_t i = 0; i < size; ++i) {
    scratch.ids[kept] = scratch.ids[i];
    scratch.values[kept] = scratch.values[i];
    kept += scratch.values[kept] >= last;
  }
  return kept;
}

// What turns a logit into a weight: e^((logit - peak) / temperature).
struct Weighing {
  double peak;
  double temperature;
  double inverse_temperature;

  // A temperature too small to invert sends all but the best to 0 all the same.
  Weighing(double peak, double temperature)
      : peak(peak),
        temperature(temperature),
        inverse_temperature(std::min(1.0 / temperature, std::numeric_limits<double>::max())) {}

  KVLOOM_INLINE vf64 weigh(vf64 logits) const {
    return exp_f64((logits - peak) * inverse_temperature);
  }
  // Tokens below this weigh less than 2^-100 of the best: over a whole vocabulary less than float64
  // can tell from nothing.
  double negligible() const { return floor_at(-70.0); }

  // No token whose exponent is at least `exponent` has a logit below this.
  double floor_at(double exponent) const { return below(peak + exponent * temperature); }

  // No token whose exponent is that of `logit` has a logit below this: rounding of the difference
  // to the peak can make exponents equal.
  double below(double logit) const { return logit - (std::abs(peak) + std::abs(logit)) * 0x1p-51; }
};

// Logits scratch.values [count] become exponents of weights. Divided and not multiplied, so that
// those tie that tie by definition.
inline void scale_values(const Weighing& weighing, int32_t count, SampleScratch& scratch) {
  double* values = scratch.values.get();
  for (int32_t i = 0; i < count; ++i) {
    values[i] = (values[i] - weighing.peak) / weighing.temperature;
  }
}

// Exponents scratch.values [count] become weights.
inline void weigh_values(int32_t count, SampleScratch& scratch) {
  double* values = scratch.values.get();
  std::fill(values + count, values + round_up(count, kLanes64), 0.0);  // there is room
  for (int32_t i = 0; i < count; i += kLanes64)
    store_f64(values + i, exp_f64(load_f64(values + i)));
}

// Weights of all tokens to scratch.weights and the sums of blocks to scratch.block_values; returns
// the sum of all. Behind the last token there are zeros up to the end of its block.
template <class T>
double weigh_tokens(const T* logits, int32_t vocab_size, const Weighing& weighing,
                    SampleScratch& scratch) {
  const int32_t num_blocks = num_sample_blocks(vocab_size);
  const double negligible = weighing.negligible();
  T padding[kSampleBlock];
  double total = 0.0;
  for (int32_t block = 0; block < num_blocks; ++block) {
    double* weights = scratch.weights.get() + int64_t{block} * kSampleBlock;
    scratch.block_values[block] = 0.0;
    if (scratch.block_maxima[block] < negligible) {
      std::fill(weights, weights + kSampleBlock, 0.0);
      continue;
    }
    const T* values = sample_block(logits, vocab_size, block, padding);
    vf64 even = {};
    vf64 odd = {};
    for (int i = 0; i < kSampleBlock; i += 2 * kLanes64) {
      const vf64 a = weighing.weigh(load_f64(values + i));
      const vf64 b = weighing.weigh(load_f64(values + i + kLanes64));
      store_f64(weights + i, a);
      store_f64(weights + i + kLanes64, b);
      even += a;
      odd += b;
    }
    scratch.block_values[block] = reduce_add_f64(even + odd);
    total += scratch.block_values[block];
  }
  return total;
}

}  // namespace kvloom
