// AVX2 with FMA and F16C. See simd.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kvloom/types.hpp"

namespace kvloom {

constexpr const char* kIsaName = "avx2";
constexpr int kLanes = 8;
constexpr int kNumRegisters = 16;

typedef float vf32 __attribute__((vector_size(32)));
typedef int32_t vi32 __attribute__((vector_size(32)));
typedef uint32_t vu32 __attribute__((vector_size(32)));

constexpr bool kHasFma = true;
KVLOOM_INLINE vf32 fma(vf32 a, vf32 b, vf32 c) { return _mm256_fmadd_ps(a, b, c); }
KVLOOM_INLINE vf32 vmax(vf32 a, vf32 b) { return _mm256_max_ps(a, b); }
KVLOOM_INLINE vf32 vmin(vf32 a, vf32 b) { return _mm256_min_ps(a, b); }
KVLOOM_INLINE vi32 round_to_i32(vf32 x) { return (vi32)_mm256_cvtps_epi32(x); }
KVLOOM_INLINE vf32 to_f32(vi32 x) { return _mm256_cvtepi32_ps((__m256i)x); }

KVLOOM_INLINE __m128i load_128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
KVLOOM_INLINE __m128i load_64(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}

KVLOOM_INLINE vf32 load_bf16(const uint16_t* p) {
  return (vf32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16);
}
KVLOOM_INLINE vf32 load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_128(p)); }
KVLOOM_INLINE vi32 widen_u8(const uint8_t* p) { return (vi32)_mm256_cvtepu8_epi32(load_64(p)); }
KVLOOM_INLINE vi32 widen_s8(const int8_t* p) { return (vi32)_mm256_cvtepi8_epi32(load_64(p)); }

// The bf16 of each lane, nearest even, in the upper half of the lane; the lower half is 0.
KVLOOM_INLINE vu32 round_bf16(vf32 x) {
  const vu32 bits = (vu32)x;
  const vu32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (x == x ? rounded : bits | 0x400000u) & 0xffff0000u;
}
KVLOOM_INLINE void store_bf16(uint16_t* p, vf32 x) {
  const __m256i bits = (__m256i)(round_bf16(x) >> 16);
  const __m128i halves =
      _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
}
KVLOOM_INLINE vi32 pack_bf16_pairs(vf32 lo, vf32 hi) {
  return (vi32)(round_bf16(lo) >> 16 | round_bf16(hi));
}
KVLOOM_INLINE void store_i8(int8_t* p, vi32 x) {
  const __m256i lanes = (__m256i)x;
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// The pack instructions take 16 bytes of each in turn.
KVLOOM_INLINE vi32 pack_quads(vi32 a, vi32 b, vi32 c, vi32 d) {
  const __m256i words_ab = _mm256_packs_epi32((__m256i)a, (__m256i)b);
  const __m256i words_cd = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  const vi32 order = {0, 4, 1, 5, 2, 6, 3, 7};
  return (vi32)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_ab, words_cd), (__m256i)order);
}

KVLOOM_INLINE void store_partial(float* p, vf32 x, int n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes), x);
}

KVLOOM_INLINE void store_halves(void* p, const uint16_t* x, int half) {
  char* to = static_cast<char*>(p) + 2 * half;
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + 4 * i, x + i, sizeof(*x));
}

// The unpack instructions zip the halves of each 16 bytes.
KVLOOM_INLINE vi32 zip_low(vi32 a, vi32 b) {
  const __m256i even = _mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
  return (vi32)_mm256_permute2x128_si256(even, odd, 0x20);
}
KVLOOM_INLINE vi32 zip_high(vi32 a, vi32 b) {
  const __m256i even = _mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
  return (vi32)_mm256_permute2x128_si256(even, odd, 0x31);
}

KVLOOM_INLINE float reduce_add(vf32 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
KVLOOM_INLINE float reduce_max(vf32 x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
KVLOOM_INLINE int32_t reduce_add(vi32 x) {
  const __m256i all = (__m256i)x;
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
KVLOOM_INLINE int32_t reduce_max(vi32 x) {
  const __m256i all = (__m256i)x;
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}
KVLOOM_INLINE uint32_t lanes_of(vi32 mask) {
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
}

KVLOOM_INLINE vf32 dot_bf16(vf32 acc, vi32 a, vi32 b) {
  acc = fma((vf32)((vu32)a << 16), (vf32)((vu32)b << 16), acc);
  return fma((vf32)((vu32)a & 0xffff0000u), (vf32)((vu32)b & 0xffff0000u), acc);
}
// Even and odd bytes apart, since the product of two bytes fits 16 bits and the sum of two does
// not.
KVLOOM_INLINE vi32 dot_u8s8(vi32 acc, vi32 a, vi32 b) {
  const __m256i a_even = _mm256_and_si256((__m256i)a, _mm256_set1_epi16(0xff));
  const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8);
  const __m256i a_odd = _mm256_srli_epi16((__m256i)a, 8);
  const __m256i b_odd = _mm256_srai_epi16((__m256i)b, 8);
  return acc + (vi32)_mm256_madd_epi16(a_even, b_even) + (vi32)_mm256_madd_epi16(a_odd, b_odd);
}
KVLOOM_INLINE vi32 dot_u7s8(vi32 acc, vi32 a, vi32 b) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return acc + (vi32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

}  // namespace kvloom

#include "kvloom/simd/exponent.hpp"
