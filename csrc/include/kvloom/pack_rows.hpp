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

// By what values become codes, and codes values again, where the greatest magnitude is `largest`.
struct S8Steps {
  vf32 inverse;
  vf32 scale;
};

KVLOOM_INLINE S8Steps s8_steps(vf32 largest) {
  const vf32 none = {}, tiny = broadcast(1e-30f);  // below it all codes are 0
  const vf32 levels = broadcast(127.0f);
  return {largest > tiny ? levels / largest : none,
          (largest > tiny ? largest / levels : none) + (largest - largest)};
}

// The limits are for NaN: vmin takes its second.
KVLOOM_INLINE vi32 s8_codes(vf32 x, vf32 inverse) {
  return round_to_i32(vmax(vmin(x * inverse, broadcast(127.0f)), broadcast(-127.0f)));
}

// The greater lanes, of numbers from 0 on: their bits are ordered as they are, infinity and NaN
// too.
KVLOOM_INLINE vi32 greater(vi32 a, vi32 b) { return a > b ? a : b; }

// Of kLanes magnitudes of a group the greatest in each lane, as bits.
KVLOOM_INLINE vi32 greatest_of_group(const float* values) {
  vi32 most = broadcast(0);
  for (int i = 0; i < kGroupInputs; i += kLanes) {
    most = greater(most, as_i32(vabs(load(values + i))));
  }
  return most;
}

// Writes the codes of a group; returns their sums.
KVLOOM_INLINE vi32 store_s8_codes(const float* values, vf32 inverse, int8_t* codes) {
  vi32 sums = broadcast(0);
  for (int i = 0; i < kGroupInputs; i += kLanes) {
    const vi32 code = s8_codes(load(values + i), inverse);
    sums = sums + code;
    store_i8(codes + i, code);
  }
  return sums;
}

KVLOOM_INLINE void quantise_group(const float* values, S8Group* group) {
  const float largest = bit_cast<float>(reduce_max(greatest_of_group(values)));
  const S8Steps steps = s8_steps(broadcast(largest));
  const vi32 sums = store_s8_codes(values, steps.inverse, group->codes);
  group->scale = steps.scale[0];
  group->sum = static_cast<float>(128 * reduce_add(sums));
}

// Where a group of a row goes.
inline uint8_t* group_place(const RowPlace& place, int group) {
  return place.tile +
         row_group_bytes(place.format) * static_cast<size_t>(place.tile_rows) *
             static_cast<size_t>(group) +
         4 * place.row_in_tile;
}

// Writes values [32] to inputs [32 group, 32 group + 32) of a row.
inline void pack_row_group(const RowPlace& place, int group, const float* values) {
  uint8_t* to = group_place(place, group);
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
    std::memcpy(to + kGroupInputs * place.tile_rows, &quantised.scale, 4);
    std::memcpy(to + (kGroupInputs + 4) * place.tile_rows, &quantised.sum, 4);
  }
}

// What is written for int8 rows of a tile, whose first group is at `to`. What is found of one row
// is found for all side by side, in lanes: for all that a tile may have, so that nothing has to
// count; the last row stands in for those that are missing.
inline void pack_s8_rows(uint8_t* to, int num_rows, const float (*values)[kGroupInputs]) {
  vi32 most[kLanes] = {};
#pragma GCC unroll 16
  for (int r = 0; r < kMaxTileRows; ++r) {
    most[r] = greatest_of_group(values[std::min(r, num_rows - 1)]);
  }
  const S8Steps steps = s8_steps(as_f32(reduce_each(most, greater)));
  float inverses[kLanes];
  store(inverses, steps.inverse);
  vi32 quads[kQuadsPerGroup] = {};  // [kLanes rows][kQuadsPerGroup]
#pragma GCC unroll 16
  for (int i = 0; i < kMaxTileRows * kQuadsPerGroup / kLanes; ++i) {
    vi32 codes[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int first = (4 * i + j) * kLanes, row = first / kGroupInputs;
      const float* x = values[std::min(row, num_rows - 1)] + first % kGroupInputs;
      codes[j] = s8_codes(load(x), as_f32(broadcast_i32(inverses + row)));
    }
    quads[i] = pack_quads(codes[0], codes[1], codes[2], codes[3]);
  }
  transpose(quads);
  vi32 sums[2] = {};
  float* out = reinterpret_cast<float*>(to);
#pragma GCC unroll 16
  for (int i = 0; i < kQuadsPerGroup; ++i) {
    sums[i % 2] = dot_u8s8(sums[i % 2], broadcast(0x01010101), quads[i]);
    store_partial(out + i * num_rows, as_f32(quads[i]), num_rows);
  }
  const vf32 sum = to_f32((sums[0] + sums[1]) * 128);
  store_partial(out + kQuadsPerGroup * num_rows, steps.scale, num_rows);
  store_partial(out + (kQuadsPerGroup + 1) * num_rows, sum, num_rows);
}

// The same as pack_row_group of all rows of a tile, given the first one's place.
inline void pack_tile_group(const RowPlace& first, int group, const float (*values)[kGroupInputs]) {
  constexpr int kFewRows = kLanes == 16 ? 6 : 3;  // are sooner done one by one
  if (first.format == RowFormat::S8 && first.tile_rows > kFewRows) {
    return pack_s8_rows(group_place(first, group), first.tile_rows, values);
  }
  RowPlace place = first;
  for (; place.row_in_tile < first.tile_rows; ++place.row_in_tile) {
    pack_row_group(place, group, values[place.row_in_tile]);
  }
}

// Groups [first, end) of inputs.
struct GroupRange {
  int first;
  int end;
};

// Writes groups of a tile's rows. fill(row, first, count, to) puts `count` values of a row, from
// input `first` on, to `to`: as many as there are of a group.
template <class Fill>
inline void pack_tile(const PackedRows& rows, int tile, GroupRange groups, Fill fill) {
  const int first_row = first_row_of_tile(rows.num_rows, tile);
  const int num_rows = first_row_of_tile(rows.num_rows, tile + 1) - first_row;
  const RowPlace place{rows.format, tile_at(rows, first_row), num_rows, 0};
  float values[kMaxTileRows][kGroupInputs];
  for (int group = groups.first; group < groups.end; ++group) {
    const int first = group * kGroupInputs;
    const int count = std::min(kGroupInputs, rows.num_inputs - first);
    if (count < kGroupInputs) std::memset(values, 0, sizeof(values));
    for (int r = 0; r < num_rows; ++r) fill(first_row + r, first, count, values[r]);
    pack_tile_group(place, group, values);
  }
}

// The same of rows in memory: the first row's values, and from one row to the next.
inline void pack_tile(const PackedRows& rows, int tile, GroupRange groups, const float* x,
                      int64_t row_stride) {
  pack_tile(rows, tile, groups, [&](int row, int first, int count, float* to) {
    std::memcpy(to, x + row * row_stride + first, sizeof(float) * static_cast<size_t>(count));
  });
}

// Writes a row: values [num_inputs].
inline void pack_row(const PackedRows& rows, int row, const float* values) {
  const RowPlace place = row_place(rows, row);
  const int num_full = rows.num_inputs / kGroupInputs;
  for (int group = 0; group < num_full; ++group) {
    pack_row_group(place, group, values + group * kGroupInputs);
  }
  const int rest = rows.num_inputs % kGroupInputs;
  if (rest == 0) return;
  float padded[kGroupInputs] = {};
  std::memcpy(padded, values + num_full * kGroupInputs, sizeof(float) * static_cast<size_t>(rest));
  pack_row_group(place, num_full, padded);
}

}  // namespace kvloom
