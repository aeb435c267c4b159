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

// One row to row `row` of a GEMM's packed rows, without a pass over memory in between.
inline void rms_norm_pack_row(const float* x, const RmsNorm& norm, const PackedRows& rows,
                              int row) {
  const RowPlace place = row_place(rows, row);
  const float inverse = rms_inverse(x, norm.size, norm.eps);
  const int64_t num_full = norm.size / kGroupInputs;
  for (int64_t group = 0; group < num_full; ++group) {
    float values[kGroupInputs];
    const int64_t first = group * kGroupInputs;
    scale_values(x + first, norm.weight + first, kGroupInputs, inverse, values);
    pack_row_group(place, static_cast<int>(group), values);
  }
  if (const int64_t first = num_full * kGroupInputs; first < norm.size) {
    float values[kGroupInputs] = {};
    scale_values(x + first, norm.weight + first, norm.size - first, inverse, values);
    pack_row_group(place, static_cast<int>(num_full), values);
  }
}

struct RmsNormArgs {
  const float* x;  // [num_rows, x_stride]
  int64_t x_stride;
  int64_t num_rows;
  const float* weight;  // [size]
  int64_t size;
  float eps;
  float* y;  // out [num_rows, y_stride]; may be x
  int64_t y_stride;
};

constexpr int64_t kNormRowsPerItem = 8;

inline int64_t rms_norm_num_items(const RmsNormArgs& args) {
  return cdiv(args.num_rows, kNormRowsPerItem);
}

inline void rms_norm_run_item(const RmsNormArgs& args, int64_t item) {
  const int64_t end = std::min((item + 1) * kNormRowsPerItem, args.num_rows);
  for (int64_t row = item * kNormRowsPerItem; row < end; ++row) {
    rms_norm_row(args.x + row * args.x_stride, args.weight, args.size, args.eps,
                 args.y + row * args.y_stride);
  }
}

}  // namespace kvloom
