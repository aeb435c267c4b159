// Operations on f32 rows: value by value, or by what a whole run of values has in common.
//
// Functions here take one run of `size` values: a row, a head of one, or a part of one. Results may
// lie where an operand lies, unless said otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kvloom/gemm_activation.hpp"
#include "kvloom/norm.hpp"
#include "kvloom/simd.hpp"
#include "kvloom/tanh.hpp"

namespace kvloom {

// What becomes of each value a, with a second value b.
enum class MapKind {
  Add,       // a + b
  Multiply,  // a * b
  SoftCap,   // b * tanh(a / b)
  // The activation of a:
  Silu,
  Gelu,
  GeluTanh,
  Tanh,
};

// out[i] = function(a[i], b[i]), or of b[0] if b is one value.
template <class Function>
KVLOOM_INLINE void map_values(const float* a, const float* b, bool is_one_b, int64_t size,
                              float* out, Function function) {
  const vf32 one = broadcast(*b);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(out + i, function(load(a + i), is_one_b ? one : load(b + i)));
  }
  if (const int rest = static_cast<int>(size - i); rest > 0) {
    const vf32 last_b = is_one_b ? one : load_partial(b + i, rest);
    store_partial(out + i, function(load_partial(a + i, rest), last_b), rest);
  }
}

// `b` is read even where it does not matter.
inline void map_run(MapKind kind, const float* a, const float* b, bool is_one_b, int64_t size,
                    float* out) {
  const auto map = [&](auto function) { map_values(a, b, is_one_b, size, out, function); };
  switch (kind) {
    case MapKind::Add:
      return map([](vf32 x, vf32 y) { return x + y; });
    case MapKind::Multiply:
      return map([](vf32 x, vf32 y) { return x * y; });
    case MapKind::SoftCap:
      return map([](vf32 x, vf32 cap) { return cap * tanh(x / cap); });
    case MapKind::Silu:
      return map([](vf32 x, vf32) { return activate(Activation::Silu, x); });
    case MapKind::Gelu:
      return map([](vf32 x, vf32) { return activate(Activation::Gelu, x); });
    case MapKind::GeluTanh:
      return map([](vf32 x, vf32) { return activate(Activation::GeluTanh, x); });
    case MapKind::Tanh:
      return map([](vf32 x, vf32) { return tanh(x); });
  }
}

// activation(gate) * up of gate [size] and up [size].
inline void gated_run(Activation activation, const float* gate, const float* up, int64_t size,
                      float* out) {
  map_values(gate, up, false, size, out,
             [activation](vf32 a, vf32 b) { return activate_gated(activation, a, b); });
}

// ---- Of a whole run ----

// Sum of function(x[i]); the order depends on `size` alone.
template <class Function>
KVLOOM_INLINE float sum_values(const float* x, int64_t size, Function function) {
  vf32 even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    even = even + function(load(x + i));
    odd = odd + function(load(x + i + kLanes));
  }
  for (; i < size; i += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(size - i, kLanes));
    const vf32 values = function(load_partial(x + i, count));
    odd = odd + (first_lanes(count) ? values : vf32{});
  }
  return reduce_add(even + odd);
}

struct Moments {
  float mean;
  float variance;  // of the run itself, not an estimate
};

inline Moments moments_of(const float* x, int64_t size) {
  const float count = static_cast<float>(size);
  const float mean = sum_values(x, size, [](vf32 v) { return v; }) / count;
  const vf32 centre = broadcast(mean);
  const auto squared = [centre](vf32 v) { return (v - centre) * (v - centre); };
  return {mean, sum_values(x, size, squared) / count};
}

// (x - mean) / sqrt(variance + eps) * weight.
inline void layer_norm_run(const float* x, const float* weight, int64_t size, float eps,
                           float* out) {
  const Moments moments = moments_of(x, size);
  const vf32 mean = broadcast(moments.mean);
  const vf32 inverse = broadcast(1.0f / std::sqrt(moments.variance + eps));
  map_values(x, weight, false, size, out, [=](vf32 v, vf32 w) { return (v - mean) * inverse * w; });
}

// max(x - (mean + num_deviations * deviation), 0).
inline void gaussian_top_run(const float* x, float num_deviations, int64_t size, float* out) {
  const Moments moments = moments_of(x, size);
  const float least = moments.mean + num_deviations * std::sqrt(moments.variance);
  // vmax keeps a NaN of its second operand.
  map_values(x, &least, true, size, out,
             [](vf32 v, vf32 limit) { return vmax(vf32{}, v - limit); });
}

inline float root_mean_square(const float* x, int64_t size) {
  const float squares = sum_values(x, size, [](vf32 v) { return v * v; });
  return std::sqrt(squares / static_cast<float>(size));
}

// x * rms(target) / max(rms(x), floor).
inline void match_rms_run(const float* x, const float* target, float floor, int64_t size,
                          float* out) {
  const float own = root_mean_square(x, size);
  // As the comparison is written, a NaN stays one.
  const float factor = root_mean_square(target, size) / (own < floor ? floor : own);
  map_values(x, &factor, true, size, out, [](vf32 v, vf32 f) { return v * f; });
}

// residual + x / sqrt(mean(x^2) + eps) * weight.
inline void add_norm_run(const float* residual, const float* x, const RmsNorm& norm, float* out) {
  const float inverse = rms_inverse(x, norm.size, norm.eps);
  const vf32 factor = broadcast(inverse);
  int64_t i = 0;
  for (; i + kLanes <= norm.size; i += kLanes) {
    const vf32 scaled = load(x + i) * factor * load(norm.weight + i);
    store(out + i, load(residual + i) + scaled);
  }
  for (; i < norm.size; ++i) out[i] = residual[i] + x[i] * inverse * norm.weight[i];
}

}  // namespace kvloom
