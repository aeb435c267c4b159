// Rows of a packed weight as f32: the embedding of tokens reads the very table that a tied head
// multiplies with, so that it is stored once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kvloom/format.hpp"
#include "kvloom/types.hpp"

namespace kvloom {

template <class T>
KVLOOM_INLINE T read_as(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// The first `size` of the 32 inputs of one lane of a group, as f32. One function per format.
inline void unpack_f32_lane(const uint8_t* group, int lane, int size, float* out) {
  for (int i = 0; i < size; ++i) out[i] = read_as<float>(group + f32_offset(i, lane));
}

inline void unpack_bf16_lane(const uint8_t* group, int lane, int size, float* out) {
  for (int i = 0; i < size; ++i) {
    out[i] = bf16_to_f32(read_as<uint16_t>(group + bf16_offset(i, lane)));
  }
}

inline void unpack_q8_lane(const uint8_t* group, int lane, int size, float* out) {
  const float scale = f16_to_f32(read_as<uint16_t>(group + kQ8CodeBytes + 2 * lane));
  for (int i = 0; i < size; ++i) {
    out[i] = scale * static_cast<float>(int{group[q8_offset(i, lane)]} - 128);
  }
}

inline void unpack_q4_lane(const uint8_t* group, int lane, int size, float* out) {
  const uint8_t* scales = group + kQ4CodeBytes;
  const float scale = f16_to_f32(read_as<uint16_t>(scales + 2 * lane));
  const float offset = f16_to_f32(read_as<uint16_t>(scales + kScaleBytes + 2 * lane));
  for (int i = 0; i < size; ++i) {
    const int byte = group[q4_offset(i, lane)];
    out[i] = scale * static_cast<float>(i < kGroupInputs / 2 ? byte & 15 : byte >> 4) + offset;
  }
}

// Row `output` of a weight: out [num_inputs].
inline void unpack_row(const PackedWeight& weight, int output, float* out) {
  const PanelLane place = panel_lane(weight, output);
  for (int group = 0; group < num_groups(weight.num_inputs); ++group) {
    const uint8_t* from = group_at(weight, place.panel, group);
    const int first = group * kGroupInputs;
    const int size = std::min(kGroupInputs, weight.num_inputs - first);
    switch (weight.format) {
      case Format::F32:
        unpack_f32_lane(from, place.lane, size, out + first);
        break;
      case Format::BF16:
        unpack_bf16_lane(from, place.lane, size, out + first);
        break;
      case Format::Q8:
        unpack_q8_lane(from, place.lane, size, out + first);
        break;
      case Format::Q4:
        unpack_q4_lane(from, place.lane, size, out + first);
        break;
    }
  }
}

// A shard of the vocabulary holds the ids from first_row on; ids outside it give zeros.
struct EmbeddingArgs {
  PackedWeight table;  // [rows of the shard, hidden size]
  int64_t first_row;
  const int32_t* token_ids;  // [num_tokens]
  int64_t num_tokens;
  float* out;  // [num_tokens, out_stride]
  int64_t out_stride;
};

inline int64_t embedding_num_items(const EmbeddingArgs& args) { return args.num_tokens; }

inline void embedding_run_item(const EmbeddingArgs& args, int64_t item) {
  const int64_t row = args.token_ids[item] - args.first_row;
  float* out = args.out + item * args.out_stride;
  if (row < 0 || row >= args.table.num_outputs) {
    std::fill(out, out + args.table.num_inputs, 0.0f);
  } else {
    unpack_row(args.table, static_cast<int>(row), out);
  }
}

}  // namespace kvloom
