// AVX512 F, BW, VL and DQ; with BF16 and VNNI where the module is compiled for them. See simd.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kvloom/types.hpp"

namespace kvloom {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr const char* kIsaName = "avx512bf16";
#else
constexpr const char* kIsaName = "avx512";
#endif
constexpr int kLanes = 16;
constexpr int kNumRegisters = 32;

typedef float vf32 __attribute__((vector_size(64)));
typedef int32_t vi32 __attribute__((vector_size(64)));
typedef uint32_t vu32 __attribute__((vector_size(64)));

struct Exponent {
  vf32 whole;
  vf32 fraction;
};

constexpr bool kHasFma = true;
KVLOOM_INLINE vf32 fma(vf32 a, vf32 b, vf32 c) { return _mm512_fmadd_ps(a, b, c); }
KVLOOM_INLINE vf32 vmax(vf32 a, vf32 b) { return _mm512_max_ps(a, b); }
KVLOOM_INLINE vf32 vmin(vf32 a, vf32 b) { return _mm512_min_ps(a, b); }
KVLOOM_INLINE vi32 round_to_i32(vf32 x) { return (vi32)_mm512_cvtps_epi32(x); }
KVLOOM_INLINE vf32 to_f32(vi32 x) { return _mm512_cvtepi32_ps((__m512i)x); }

KVLOOM_INLINE Exponent split_exponent(vf32 x) {
  const vf32 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT);  // 0 of an infinity
  return {x - fraction, fraction};
}
KVLOOM_INLINE vf32 times_power(vf32 p, vf32 whole) { return _mm512_scalef_ps(p, whole); }

KVLOOM_INLINE __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
KVLOOM_INLINE __m128i load_128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

KVLOOM_INLINE vf32 load_bf16(const uint16_t* p) {
  return (vf32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16);
}
KVLOOM_INLINE vf32 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_256(p)); }
KVLOOM_INLINE vi32 widen_u8(const uint8_t* p) { return (vi32)_mm512_cvtepu8_epi32(load_128(p)); }
KVLOOM_INLINE vi32 widen_s8(const int8_t* p) { return (vi32)_mm512_cvtepi8_epi32(load_128(p)); }
KVLOOM_INLINE void store_i8(int8_t* p, vi32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8((__m512i)x));
}

// The pack instructions take 16 bytes of each in turn.
KVLOOM_INLINE vi32 pack_quads(vi32 a, vi32 b, vi32 c, vi32 d) {
  const __m512i words_ab = _mm512_packs_epi32((__m512i)a, (__m512i)b);
  const __m512i words_cd = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  const vi32 order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return (vi32)_mm512_permutexvar_epi32((__m512i)order, _mm512_packs_epi16(words_ab, words_cd));
}

KVLOOM_INLINE void store_partial(float* p, vf32 x, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x);
}

KVLOOM_INLINE void store_halves(void* p, const uint16_t* x, int half) {
  const __m512i wide = _mm512_cvtepu16_epi32(load_256(x));
  const __m512i placed = _mm512_sll_epi32(wide, _mm_cvtsi32_si128(16 * half));
  _mm512_mask_storeu_epi16(p, half == 0 ? 0x55555555u : 0xaaaaaaaau, placed);
}

KVLOOM_INLINE vi32 zip_low(vi32 a, vi32 b) {
  const vi32 order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  return (vi32)_mm512_permutex2var_epi32((__m512i)a, (__m512i)order, (__m512i)b);
}
KVLOOM_INLINE vi32 zip_high(vi32 a, vi32 b) {
  const vi32 order = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (vi32)_mm512_permutex2var_epi32((__m512i)a, (__m512i)order, (__m512i)b);
}

KVLOOM_INLINE float reduce_add(vf32 x) { return _mm512_reduce_add_ps(x); }
KVLOOM_INLINE float reduce_max(vf32 x) { return _mm512_reduce_max_ps(x); }
KVLOOM_INLINE int32_t reduce_add(vi32 x) { return _mm512_reduce_add_epi32((__m512i)x); }
KVLOOM_INLINE int32_t reduce_max(vi32 x) { return _mm512_reduce_max_epi32((__m512i)x); }
KVLOOM_INLINE uint32_t lanes_of(vi32 mask) { return _mm512_movepi32_mask((__m512i)mask); }

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

KVLOOM_INLINE void store_bf16(uint16_t* p, vf32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
KVLOOM_INLINE vi32 pack_bf16_pairs(vf32 lo, vf32 hi) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);  // lo's 16, then hi's 16
  const vi32 order = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005,
                      0x160006, 0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b,
                      0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
  return (vi32)_mm512_permutexvar_epi16((__m512i)order, halves);
}
KVLOOM_INLINE vf32 dot_bf16(vf32 acc, vi32 a, vi32 b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
KVLOOM_INLINE vi32 dot_u8s8(vi32 acc, vi32 a, vi32 b) {
  return (vi32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
KVLOOM_INLINE vi32 dot_u7s8(vi32 acc, vi32 a, vi32 b) { return dot_u8s8(acc, a, b); }

#else

// The bf16 of each lane, nearest even, in the upper half of the lane; the lower half is 0.
KVLOOM_INLINE vu32 round_bf16(vf32 x) {
  const vu32 bits = (vu32)x;
  const vu32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (x == x ? rounded : bits | 0x400000u) & 0xffff0000u;
}
KVLOOM_INLINE void store_bf16(uint16_t* p, vf32 x) {
  const __m256i bits = _mm512_cvtepi32_epi16((__m512i)(round_bf16(x) >> 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}
KVLOOM_INLINE vi32 pack_bf16_pairs(vf32 lo, vf32 hi) {
  return (vi32)(round_bf16(lo) >> 16 | round_bf16(hi));
}
KVLOOM_INLINE vf32 dot_bf16(vf32 acc, vi32 a, vi32 b) {
  acc = fma((vf32)((vu32)a << 16), (vf32)((vu32)b << 16), acc);
  return fma((vf32)((vu32)a & 0xffff0000u), (vf32)((vu32)b & 0xffff0000u), acc);
}
// Even and odd bytes apart, since the product of two bytes fits 16 bits and the sum of two does
// not.
KVLOOM_INLINE vi32 dot_u8s8(vi32 acc, vi32 a, vi32 b) {
  const __m512i a_even = _mm512_and_si512((__m512i)a, _mm512_set1_epi16(0xff));
  const __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8);
  const __m512i a_odd = _mm512_srli_epi16((__m512i)a, 8);
  const __m512i b_odd = _mm512_srai_epi16((__m512i)b, 8);
  return acc + (vi32)_mm512_madd_epi16(a_even, b_even) + (vi32)_mm512_madd_epi16(a_odd, b_odd);
}
KVLOOM_INLINE vi32 dot_u7s8(vi32 acc, vi32 a, vi32 b) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
  return acc + (vi32)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

#endif

}  // namespace kvloom
