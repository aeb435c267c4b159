// Rotary position embedding of one head, and the norm that some models put before it.
#pragma once

#include <cmath>

#include "kvloom/simd.hpp"

namespace kvloom {

// Rotates x[i] against x[i + num_pairs] for i < num_pairs. y may be x.
// rotation: the position's row of the table, cos [num_pairs] then sin [num_pairs].
inline void rotate_head(const float* x, const float* rotation, int num_pairs, float* y) {
  const float *cos = rotation, *sin = rotation + num_pairs;
  int i = 0;
  for (; i + kLanes <= num_pairs; i += kLanes) {
    const vf32 a = load(x + i), b = load(x + num_pairs + i), c = load(cos + i), s = load(sin + i);
    store(y + i, a * c - b * s);
    store(y + num_pairs + i, b * c + a * s);
  }
  for (; i < num_pairs; ++i) {
    const float a = x[i], b = x[num_pairs + i];
    y[i] = a * cos[i] - b * sin[i];
    y[num_pairs + i] = b * cos[i] + a * sin[i];
  }
}

// Rotates x[2 i] against x[2 i + 1] for i < num_pairs. y may be x.
inline void rotate_neighbours(const float* x, const float* rotation, int num_pairs, float* y) {
  const float *cos = rotation, *sin = rotation + num_pairs;
  for (int i = 0; i < num_pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    y[2 * i] = a * cos[i] - b * sin[i];
    y[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// x / sqrt(mean(x^2) + eps) * weight; size is a multiple of 16. y may be x.
inline void norm_head(const float* x, const float* weight, float eps, int size, float* y) {
  vf32 squares = {};
  for (int i = 0; i < size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const float mean = reduce_add(squares) / static_cast<float>(size);
  const vf32 factor = broadcast(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < size; i += kLanes) store(y + i, load(x + i) * factor * load(weight + i));
}

}  // namespace kvloom
