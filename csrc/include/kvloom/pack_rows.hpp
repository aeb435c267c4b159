// Activations of a GEMM, packed in tiles of a few rows so that the kernel reads them in order.
//
// X [num_rows, num_inputs] is cut into tiles of at most kMaxTileRows rows, as equal as possible.
// A tile of r rows holds, with inputs padded by zeros to a multiple of 32:
//   F32   [padded_inputs][r] float
//   BF16  [padded_inputs / 2][r][2] bf16
//   S8    per group of 32 inputs: codes [8 quads][r][4] s8, scales [r] float, sums [r] float
//         value = scale * code, scale = max|x| / 127 of the group, sum = 128 x the codes' sum
// What is stored for a row depends on that row alone; its place depends on num_rows.
//
// Two threads should not write rows of one tile at a time: no race, but they share cache lines.
// Give threads whole tiles (num_tiles, first_row_of_tile), or groups of inputs of a tile, which lie
// one after another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvloom/format.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// As many rows as have their accumulators, and a step of weights, in registers.
constexpr int kMaxTileRows = kLanes == 16 ? 12 : 4;

constexpr int kS8GroupBytes = kGroupInputs + 8;  // of one row: codes, scale, sum of codes

// Packed rows; does not own its memory. `data` is 64-byte aligned.
struct PackedRows {
  RowFormat format = RowFormat::F32;
  int num_rows = 0;
  int num_inputs = 0;
  uint8_t* data = nullptr;
};

// Bytes of one row and one group of 32 inputs.
constexpr int row_group_bytes(RowFormat format) {
  switch (format) {
    case RowFormat::F32:
      return 4 * kGroupInputs;
    case RowFormat::BF16:
      return 2 * kGroupInputs;
    case RowFormat::S8:
      return kS8GroupBytes;
  }
  return 0;
}

constexpr size_t packed_row_bytes(RowFormat format, int num_inputs) {
  return static_cast<size_t>(row_group_bytes(format)) * static_cast<size_t>(num_groups(num_inputs));
}
constexpr size_t packed_rows_bytes(RowFormat format, int num_rows, int num_inputs) {
  return packed_row_bytes(format, num_inputs) * static_cast<size_t>(num_rows);
}

constexpr int num_tiles(int num_rows) { return static_cast<int>(cdiv(num_rows, kMaxTileRows)); }

// Tile t of n over m rows starts at floor(m t / n).
constexpr int first_row_of_tile(int num_rows, int tile) {
  return static_cast<int>(int64_t{num_rows} * tile / num_tiles(num_rows));
}

// The last tile that starts at or before `row`: floor(((row + 1) n - 1) / m).
constexpr int tile_of_row(int num_rows, int row) {
  return static_cast<int>(((int64_t{row} + 1) * num_tiles(num_rows) - 1) / num_rows);
}

inline uint8_t* tile_at(const PackedRows& rows, int first_row) {
  return rows.data +
         packed_row_bytes(rows.format, rows.num_inputs) * static_cast<size_t>(first_row);
}

// Where one row goes; get it once per row.
struct RowPlace {
  RowFormat format;
  uint8_t* tile;
  int tile_rows;    // rows of its tile
  int row_in_tile;  // its index there
};

inline RowPlace row_place(const PackedRows& rows, int row) {
  const int tile = tile_of_row(rows.num_rows, row);
  const int first = first_row_of_tile(rows.num_rows, tile);
  const int past = first_row_of_tile(rows.num_rows, tile + 1);
  return {rows.format, tile_at(rows, first), past - first, row - first};
}

// 4-byte units to every tile_rows-th place: what all formats come down to.
KVLOOM_INLINE void spread_units(uint8_t* to, int tile_rows, const void* units, int num_units) {
  const size_t step = 4 * static_cast<size_t>(tile_rows);
  const uint8_t* from = static_cast<const uint8_t*>(units);
  for (int i = 0; i < num_units; ++i) std::memcpy(to + step * i, from + 4 * i, 4);
}

// 32 values as int8. A NaN or an infinity makes the scale NaN, so that the results become NaN.
struct S8Group {
  int8_t codes[kGroupInputs];
  float scale;
  float sum;  // 128 x the sum of the codes: exact, and what a Q8 weight's offset comes to
};

KVLOOM_INLINE void quantise_group(const float* values, S8Group* group) {
  constexpr int kVectors = kGroupInputs / kLanes;
  constexpr float kTiny = 1e-30f;  // below it the group is 0, and 127 / max stays finite
  vf32 x[kVectors];
  vi32 max = broadcast(0);  // of bits, whose order is that of numbers, infinity and NaN
  for (int i = 0; i < kVectors; ++i) {
    x[i] = load(values + i * kLanes);
    const vi32 magnitude = as_i32(vabs(x[i]));
    max = max > magnitude ? max : magnitude;
  }
  const float largest = bit_cast<float>(reduce_max(max));
  const vf32 inverse = broadcast(largest > kTiny ? 127.0f / largest : 0.0f);
  vi32 sum = broadcast(0);
  for (int i = 0; i < kVectors; ++i) {
    // The limits are for NaN: vmin takes its second.
    const vf32 scaled = vmax(vmin(x[i] * inverse, broadcast(127.0f)), broadcast(-127.0f));
    const vi32 code = round_to_i32(scaled);
    sum = sum + code;
    store_i8(group->codes + i * kLanes, code);
  }
  group->scale = (largest > kTiny ? largest / 127.0f : 0.0f) + (largest - largest);
  group->sum = static_cast<float>(128 * reduce_add(sum));
}

// Writes values [32] to inputs [32 group, 32 group + 32) of a row.
inline void pack_row_group(const RowPlace& place, int group, const float* values) {
  const size_t rows = static_cast<size_t>(place.tile_rows);
  uint8_t* base = place.tile + row_group_bytes(place.format) * rows * static_cast<size_t>(group);
  uint8_t* to = base + 4 * place.row_in_tile;
  if (place.format == RowFormat::F32) {
    spread_units(to, place.tile_rows, values, kGroupInputs);
  } else if (place.format == RowFormat::BF16) {
    uint16_t rounded[kGroupInputs];
    for (int i = 0; i < kGroupInputs; i += kLanes) store_bf16(rounded + i, load(values + i));
    spread_units(to, place.tile_rows, rounded, kGroupInputs / 2);
  } else {
    S8Group quantised;
    quantise_group(values, &quantised);
    spread_units(to, place.tile_rows, quantised.codes, kQuadsPerGroup);
    std::memcpy(to + kGroupInputs * rows, &quantised.scale, 4);
    std::memcpy(to + (kGroupInputs + 4) * rows, &quantised.sum, 4);
  }
}

// Groups [first, end) of inputs.
struct GroupRange {
  int first;
  int end;
};

// Writes groups of a row: values [num_inputs].
inline void pack_row(const PackedRows& rows, int row, GroupRange groups, const float* values) {
  const RowPlace place = row_place(rows, row);
  const int num_full = std::min(rows.num_inputs / kGroupInputs, groups.end);
  for (int group = groups.first; group < num_full; ++group) {
    pack_row_group(place, group, values + group * kGroupInputs);
  }
  if (num_full < groups.end) {
    float padded[kGroupInputs] = {};
    std::memcpy(padded, values + num_full * kGroupInputs,
                sizeof(float) * static_cast<size_t>(rows.num_inputs - num_full * kGroupInputs));
    pack_row_group(place, num_full, padded);
  }
}

// Writes a whole row.
inline void pack_row(const PackedRows& rows, int row, const float* values) {
  pack_row(rows, row, {0, num_groups(rows.num_inputs)}, values);
}

}  // namespace kvloom
