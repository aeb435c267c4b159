// Powers of two by the bits of a float, for the instruction sets that have no instruction for them:
// the end of their files. See simd.hpp.
#pragma once

namespace kvloom {

struct Exponent {
  vf32 whole;
  vf32 fraction;
};

// Within the exponents of floats: -127 is that of 0, 128 that of infinity.
KVLOOM_INLINE Exponent split_exponent(vf32 x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits for a fraction
  x = vmax(vf32{} - 127.0f, vmin(vf32{} + 128.0f, x));
  const vf32 whole = (x + kRounder) - kRounder;
  return {whole, x - whole};
}

KVLOOM_INLINE vf32 times_power(vf32 p, vf32 whole) {
  const vf32 biased = whole + (12582912.0f + 127.0f);  // the exponent's bits are the lowest
  return p * (vf32)((vu32)biased << 23);
}

}  // namespace kvloom
