// From a checkpoint's rows to panels (format.hpp). Stacked parameters are packed source by source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvloom/format.hpp"
#include "kvloom/types.hpp"

namespace kvloom {

// Row-major [num_rows, num_inputs] numbers, or GGUF blocks of 32 along a row:
//   Q8_0  f16 d, 32 s8            value = d * q
//   Q4_0  f16 d, 16 bytes         value = d * (q - 8)
//   Q4_1  f16 d, f16 m, 16 bytes  value = d * q + m
// where byte j holds value j in its low nibble and value j + 16 in its high one.
enum class SourceFormat { F32, BF16, F16, Q8_0, Q4_0, Q4_1 };

struct WeightSource {
  SourceFormat format = SourceFormat::F32;
  const uint8_t* data = nullptr;  // any alignment
  int first_output = 0;           // of the packed weight, where its first row goes
  int num_outputs = 0;
};

// Bytes of one source row; blocks need num_inputs to be a multiple of 32.
constexpr size_t source_row_bytes(SourceFormat format, int num_inputs) {
  const size_t inputs = static_cast<size_t>(num_inputs);
  switch (format) {
    case SourceFormat::F32:
      return 4 * inputs;
    case SourceFormat::BF16:
    case SourceFormat::F16:
      return 2 * inputs;
    case SourceFormat::Q8_0:
      return 34 * (inputs / 32);
    case SourceFormat::Q4_0:
      return 18 * (inputs / 32);
    case SourceFormat::Q4_1:
      return 20 * (inputs / 32);
  }
  return 0;
}

constexpr bool is_block_format(SourceFormat format) { return format >= SourceFormat::Q8_0; }

// Whether a source can go into a packed format: numbers into F32 (exact) and BF16 (rounded to
// nearest even), blocks into the quantised format of their width (exact).
constexpr bool can_pack(SourceFormat source, Format packed) {
  if (source == SourceFormat::Q8_0) return packed == Format::Q8;
  if (is_block_format(source)) return packed == Format::Q4;
  return packed == Format::F32 || packed == Format::BF16;
}

// -8 d as f16: the offset that makes a Q4_0 block a Q4_1 block. Exact, but infinite from
// |d| = 8192 on.
inline uint16_t minus_eight_times(uint16_t f16) {
  const uint16_t sign = (f16 & 0x8000u) ^ 0x8000u;
  uint32_t exponent = (f16 >> 10) & 0x1fu, fraction = f16 & 0x3ffu;
  if (exponent == 0x1fu) return static_cast<uint16_t>(sign | 0x7c00u | fraction);
  if (exponent == 0) {  // a subnormal, fraction * 2^-24, may become normal
    fraction <<= 3;
    exponent = fraction >= 0x400u ? 1 : 0;
    while (fraction >= 0x800u) {
      fraction >>= 1;  // the three low bits are 0
      ++exponent;
    }
    return static_cast<uint16_t>(sign | exponent << 10 | (fraction & 0x3ffu));
  }
  exponent += 3;
  if (exponent >= 0x1fu) return static_cast<uint16_t>(sign | 0x7c00u);
  return static_cast<uint16_t>(sign | exponent << 10 | fraction);
}

inline float source_value(SourceFormat format, const uint8_t* row, int input) {
  if (format == SourceFormat::F32) {
    float value;
    std::memcpy(&value, row + 4 * static_cast<size_t>(input), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row + 2 * static_cast<size_t>(input), sizeof(bits));
  return format == SourceFormat::BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// One row of numbers into a lane of an F32 or BF16 panel.
inline void pack_number_row(const PackedWeight& weight, PanelLane at, SourceFormat format,
                            const uint8_t* row) {
  uint8_t* panel = group_at(weight, at.panel, 0);
  for (int k = 0; k < weight.num_inputs; ++k) {
    if (weight.format == Format::F32) {
      const float value = source_value(format, row, k);
      std::memcpy(panel + f32_offset(k, at.lane), &value, sizeof(value));
    } else {
      const uint16_t bits = f32_to_bf16(source_value(format, row, k));
      std::memcpy(panel + bf16_offset(k, at.lane), &bits, sizeof(bits));
    }
  }
}

// The common case of the above, two values at a time.
inline void pack_bf16_row(const PackedWeight& weight, PanelLane at, const uint8_t* row) {
  uint8_t* panel = group_at(weight, at.panel, 0);
  int k = 0;
  for (; k + 2 <= weight.num_inputs; k += 2) {
    std::memcpy(panel + bf16_offset(k, at.lane), row + 2 * static_cast<size_t>(k), 4);
  }
  if (k < weight.num_inputs) {
    std::memcpy(panel + bf16_offset(k, at.lane), row + 2 * static_cast<size_t>(k), 2);
  }
}

inline void pack_q8_block(uint8_t* group, int lane, const uint8_t* block) {
  std::memcpy(group + kQ8CodeBytes + 2 * lane, block, 2);
  for (int quad = 0; quad < kQuadsPerGroup; ++quad) {
    uint32_t codes;
    std::memcpy(&codes, block + 2 + 4 * quad, 4);
    codes ^= 0x80808080u;  // q + 128
    std::memcpy(group + q8_offset(4 * quad, lane), &codes, 4);
  }
}

// Our bytes hold the same pairs of values as GGUF's, so that they are only moved.
inline void pack_q4_block(uint8_t* group, int lane, SourceFormat format, const uint8_t* block) {
  uint16_t scale, offset;
  std::memcpy(&scale, block, 2);
  if (format == SourceFormat::Q4_1) {
    std::memcpy(&offset, block + 2, 2);
  } else {
    offset = minus_eight_times(scale);
  }
  std::memcpy(group + kQ4CodeBytes + 2 * lane, &scale, 2);
  std::memcpy(group + kQ4CodeBytes + kScaleBytes + 2 * lane, &offset, 2);
  const uint8_t* codes = block + (format == SourceFormat::Q4_1 ? 4 : 2);
  for (int quad = 0; quad < kQuadsPerGroup / 2; ++quad) {
    std::memcpy(group + q4_offset(4 * quad, lane), codes + 4 * quad, 4);
  }
}

inline void pack_block_row(const PackedWeight& weight, PanelLane at, SourceFormat format,
                           const uint8_t* row) {
  const size_t block_bytes = source_row_bytes(format, kGroupInputs);
  for (int group = 0; group < num_groups(weight.num_inputs); ++group) {
    uint8_t* to = group_at(weight, at.panel, group);
    const uint8_t* block = row + block_bytes * static_cast<size_t>(group);
    if (format == SourceFormat::Q8_0) {
      pack_q8_block(to, at.lane, block);
    } else {
      pack_q4_block(to, at.lane, format, block);
    }
  }
}

// Packs rows of a source into outputs [first_output, first_output + num_outputs) of a weight whose
// memory was zeroed. Different outputs may be packed by different threads.
inline void pack_outputs(const PackedWeight& weight, const WeightSource& source) {
  const size_t row_bytes = source_row_bytes(source.format, weight.num_inputs);
  for (int i = 0; i < source.num_outputs; ++i) {
    const uint8_t* row = source.data + row_bytes * static_cast<size_t>(i);
    const PanelLane at = panel_lane(weight, source.first_output + i);
    if (is_block_format(source.format)) {
      pack_block_row(weight, at, source.format, row);
    } else if (source.format == SourceFormat::BF16 && weight.format == Format::BF16) {
      pack_bf16_row(weight, at, row);
    } else {
      pack_number_row(weight, at, source.format, row);
    }
  }
}

}  // namespace kvloom
