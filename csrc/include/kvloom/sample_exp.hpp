// The exponential in float64, for the weights of tokens: sums over a vocabulary must not lose the
// small ones, and a drawn token must be the one that numpy's float64 draws.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvloom/simd.hpp"

namespace kvloom {

constexpr int kLanes64 = kLanes / 2;
typedef double vf64 __attribute__((vector_size(8 * kLanes64)));
typedef int64_t vi64 __attribute__((vector_size(8 * kLanes64)));
typedef float vf32_half __attribute__((vector_size(4 * kLanes64)));

KVLOOM_INLINE vf64 load_f64(const double* p) {
  vf64 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
KVLOOM_INLINE vf64 load_f64(const float* p) {
  vf32_half x;
  std::memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, vf64);
}
KVLOOM_INLINE void store_f64(double* p, vf64 x) { std::memcpy(p, &x, sizeof(x)); }

// a * b + c, rounded once where the machine can.
KVLOOM_INLINE vf64 fma_f64(vf64 a, vf64 b, vf64 c) {
#ifdef __FP_FAST_FMA
  vf64 sum;
  for (int i = 0; i < kLanes64; ++i) sum[i] = __builtin_fma(a[i], b[i], c[i]);
  return sum;
#else
  return a * b + c;
#endif
}

KVLOOM_INLINE double reduce_add_f64(vf64 x) {
  double lanes[kLanes64];
  store_f64(lanes, x);
  for (int half = kLanes64 / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// e^x for x <= 0, within 2 units in the last place; exactly 1 for 0, exactly 0 below -708.
KVLOOM_INLINE vf64 exp_f64(vf64 x) {
  constexpr double kLowest = -708.0;
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 0x1.62e42fefa0000p-1;  // ln 2 in two parts: multiples are exact
  constexpr double kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const vf64 lowest = vf64{} + kLowest;
  const vf64 clamped = x > lowest ? x : lowest;
  const vf64 shifted = fma_f64(clamped, vf64{} + kLog2E, vf64{} + kRound);
  const vf64 n = shifted - kRound;
  vf64 r = fma_f64(n, vf64{} - kLn2High, clamped);
  r = fma_f64(n, vf64{} - kLn2Low, r);  // |r| <= ln(2) / 2
  // The minimax polynomial of degree 11 whose first terms are 1 + r. Without a loop: g++ 12 leaves
  // one over the coefficients as it is.
  vf64 p = fma_f64(r, vf64{} + 0x1.af38a9b0ec855p-26, vf64{} + 0x1.289185613a3d6p-22);
  p = fma_f64(p, r, vf64{} + 0x1.71de0dae63bb3p-19);
  p = fma_f64(p, r, vf64{} + 0x1.a019b90d2ae7ap-16);
  p = fma_f64(p, r, vf64{} + 0x1.a01a01a7c41d5p-13);
  p = fma_f64(p, r, vf64{} + 0x1.6c16c1788bd90p-10);
  p = fma_f64(p, r, vf64{} + 0x1.11111111109b3p-7);
  p = fma_f64(p, r, vf64{} + 0x1.5555555553d63p-5);
  p = fma_f64(p, r, vf64{} + 0x1.5555555555556p-3);
  p = fma_f64(p, r, vf64{} + 0x1.0000000000001p-1);
  p = fma_f64(p, r, vf64{} + 1.0);
  p = fma_f64(p, r, vf64{} + 1.0);
  const vi64 bits = reinterpret_cast<vi64>(p) + (reinterpret_cast<vi64>(shifted) << 52);
  return x < lowest ? vf64{} : reinterpret_cast<vf64>(bits);
}

}  // namespace kvloom
