// The inner loops of the GEMM: one tile of rows times one panel of 32 outputs.
//
// A strip is what one call of a leaf computes: kRows rows x kVectors vectors of outputs; it returns
// what its lookahead has come to. Its sums are a local array, all loops over it are unrolled and
// nothing takes its address, or the compiler would keep it in memory. Every shape of strip does the
// same arithmetic for an output, so that a row's result does not depend on the rows beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvloom/format.hpp"
#include "kvloom/pack_rows.hpp"
#include "kvloom/simd.hpp"

#define KVLOOM_UNROLL _Pragma("GCC unroll 16")
#define KVLOOM_LEAF static __attribute__((noinline))

namespace kvloom {

// Memory to bring near line by line: the one at `next`, which moves on by `step` bytes each time
// that a strip of the panel's width asks. Addresses as integers, since they need not be in any
// array.
struct Stream {
  uintptr_t next = 0;
  uintptr_t step = 0;
};

// What to bring near while a tile is computed. All strips of a panel ask, each for its share, or
// the memory would rest while the others are computed.
struct Lookahead {
  Stream weights;
  Stream far;  // more of the weights, or what a later instruction reads
  // Whether several tiles share the weights: they go to the first cache then. One tile waits for
  // the memory and asks for as much as it gives, which is more than that cache can wait for.
  bool is_shared = false;

  // For kVectors x kLanes outputs.
  template <int kVectors>
  KVLOOM_INLINE void advance() {
    constexpr uintptr_t kStrips = kPanelOutputs / (kVectors * kLanes);
    const void* line = reinterpret_cast<const void*>(weights.next);
    is_shared ? prefetch_l1(line) : prefetch_l2(line);
    prefetch_l2(reinterpret_cast<const void*>(far.next));
    weights.next += weights.step / kStrips;
    far.next += far.step / kStrips;
  }
};

// How often a strip asks in a group of a panel: for about every two lines of it.
constexpr int advances_per_group(Format format) {
  switch (format) {
    case Format::F32:
      return kGroupInputs;
    case Format::BF16:
      return kGroupInputs / 2;
    case Format::Q8:
      return kQuadsPerGroup + 1;
    case Format::Q4:
      return kQuadsPerGroup / 2 + 1;
  }
  return 1;
}

struct TileArgs {
  const uint8_t* rows = nullptr;   // the packed tile
  const uint8_t* panel = nullptr;  // the packed panel
  int num_groups = 0;              // of 32 inputs
  int first_output = 0;            // of the strip
  float* y = nullptr;              // [rows of the tile][32] results
  Lookahead ahead;
};

template <int kRows, int kVectors>
KVLOOM_INLINE void store_strip(float* y, const vf32 (&sums)[kRows][kVectors]) {
  KVLOOM_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVLOOM_UNROLL
    for (int v = 0; v < kVectors; ++v) store(y + r * kPanelOutputs + v * kLanes, sums[r][v]);
  }
}

// Vectors of outputs beside `rows` rows: two, so that a broadcast value is used twice.
constexpr int dense_vectors(int) { return 2; }
// Here the integer sums of a group need registers beside the float sums.
constexpr int quantised_vectors(int rows) { return 4 * rows + 6 <= kNumRegisters ? 2 : 1; }

struct F32Kernel {
  static constexpr int num_vectors(int rows) { return dense_vectors(rows); }

  template <int kRows, int kVectors>
  KVLOOM_LEAF Lookahead strip(const TileArgs& args) {
    vf32 sums[kRows][kVectors] = {};
    const uint8_t* x = args.rows;
    const uint8_t* w = args.panel + 4 * args.first_output;
    Lookahead ahead = args.ahead;
    for (int k = args.num_groups * kGroupInputs; k > 0; --k) {
      ahead.advance<kVectors>();
      vf32 weights[kVectors];
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) weights[v] = as_f32(load_i32(w + 4 * v * kLanes));
      KVLOOM_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const vf32 value = as_f32(broadcast_i32(x + 4 * r));
        KVLOOM_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(value, weights[v], sums[r][v]);
      }
      w += 4 * kPanelOutputs;
      x += 4 * kRows;
    }
    store_strip<kRows, kVectors>(args.y + args.first_output, sums);
    return ahead;
  }
};

struct BF16Kernel {
  static constexpr int num_vectors(int rows) { return dense_vectors(rows); }

  template <int kRows, int kVectors>
  KVLOOM_LEAF Lookahead strip(const TileArgs& args) {
    vf32 sums[kRows][kVectors] = {};
    const uint8_t* x = args.rows;
    const uint8_t* w = args.panel + 4 * args.first_output;
    Lookahead ahead = args.ahead;
    for (int pair = args.num_groups * (kGroupInputs / 2); pair > 0; --pair) {
      ahead.advance<kVectors>();
      vi32 weights[kVectors];
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) weights[v] = load_i32(w + 4 * v * kLanes);
      KVLOOM_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const vi32 values = broadcast_i32(x + 4 * r);
        KVLOOM_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = dot_bf16(sums[r][v], values, weights[v]);
      }
      w += 4 * kPanelOutputs;
      x += 4 * kRows;
    }
    store_strip<kRows, kVectors>(args.y + args.first_output, sums);
    return ahead;
  }
};

// The integer sums of a group start at the bits of 1.5 * 2^23. A float of this size has a last
// place of 1, so that they are kSumsStart + sum as floats too: a subtraction converts them,
// exactly, and runs beside the multiplications where a conversion would take their place.
constexpr float kSumsStart = 12582912.0f;
constexpr int32_t kSumsStartBits = 0x4b400000;

KVLOOM_INLINE vf32 finished_sum(vi32 sum) { return as_f32(sum) - broadcast(kSumsStart); }

// d * finished_sum(sum) with start = -d * kSumsStart: the same bits of a finite d, since that
// product is exact. d has the 11 digits of its f16, and kSumsStart two.
KVLOOM_INLINE vf32 scaled_sum(vi32 sum, vf32 d, vf32 start) {
  return kHasFma ? fma(d, as_f32(sum), start) : d * finished_sum(sum);
}

template <int kRows, int kVectors>
KVLOOM_INLINE void start_sums(vi32 (&sums)[kRows][kVectors]) {
  KVLOOM_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVLOOM_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = broadcast(kSumsStartBits);
  }
}

KVLOOM_INLINE vf32 load_scales(const uint8_t* f16) {
  return load_f16(reinterpret_cast<const uint16_t*>(f16));
}

// The integer sums of a Q4 group: two codes to a byte. Of all rows the low ones first: two products
// of one sum would wait for each other.
template <int kRows, int kVectors>
KVLOOM_INLINE void add_nibble_dots(const uint8_t* w, const uint8_t* x,
                                   vi32 (&dots)[kRows][kVectors], Lookahead& ahead) {
  KVLOOM_UNROLL
  for (int quad = 0; quad < kQuadsPerGroup / 2; ++quad) {
    ahead.advance<kVectors>();
    vi32 low[kVectors], high[kVectors];
    KVLOOM_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const vi32 codes = load_i32(w + 4 * (quad * kPanelOutputs + v * kLanes));
      low[v] = low_nibbles(codes);
      high[v] = high_nibbles(codes);
    }
    KVLOOM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const vi32 values = broadcast_i32(x + 4 * (quad * kRows + r));
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) dots[r][v] = dot_u7s8(dots[r][v], low[v], values);
    }
    KVLOOM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const vi32 values = broadcast_i32(x + 4 * ((quad + kQuadsPerGroup / 2) * kRows + r));
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) dots[r][v] = dot_u7s8(dots[r][v], high[v], values);
    }
  }
}

// The same of a Q8 group: a code to a byte.
template <int kRows, int kVectors>
KVLOOM_INLINE void add_byte_dots(const uint8_t* w, const uint8_t* x, vi32 (&dots)[kRows][kVectors],
                                 Lookahead& ahead) {
  KVLOOM_UNROLL
  for (int quad = 0; quad < kQuadsPerGroup; ++quad) {
    ahead.advance<kVectors>();
    vi32 codes[kVectors];
    KVLOOM_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      codes[v] = load_i32(w + 4 * (quad * kPanelOutputs + v * kLanes));
    }
    KVLOOM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const vi32 values = broadcast_i32(x + 4 * (quad * kRows + r));
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        dots[r][v] = dot_u8s8(dots[r][v], codes[v], values);
      }
    }
  }
}

// Per group: scale_x * d * (dot - 128 * sum of x's codes).
struct Q8Kernel {
  static constexpr int num_vectors(int rows) { return quantised_vectors(rows); }

  template <int kRows, int kVectors>
  KVLOOM_LEAF Lookahead strip(const TileArgs& args) {
    vf32 sums[kRows][kVectors] = {};
    const uint8_t* x = args.rows;
    const uint8_t* w = args.panel + 4 * args.first_output;
    const uint8_t* scales = args.panel + kQ8CodeBytes + 2 * args.first_output;
    Lookahead ahead = args.ahead;
    for (int group = args.num_groups; group > 0; --group) {
      vi32 dots[kRows][kVectors];
      start_sums<kRows, kVectors>(dots);
      add_byte_dots<kRows, kVectors>(w, x, dots, ahead);
      ahead.advance<kVectors>();
      const uint8_t* scales_x = x + kGroupInputs * kRows;
      vf32 d[kVectors];
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) d[v] = load_scales(scales + 2 * v * kLanes);
      KVLOOM_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const vf32 scale_x = as_f32(broadcast_i32(scales_x + 4 * r));
        const vf32 sum_x = as_f32(broadcast_i32(scales_x + 4 * (kRows + r)));
        KVLOOM_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const vf32 dot = finished_sum(dots[r][v]) - sum_x;
          sums[r][v] = fma(dot * d[v], scale_x, sums[r][v]);
        }
      }
      w += kQ8GroupBytes;
      scales += kQ8GroupBytes;
      x += kS8GroupBytes * kRows;
    }
    store_strip<kRows, kVectors>(args.y + args.first_output, sums);
    return ahead;
  }
};

// Per group: scale_x * (d * dot + m * sum of x's codes).
struct Q4Kernel {
  static constexpr int num_vectors(int rows) { return quantised_vectors(rows); }

  template <int kRows, int kVectors>
  KVLOOM_LEAF Lookahead strip(const TileArgs& args) {
    vf32 sums[kRows][kVectors] = {};
    const uint8_t* x = args.rows;
    const uint8_t* w = args.panel + 4 * args.first_output;
    const uint8_t* scales = args.panel + kQ4CodeBytes + 2 * args.first_output;
    Lookahead ahead = args.ahead;
    for (int group = args.num_groups; group > 0; --group) {
      vi32 dots[kRows][kVectors];
      start_sums<kRows, kVectors>(dots);
      add_nibble_dots<kRows, kVectors>(w, x, dots, ahead);
      ahead.advance<kVectors>();
      const uint8_t* scales_x = x + kGroupInputs * kRows;
      vf32 d[kVectors], start[kVectors], m[kVectors];
      KVLOOM_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        d[v] = load_scales(scales + 2 * v * kLanes);
        start[v] = d[v] * broadcast(-kSumsStart);
        m[v] = load_scales(scales + kScaleBytes + 2 * v * kLanes) * broadcast(1.0f / 128.0f);
      }
      KVLOOM_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const vf32 scale_x = as_f32(broadcast_i32(scales_x + 4 * r));
        const vf32 sum_x = as_f32(broadcast_i32(scales_x + 4 * (kRows + r)));
        KVLOOM_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const vf32 part = fma(m[v], sum_x, scaled_sum(dots[r][v], d[v], start[v]));
          sums[r][v] = fma(part, scale_x, sums[r][v]);
        }
      }
      w += kQ4GroupBytes;
      scales += kQ4GroupBytes;
      x += kS8GroupBytes * kRows;
    }
    store_strip<kRows, kVectors>(args.y + args.first_output, sums);
    return ahead;
  }
};

// A whole panel for a tile of kRows rows, strip by strip.
template <class Kernel, int kRows>
void run_tile(const TileArgs& args) {
  constexpr int kVectors = Kernel::num_vectors(kRows);
  TileArgs strip = args;
  for (; strip.first_output < kPanelOutputs; strip.first_output += kVectors * kLanes) {
    strip.ahead = Kernel::template strip<kRows, kVectors>(strip);
  }
}

using TileFunction = void (*)(const TileArgs&);
using TileFunctions = std::array<TileFunction, kMaxTileRows>;

template <class Kernel, int... kIndices>
constexpr TileFunctions tile_functions(std::integer_sequence<int, kIndices...>) {
  return {&run_tile<Kernel, kIndices + 1>...};
}

// Functions for tiles of 1, 2, ... kMaxTileRows rows.
template <class Kernel>
inline constexpr TileFunctions kTileFunctions =
    tile_functions<Kernel>(std::make_integer_sequence<int, kMaxTileRows>());

// Lines that one step of a strip reads of the panel.
constexpr int lines_per_step(RowFormat format, int num_rows) {
  const int vectors =
      format == RowFormat::S8 ? quantised_vectors(num_rows) : dense_vectors(num_rows);
  return static_cast<int>(cdiv(4 * vectors * kLanes, kCacheLineBytes));
}

// The functions that multiply `rows` with `weight`, its panels being dequantised first where bf16
// rows meet a quantised weight; null if there are none.
inline const TileFunctions* find_tile_functions(Format weight, RowFormat rows) {
  switch (rows) {
    case RowFormat::F32:
      return weight == Format::F32 ? &kTileFunctions<F32Kernel> : nullptr;
    case RowFormat::BF16:
      return weight == Format::F32 ? nullptr : &kTileFunctions<BF16Kernel>;
    case RowFormat::S8:
      if (weight == Format::Q8) return &kTileFunctions<Q8Kernel>;
      return weight == Format::Q4 ? &kTileFunctions<Q4Kernel> : nullptr;
  }
  return nullptr;
}

}  // namespace kvloom
