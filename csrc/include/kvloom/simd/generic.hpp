// Any machine with vectors of 16 bytes, through the compiler's vector types alone; on aarch64 with
// the fused multiply-add, maximum and minimum that every such machine has. See simd.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvloom/types.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvloom {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "pairs and quads are read as little-endian");

constexpr const char* kIsaName = "generic";
constexpr int kLanes = 4;

typedef float vf32 __attribute__((vector_size(16)));
typedef int32_t vi32 __attribute__((vector_size(16)));
typedef uint32_t vu32 __attribute__((vector_size(16)));
typedef int16_t vi16 __attribute__((vector_size(16)));
typedef uint16_t vu16 __attribute__((vector_size(16)));
typedef uint16_t vu16_half __attribute__((vector_size(8)));
typedef uint8_t vu8_quarter __attribute__((vector_size(4)));
typedef int8_t vi8_quarter __attribute__((vector_size(4)));

#if defined(__aarch64__)
constexpr int kNumRegisters = 32;
constexpr bool kHasFma = true;
KVLOOM_INLINE vf32 fma(vf32 a, vf32 b, vf32 c) {
  return (vf32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
constexpr int kNumRegisters = 16;
constexpr bool kHasFma = false;
KVLOOM_INLINE vf32 fma(vf32 a, vf32 b, vf32 c) { return a * b + c; }
#endif
KVLOOM_INLINE vf32 vmax(vf32 a, vf32 b) { return a > b ? a : b; }
KVLOOM_INLINE vf32 vmin(vf32 a, vf32 b) { return a < b ? a : b; }

// The sum with 1.5 * 2^23 has no bits left for a fraction: the machine rounds, to the nearest even.
KVLOOM_INLINE vi32 round_to_i32(vf32 x) { return (vi32)((vu32)(x + 12582912.0f) - 0x4b400000u); }
KVLOOM_INLINE vf32 to_f32(vi32 x) { return __builtin_convertvector(x, vf32); }

KVLOOM_INLINE vu32 widen_u16(const uint16_t* p) {
  vu16_half x;
  std::memcpy(&x, p, sizeof(x));
#if defined(__aarch64__)
  return (vu32)vmovl_u16((uint16x4_t)x);  // GCC 12 would do it lane by lane
#else
  return __builtin_convertvector(x, vu32);
#endif
}
KVLOOM_INLINE vf32 load_bf16(const uint16_t* p) { return (vf32)(widen_u16(p) << 16); }

// The bf16 of each lane, nearest even, in the upper half of the lane; the lower half is 0.
KVLOOM_INLINE vu32 round_bf16(vf32 x) {
  const vu32 bits = (vu32)x;
  const vu32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (x == x ? rounded : bits | 0x400000u) & 0xffff0000u;
}
KVLOOM_INLINE void store_bf16(uint16_t* p, vf32 x) {
  const vu16_half bits = __builtin_convertvector(round_bf16(x) >> 16, vu16_half);
  std::memcpy(p, &bits, sizeof(bits));
}
KVLOOM_INLINE vi32 pack_bf16_pairs(vf32 lo, vf32 hi) {
  return (vi32)(round_bf16(lo) >> 16 | round_bf16(hi));
}

// As f16_to_f32 of types.hpp, without branches.
KVLOOM_INLINE vf32 load_f16(const uint16_t* p) {
  const vu32 bits = widen_u16(p);
  const vu32 magnitude = (bits & 0x7fffu) << 13;
  const vu32 exponent = magnitude & 0x0f800000u;
  const vu32 value = magnitude + (112u << 23);
  const vf32 subnormal = (vf32)(value + (1u << 23)) - (vf32)(vu32{} + (113u << 23));
  const vu32 finite = exponent == 0u ? (vu32)subnormal : value;
  const vu32 all = exponent == 0x0f800000u ? value + (112u << 23) : finite;
  return (vf32)(all | (bits & 0x8000u) << 16);
}

KVLOOM_INLINE vi32 widen_u8(const uint8_t* p) {
  vu8_quarter x;
  std::memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, vi32);
}
KVLOOM_INLINE vi32 widen_s8(const int8_t* p) {
  vi8_quarter x;
  std::memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, vi32);
}
KVLOOM_INLINE void store_i8(int8_t* p, vi32 x) {
  const vi32 low = vi32{} - 128, high = vi32{} + 127;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const vi8_quarter bytes = __builtin_convertvector(x, vi8_quarter);
  std::memcpy(p, &bytes, sizeof(bytes));
}

KVLOOM_INLINE vi32 pack_quads(vi32 a, vi32 b, vi32 c, vi32 d) {
  int8_t bytes[4 * kLanes];
  store_i8(bytes, a);
  store_i8(bytes + kLanes, b);
  store_i8(bytes + 2 * kLanes, c);
  store_i8(bytes + 3 * kLanes, d);
  vi32 packed;
  std::memcpy(&packed, bytes, sizeof(packed));
  return packed;
}

KVLOOM_INLINE void store_partial(float* p, vf32 x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

KVLOOM_INLINE void store_halves(void* p, const uint16_t* x, int half) {
  char* to = static_cast<char*>(p) + 2 * half;
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + 4 * i, x + i, sizeof(*x));
}

KVLOOM_INLINE vi32 zip_low(vi32 a, vi32 b) { return vi32{a[0], b[0], a[1], b[1]}; }
KVLOOM_INLINE vi32 zip_high(vi32 a, vi32 b) { return vi32{a[2], b[2], a[3], b[3]}; }

KVLOOM_INLINE float reduce_add(vf32 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
KVLOOM_INLINE float reduce_max(vf32 x) {
  const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}
KVLOOM_INLINE int32_t reduce_add(vi32 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
KVLOOM_INLINE int32_t reduce_max(vi32 x) {
  const int32_t even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}

KVLOOM_INLINE uint32_t lanes_of(vi32 mask) {
  const vi32 bits = mask & vi32{1, 2, 4, 8};
  return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
}

KVLOOM_INLINE vf32 dot_bf16(vf32 acc, vi32 a, vi32 b) {
  acc = fma((vf32)((vu32)a << 16), (vf32)((vu32)b << 16), acc);
  return fma((vf32)((vu32)a & 0xffff0000u), (vf32)((vu32)b & 0xffff0000u), acc);
}

// The sum of each lane's two 16-bit halves.
KVLOOM_INLINE vi32 add_halves(vi16 x) {
  const vi32 pairs = (vi32)x;
  return ((vi32)((vu32)pairs << 16) >> 16) + (pairs >> 16);
}
// Even and odd bytes apart: the product of an unsigned and a signed byte fits 16 bits.
KVLOOM_INLINE vi32 dot_u8s8(vi32 acc, vi32 a, vi32 b) {
  const vi16 a_even = (vi16)((vu16)a & (uint16_t)0xff), a_odd = (vi16)((vu16)a >> 8);
  const vi16 b_even = (vi16)((vu16)b << 8) >> 8, b_odd = (vi16)b >> 8;
  return acc + add_halves(a_even * b_even) + add_halves(a_odd * b_odd);
}
KVLOOM_INLINE vi32 dot_u7s8(vi32 acc, vi32 a, vi32 b) { return dot_u8s8(acc, a, b); }

}  // namespace kvloom

#include "kvloom/simd/exponent.hpp"
