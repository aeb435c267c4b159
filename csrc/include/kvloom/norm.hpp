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

// Rows of a tile to a GEMM's packed rows, without a pass over memory in between.
inline void rms_norm_pack_tile(const float* x, int64_t row_stride, const RmsNorm& norm,
                               const PackedRows& rows, int tile, GroupRange groups) {
  float inverses[kMaxTileRows];
  const int first_row = first_row_of_tile(rows.num_rows, tile);
  for (int row = first_row; row < first_row_of_tile(rows.num_rows, tile + 1); ++row) {
    inverses[row - first_row] = rms_inverse(x + row * row_stride, norm.size, norm.eps);
  }
  pack_tile(rows, tile, groups, [&](int row, int first, int count, float* to) {
    const float* from = x + row * row_stride + first;
    scale_values(from, norm.weight + first, count, inverses[row - first_row], to);
  });
}

}  // namespace kvloom
