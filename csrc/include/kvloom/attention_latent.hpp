// The values of a latent layout: the first numbers of its keys, brought into the order of values.
#pragma once

#include <cstring>

#include "kvloom/kv_layout.hpp"

namespace kvloom {

// keys [.][16 tokens] -> values [16 tokens][size].
inline void latent_values_f32(const char* keys, int size, char* values) {
  for (int token = 0; token < kSubBlockTokens; ++token) {
    for (int i = 0; i < size; ++i) {
      std::memcpy(values + (token * size + i) * 4, keys + (i * kSubBlockTokens + token) * 4, 4);
    }
  }
}

typedef uint64_t vu64x8 __attribute__((vector_size(64)));

// x[i][j] becomes x[j][i]: blocks of 1, 2 and 4 are exchanged across the diagonal.
KVLOOM_INLINE void transpose(vu64x8 (&x)[8]) {
  constexpr vu64x8 kUpper[] = {
      {0, 8, 2, 10, 4, 12, 6, 14}, {0, 1, 8, 9, 4, 5, 12, 13}, {0, 1, 2, 3, 8, 9, 10, 11}};
  constexpr vu64x8 kLower[] = {
      {1, 9, 3, 11, 5, 13, 7, 15}, {2, 3, 10, 11, 6, 7, 14, 15}, {4, 5, 6, 7, 12, 13, 14, 15}};
#pragma GCC unroll 3
  for (int step = 0; step < 3; ++step) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      if (i >> step & 1) continue;
      const vu64x8 upper = x[i], lower = x[i | 1 << step];
      x[i] = __builtin_shuffle(upper, lower, kUpper[step]);
      x[i | 1 << step] = __builtin_shuffle(upper, lower, kLower[step]);
    }
  }
}

// keys [.][16 tokens][2 numbers] -> values [8 token pairs][size][2 tokens]. What 8 bytes hold of
// two tokens, numbers (a0 a1) and (b0 b1), becomes (a0 b0) and (a1 b1).
inline void latent_values_bf16(const char* keys, int size, char* values) {
  constexpr int kPairs = kSubBlockTokens / 2;
  for (int i = 0; i < size / 2; i += 8) {
    vu64x8 x[8];
#pragma GCC unroll 8
    for (int row = 0; row < 8; ++row) {
      std::memcpy(&x[row], keys + (i + row) * kSubBlockTokens * 4, sizeof(x[row]));
      x[row] = (x[row] & 0xffff00000000ffffu) | (x[row] >> 16 & 0xffff0000u) |
               (x[row] & 0xffff0000u) << 16;
    }
    transpose(x);
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
      std::memcpy(values + pair * size * 4 + i * 8, &x[pair], sizeof(x[pair]));
    }
  }
}

inline void latent_values(const KVLayout& layout, const char* keys, char* values) {
  if (layout.format == KVFormat::BF16) {
    latent_values_bf16(keys, layout.head_size_v, values);
  } else {
    latent_values_f32(keys, layout.head_size_v, values);
  }
}

}  // namespace kvloom
