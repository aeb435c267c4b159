// Small things that every kernel uses: rounding of counts, and scalar twins of the 16-bit formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define KVLOOM_INLINE inline __attribute__((always_inline))

namespace kvloom {

// ceil(a / b) and the next multiple of b; a >= 0, b > 0.
constexpr int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return cdiv(a, b) * b; }

constexpr size_t kCacheLineBytes = 64;

// The bits of one type as another of the same size.
template <class To, class From>
KVLOOM_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float bf16_to_f32(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }

// Nearest even; a NaN stays a (quiet) NaN.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{bits & 0x7fffu} << 13;  // exponent and mantissa, bias 15
  const uint32_t exponent = magnitude & 0x0f800000u;
  uint32_t value = magnitude + (112u << 23);         // bias 127
  if (exponent == 0x0f800000u) value += 112u << 23;  // inf and NaN
  // A subnormal: read as 2^-14 * 1.m, then the one is taken away.
  if (exponent == 0) {
    const float one_too_many = bit_cast<float>(value + (1u << 23));
    value = bit_cast<uint32_t>(one_too_many - bit_cast<float>(113u << 23));
  }
  return bit_cast<float>(value | sign);
}

}  // namespace kvloom
