// A quantised panel as bf16, made once for many rows: each value is rounded once, to the nearest
// even.
#pragma once

#include <cstdint>

#include "kvloom/format.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// kLanes outputs of one quad of inputs: value = d * code
// + m. Two bf16 pairs, one after the other.
KVLOOM_INLINE void dequantise_quad(vi32 codes, vf32 d, vf32 m, uint8_t* pairs) {
  vf32 value[4];
  for (int i = 0; i < 4; ++i) {
    value[i] = fma(to_f32((codes >> (8 * i)) & 0xff), d, m);
  }
  store_i32(pairs, pack_bf16_pairs(value[0], value[1]));
  store_i32(pairs + 4 * kPanelOutputs, pack_bf16_pairs(value[2], value[3]));
}

// kLanes outputs of a Q8 or Q4 group, from output `first` on.
template <Format kFormat>
KVLOOM_INLINE void dequantise_lanes(const uint8_t* group, int first, uint8_t* pairs) {
  constexpr bool kIsQ4 = kFormat == Format::Q4;
  constexpr int kQuadBytes = 8 * kPanelOutputs;  // of bf16
  const uint8_t* scales = group + (kIsQ4 ? kQ4CodeBytes : kQ8CodeBytes) + 2 * first;
  const vf32 d = load_f16(reinterpret_cast<const uint16_t*>(scales));
  const vf32 m = kIsQ4 ? load_f16(reinterpret_cast<const uint16_t*>(scales + kScaleBytes))
                       : d * broadcast(-128.0f);
  uint8_t* to = pairs + 4 * first;
  for (int quad = 0; quad < (kIsQ4 ? kQuadsPerGroup / 2 : kQuadsPerGroup); ++quad) {
    const vi32 codes = load_i32(group + 4 * (quad * kPanelOutputs + first));
    if (kIsQ4) {
      dequantise_quad(low_nibbles(codes), d, m, to + quad * kQuadBytes);
      dequantise_quad(high_nibbles(codes), d, m, to + (quad + kQuadsPerGroup / 2) * kQuadBytes);
    } else {
      dequantise_quad(codes, d, m, to + quad * kQuadBytes);
    }
  }
}

// A panel of a Q8 or Q4 weight to `to`, panel_bytes(Format::BF16, num_inputs) bytes.
inline void dequantise_panel(const PackedWeight& weight, int panel, uint8_t* to) {
  for (int group = 0; group < num_groups(weight.num_inputs); ++group) {
    const uint8_t* from = group_at(weight, panel, group);
    uint8_t* pairs = to + group_bytes(Format::BF16) * static_cast<size_t>(group);
    for (int first = 0; first < kPanelOutputs; first += kLanes) {
      if (weight.format == Format::Q4) {
        dequantise_lanes<Format::Q4>(from, first, pairs);
      } else {
        dequantise_lanes<Format::Q8>(from, first, pairs);
      }
    }
  }
}

}  // namespace kvloom
