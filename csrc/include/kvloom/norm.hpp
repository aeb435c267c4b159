// Root-mean-square normalisation of f32 rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kvloom/pack_rows.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// What rows are normalised by: y = x / sqrt(mean(x^2) + eps) * weight over `size` values.
struct RmsNorm {
  const float* weight;  // [size]
  int64_t size;
  float eps;
};

// 1 / sqrt(mean(x^2) + eps).
inline float rms_inverse(const float* x, int64_t size, float eps) {
  vf32 even = {};
  vf32 odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const vf32 a = load(x + i);
    const vf32 b = load(x + i + kLanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < size; i += kLanes) {
    const vf32 rest = load_partial(x + i, static_cast<int>(std::min<int64_t>(size - i, kLanes)));
    even = fma(rest, rest, even);
  }
  return 1.0f / std::sqrt(reduce_add(even + odd) / static_cast<float>(size) + eps);
}

// y[0, size) = x * inverse * weight.
KVLOOM_INLINE void scale_values(const float* x, const float* weight, int64_t size, float inverse,
                                float* y) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(y + i, load(x + i) * broadcast(inverse) * load(weight + i));
  }
  for (; i < size; ++i) y[i] = x[i] * inverse * weight[i];
}

// One row of `size` values; y may be x.
inline void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* y) {
  scale_values(x, weight, size, rms_inverse(x, size, eps), y);
}

// Groups of one row to row `row` of a GEMM's packed rows, without a pass over memory in between.
inline void rms_norm_pack_row(const float* x, const RmsNorm& norm, const PackedRows& rows, int row,
                              GroupRange groups) {
  const RowPlace place = row_place(rows, row);
  const float inverse = rms_inverse(x, norm.size, norm.eps);
  const int num_full = std::min(static_cast<int>(norm.size / kGroupInputs), groups.end);
  for (int group = groups.first; group < num_full; ++group) {
    float values[kGroupInputs];
    const int64_t first = int64_t{group} * kGroupInputs;
    scale_values(x + first, norm.weight + first, kGroupInputs, inverse, values);
    pack_row_group(place, group, values);
  }
  if (num_full < groups.end) {
    float values[kGroupInputs] = {};
    const int64_t first = int64_t{num_full} * kGroupInputs;
    scale_values(x + first, norm.weight + first, norm.size - first, inverse, values);
    pack_row_group(place, num_full, values);
  }
}

}  // namespace kvloom
