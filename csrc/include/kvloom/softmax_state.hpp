// Partial softmax results as values: what a row has seen of some keys, and how two such results
// become one.
#pragma once

#include <cmath>
#include <limits>

#include "kvloom/simd.hpp"

namespace kvloom {

// Of several rows. With scores s in base 2 and values v: max = max s, sum = sum 2^(s - max) and
// values = sum 2^(s - max) v. A row that has seen no key has max -inf, and zeros.
struct RowStates {
  float* values;  // [num_rows, size]
  float* max;     // [num_rows]
  float* sum;     // [num_rows]
};

// Numbers that a state takes in memory, so that rows of values stay aligned as their buffer is.
constexpr int kStateExtraFloats = 16;

// States in one buffer of num_rows x (size + kStateExtraFloats) floats.
inline RowStates states_at(float* buffer, int num_rows, int size) {
  float* max = buffer + static_cast<size_t>(num_rows) * static_cast<size_t>(size);
  return {buffer, max, max + num_rows};
}

inline RowStates rows_from(const RowStates& states, int row, int size) {
  return {states.values + static_cast<size_t>(row) * static_cast<size_t>(size), states.max + row,
          states.sum + row};
}

// 2^x for x <= 0, or NaN. Cheaper than exp2(): the relative error is 1e-4, far below the rounding
// of bf16, and numbers below 2^-126 may be inexact. 2^0 is 1 and 2^-inf is 0, exactly.
KVLOOM_INLINE vf32 rough_exp2(vf32 x) {
  const Exponent exponent = split_exponent(x);
  const vf32 f = exponent.fraction;
  vf32 p = broadcast(0.055008747f);  // minimax over [-1/2, 1/2] with the constant term 1
  p = fma(p, f, broadcast(0.24221076f));
  p = fma(p, f, broadcast(0.6932829f));
  p = fma(p, f, broadcast(1.0f));
  return times_power(p, exponent.whole);
}

KVLOOM_INLINE float exp2_of(float x) { return exp2(broadcast(x))[0]; }

// total becomes total and part together. Exact if one of them has seen no key: so it does not
// matter whether a split without visible keys is merged or skipped.
inline void merge_states(const RowStates& total, const RowStates& part, int num_rows, int size) {
  for (int r = 0; r < num_rows; ++r) {
    const float max = total.max[r] > part.max[r] ? total.max[r] : part.max[r];
    if (part.sum[r] == 0.0f) continue;  // a NaN goes on: a maximum may have lost it, a sum has not
    const float keep = exp2_of(total.max[r] - max), take = exp2_of(part.max[r] - max);
    total.max[r] = max;
    total.sum[r] = std::fma(part.sum[r], take, total.sum[r] * keep);
    float* values = total.values + static_cast<size_t>(r) * static_cast<size_t>(size);
    const float* more = part.values + static_cast<size_t>(r) * static_cast<size_t>(size);
    for (int i = 0; i < size; i += kLanes) {
      store(values + i, fma(load(more + i), broadcast(take), load(values + i) * broadcast(keep)));
    }
  }
}

// What the values of a row's final state are multiplied by. `sink` is a score that has a share of
// the weights and no value; -inf for none.
inline float values_factor(const RowStates& row, float sink) {
  const float max = *row.max > sink ? *row.max : sink;
  const float keep = exp2_of(*row.max - max);
  return keep / std::fma(*row.sum, keep, exp2_of(sink - max));
}

inline void clear_states(const RowStates& states, int num_rows, int size) {
  for (int r = 0; r < num_rows; ++r) {
    states.max[r] = -std::numeric_limits<float>::infinity();
    states.sum[r] = 0.0f;
  }
  for (int i = 0; i < num_rows * size; i += kLanes) store(states.values + i, vf32{});
}

}  // namespace kvloom
