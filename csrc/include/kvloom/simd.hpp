// Vectors of kLanes numbers, the only place that knows instruction sets. Kernels are written once
// over this file; each module is compiled with the flags of its instruction set
// (csrc/arch/isas.cmake).
//
// vf32, vi32 and vu32 are the compiler's vector types: + - * / & | ^ << >> < ?: work on them lane
// by lane (a comparison gives a vi32 of 0 and -1). Signed lanes must not overflow; vu32 wraps.
// Nothing here needs aligned pointers. Products and sums are fused only where fma() is written: the
// build sets -ffp-contract=off, so that the same source gives the same numbers wherever it is
// inlined.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvloom/types.hpp"

// Each of these defines kIsaName, kLanes, the vector types and the operations that have an
// instruction of their own: fma, vmax, vmin, split_exponent, times_power, round_to_i32, to_f32,
// load_bf16, store_bf16, store_halves, store_partial, pack_bf16_pairs, pack_quads, load_f16,
// widen_u8, widen_s8, store_i8, zip_low, zip_high, reduce_add, reduce_max, lanes_of, dot_bf16,
// dot_u8s8, dot_u7s8.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "kvloom/simd/avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kvloom/simd/avx2.hpp"
#else
#include "kvloom/simd/generic.hpp"
#endif

namespace kvloom {

// ---- What the included file defines, for the reader ----
// constexpr const char* kIsaName;      "avx512bf16", "avx512", "avx2" or "generic"
// constexpr int kLanes;                16, 16, 8 or 4
// constexpr int kNumRegisters;         vector registers: 32, 32, 16, and 16 (32 on aarch64)
// constexpr bool kHasFma;              whether fma() rounds once
// vf32 fma(vf32 a, vf32 b, vf32 c)     a * b + c
// vf32 vmax(vf32 a, vf32 b)            a > b ? a : b, so that vmax(limit, x) keeps a NaN of x
// vf32 vmin(vf32 a, vf32 b)            a < b ? a : b
// vi32 round_to_i32(vf32 x)            nearest even; |x| <= 2^22
// vf32 to_f32(vi32 x)
// Exponent split_exponent(vf32 x)      {whole, fraction}: the nearest integer, which may be limited
//                                      to the exponents of floats, and what is left, -1/2 to 1/2
// vf32 times_power(vf32 p, vf32 whole) p * 2^whole of such a whole; 0.7 < p < 1.5
// vf32 load_bf16(const uint16_t* p)    kLanes values
// void store_bf16(uint16_t* p, vf32 x) nearest even, NaN stays NaN; subnormals may become 0
// void store_halves(void* p, const uint16_t* x, int half)  kLanes of them to the lower (0) or upper
//                                      (1) halves of kLanes units; nobody's other halves are
//                                      written
// vi32 pack_bf16_pairs(vf32 lo, vf32 hi)  lane l holds bf16(lo[l]) below bf16(hi[l])
// vi32 pack_quads(vi32 a, b, c, d)     all their lanes in order as saturated bytes, four to a lane
// void store_partial(float* p, vf32 x, int n)   the first n lanes
// vf32 load_f16(const uint16_t* p)     exact, IEEE half precision
// vi32 widen_u8(const uint8_t* p), widen_s8(const int8_t* p)   kLanes bytes
// void store_i8(int8_t* p, vi32 x)     saturating, kLanes bytes
// vi32 zip_low(vi32 a, vi32 b), zip_high(a, b)   the lower (upper) half of a's lanes, each followed
//                                      by b's: a0 b0 a1 b1 ...
// float reduce_add(vf32 x), reduce_max(vf32 x)   halves against each other, log2(kLanes) times: a
// fixed order
// int32_t reduce_add(vi32 x), reduce_max(vi32 x)
// uint32_t lanes_of(vi32 mask)         bit l is set where lane l is -1; the other lanes are 0
// vf32 dot_bf16(vf32 acc, vi32 a, vi32 b)  acc[l] += a.lo[l] * b.lo[l] + a.hi[l] *
// b.hi[l], bf16 pairs; the
//                                          order within the pair and flushing of subnormals vary
//                                          with the ISA
// vi32 dot_u8s8(vi32 acc, vi32 a, vi32 b)  acc[l] += sum of 4 products, a unsigned, b signed bytes;
// exact vi32 dot_u7s8(vi32 acc, vi32 a, vi32 b)  the same, cheaper on some ISAs; bytes of a at most
// 127 (4-bit codes)

// ---- Memory ----
KVLOOM_INLINE vf32 load(const float* p) {
  vf32 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
KVLOOM_INLINE void store(float* p, vf32 x) { std::memcpy(p, &x, sizeof(x)); }

// kLanes 32-bit integers, quads of bytes or bf16 pairs, wherever they lie.
KVLOOM_INLINE vi32 load_i32(const void* p) {
  vi32 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
KVLOOM_INLINE void store_i32(void* p, vi32 x) { std::memcpy(p, &x, sizeof(x)); }

KVLOOM_INLINE vf32 broadcast(float x) { return vf32{} + x; }
KVLOOM_INLINE vi32 broadcast(int32_t x) { return vi32{} + x; }

// One integer, quad of bytes or bf16 pair, in every lane.
KVLOOM_INLINE vi32 broadcast_i32(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof(x));
  return broadcast(x);
}

// The first n of kLanes values, 0 <= n <= kLanes; the other lanes are `fill`, their memory is not
// touched, nor is it by store_partial.
KVLOOM_INLINE vf32 load_partial(const float* p, int n, float fill = 0.0f) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
  return load(lanes);
}

// Starts to bring a cache line near; any address is allowed.
KVLOOM_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
KVLOOM_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

KVLOOM_INLINE void prefetch_two_lines(const void* p) {
  prefetch_l2(p);
  prefetch_l2(static_cast<const char*>(p) + kCacheLineBytes);
}

// ---- Bits ----
KVLOOM_INLINE vi32 as_i32(vf32 x) { return reinterpret_cast<vi32>(x); }
KVLOOM_INLINE vu32 as_u32(vf32 x) { return reinterpret_cast<vu32>(x); }
KVLOOM_INLINE vf32 as_f32(vi32 x) { return reinterpret_cast<vf32>(x); }
KVLOOM_INLINE vf32 as_f32(vu32 x) { return reinterpret_cast<vf32>(x); }

// 0, 1, 2, ..., kLanes - 1
KVLOOM_INLINE vi32 lane_index() {
  vi32 x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}
// -1 in lanes below n, else 0: a mask for ?:
KVLOOM_INLINE vi32 first_lanes(int32_t n) { return lane_index() < broadcast(n); }

// The four low (high) nibbles of each byte quad, as bytes.
KVLOOM_INLINE vi32 low_nibbles(vi32 x) { return x & 0x0f0f0f0f; }
KVLOOM_INLINE vi32 high_nibbles(vi32 x) { return (x >> 4) & 0x0f0f0f0f; }

// What `combine` makes of all lanes of rows[r], in lane r. Each round zips the halves of all
// vectors, so that a lane's number in the end is that of the row it comes from.
template <class Combine>
KVLOOM_INLINE vi32 reduce_each(const vi32 (&rows)[kLanes], Combine combine) {
  vi32 x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = rows[i];
#pragma GCC unroll 16
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      x[i] = combine(zip_low(x[i], x[i + half]), zip_high(x[i], x[i + half]));
    }
  }
  return x[0];
}

// [kLanes][kSize] units become [kSize][kLanes]: each round zips the first half of all units with
// the second, which moves the first digit of each unit's number behind its last.
template <int kSize>
KVLOOM_INLINE void transpose(vi32 (&units)[kSize]) {
#pragma GCC unroll 16
  for (int round = kLanes; round > 1; round /= 2) {
    vi32 zipped[kSize];
#pragma GCC unroll 16
    for (int i = 0; i < kSize / 2; ++i) {
      zipped[2 * i] = zip_low(units[i], units[i + kSize / 2]);
      zipped[2 * i + 1] = zip_high(units[i], units[i + kSize / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) units[i] = zipped[i];
  }
}

// ---- Numbers ----
KVLOOM_INLINE vf32 vabs(vf32 x) { return as_f32(as_i32(x) & 0x7fffffff); }

// 2^x with a relative error of at most 3e-7 from -126 to 127.4. Below, it is that number rounded as
// a subnormal or 0, from -150 on (and of -inf) exactly 0; x >= 128 gives +inf, a NaN stays a NaN.
// The polynomial is the best of its degree for 2^f over [-1/2, 1/2] with the constant term 1:
// relative error 9.1e-8 (fitted by iteratively reweighted least squares).
KVLOOM_INLINE vf32 exp2(vf32 x) {
  const Exponent exponent = split_exponent(x);
  const vf32 f = exponent.fraction;
  vf32 p = broadcast(1.3264727e-3f);
  p = fma(p, f, broadcast(9.6715130e-3f));
  p = fma(p, f, broadcast(5.5507336e-2f));
  p = fma(p, f, broadcast(2.4022242e-1f));
  p = fma(p, f, broadcast(6.9314700e-1f));
  p = fma(p, f, broadcast(1.0f));
  return times_power(p, exponent.whole);
}

}  // namespace kvloom
