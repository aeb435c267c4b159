// The inner loops of attention over int8 keys and values. Queries are int8 in groups of 32, so that
// scores are integer dot products. Weights times the scales of the values become 14-bit integers,
// as two bytes of 7 bits, with one scale for each row, split and group: finer than bf16 weights,
// and sums of integers are exact.
#pragma once

#include <utility>

#include "kvloom/attention_tile.hpp"
#include "kvloom/pack_rows.hpp"

namespace kvloom {

constexpr int kQuadsPerKVGroup = kInt8Group / 4;

// A tile's queries: codes [head_size / 4][R] quads, then scales [head_size / 32][R] f32, then what
// the sum of products must start from, [head_size / 32][R]: keys are stored with 128 added.
struct Int8Queries {
  int32_t* quads;
  float* scales;
  int32_t* starts;
};

inline Int8Queries int8_queries_at(char* memory, int num_rows, int size) {
  int32_t* quads = reinterpret_cast<int32_t*>(memory);
  float* scales = reinterpret_cast<float*>(quads + size / 4 * num_rows);
  return {quads, scales, reinterpret_cast<int32_t*>(scales + size / kInt8Group * num_rows)};
}

inline void pack_int8_query(const float* q, int size, const Int8Queries& to, int row,
                            int num_rows) {
  for (int group = 0; group < size / kInt8Group; ++group) {
    S8Group quantised;
    quantise_group(q + group * kInt8Group, &quantised);
    int32_t* quads = to.quads + group * kQuadsPerKVGroup * num_rows + row;
    for (int i = 0; i < kQuadsPerKVGroup; ++i) {
      std::memcpy(quads + i * num_rows, quantised.codes + 4 * i, 4);
    }
    to.scales[group * num_rows + row] = quantised.scale;
    to.starts[group * num_rows + row] = -static_cast<int32_t>(quantised.sum);  // 128 x the sum
  }
}

// Two accumulators for each row and vector, here and below.
constexpr int int8_tile_vectors(int num_rows) {
  if (kLanes == 16) return num_rows <= 6 ? 2 : 1;
  return num_rows <= 3 ? 2 : 1;
}

// Starts to bring the scales of keys or values near; codes are fetched while others are multiplied.
inline void fetch_scales(const SplitView& split,
                         const std::array<const char*, kSplitSubBlocks>& numbers, int size) {
  const size_t first = static_cast<size_t>(size) * kSubBlockTokens;
  const size_t end = first / kInt8Group * (kInt8Group + sizeof(uint16_t));
  for (int s = split.first; s < split.end; ++s) {
    for (size_t at = first; at < end; at += kCacheLineBytes) {
      prefetch_l1(numbers[static_cast<size_t>(s)] + at);
    }
  }
}

struct Int8ScoreArgs {
  Int8Queries q;
  int size;    // numbers of a key head
  int size_v;  // and of a value head
  const SplitView* split;
  float* scores;  // [R][kSplitKeys]
};

template <int R, int V>
__attribute__((noinline)) void score_int8_vectors(const Int8ScoreArgs& args, int first_vector) {
  const char* keys[V];
  const char* ahead[V];
  const char* scales[V];
  vf32 total[R][V];
  const size_t code_bytes = static_cast<size_t>(args.size) * kSubBlockTokens;
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    const KeyVector vector = key_vector(*args.split, first_vector + v);
    keys[v] = vector.keys;
    ahead[v] = vector.ahead;
    scales[v] = keys[v] + code_bytes - (first_vector + v) * kLanes % kSubBlockTokens * 2;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r][v] = vf32{};
  }
  const int32_t* q = args.q.quads;
  for (int group = 0; group < args.size / kInt8Group; ++group) {
    vi32 acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = broadcast(args.q.starts[group * R + r]);
    }
    for (int i = 0; i < kQuadsPerKVGroup; ++i) {
      vi32 k[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        k[v] = load_i32(keys[v]);
        prefetch_l1(ahead[v]);
        keys[v] += kUnitRowBytes;
        ahead[v] += kUnitRowBytes;
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vi32 x = broadcast_i32(q + r);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[r][v] = dot_u8s8(acc[r][v], k[v], x);
      }
      q += R;
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const vf32 k_scale = load_bf16(reinterpret_cast<const uint16_t*>(scales[v]));
      scales[v] += kSubBlockTokens * 2;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf32 q_scale = broadcast(args.q.scales[group * R + r]);
        total[r][v] = fma(to_f32(acc[r][v]) * q_scale, k_scale, total[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      store(args.scores + r * kSplitKeys + (first_vector + v) * kLanes, total[r][v]);
    }
  }
}

template <int R>
void score_int8_tile(const Int8ScoreArgs& args) {
  constexpr int kVectors = int8_tile_vectors(R);
  const VectorRange range = score_vectors_of(*args.split, kVectors);
  fetch_scales(*args.split, args.split->values, args.size_v);
  for (int v = range.first; v < range.end; v += kVectors) score_int8_vectors<R, kVectors>(args, v);
}

// ---- Values ----

struct Int8Weights {
  uint8_t* high;  // [R][kSplitKeys] weight = scale * (128 * high + low), both below 128
  uint8_t* low;
  float* scales;  // [R]
};

// The greatest lane, as the number that it is the bits of.
inline float reduce_max_of_bits(vi32 x) {
  int32_t lanes[kLanes];
  store_i32(lanes, x);
  return bit_cast<float>(*std::max_element(lanes, lanes + kLanes));
}

// scaled [end], a row's weights times the scales of one group of the values, as integers; `largest`
// is the greatest of them.
KVLOOM_INLINE void quantise_row(const float* scaled, int first, int end, float largest,
                                const Int8Weights& to, int row) {
  constexpr float kLevels = 16383.0f, kTiny = 1e-30f;
  const bool is_zero = largest <= kTiny;
  const vf32 inverse = broadcast(is_zero ? 0.0f : kLevels / largest);
  to.scales[row] = is_zero ? 0.0f : largest / kLevels + (largest - largest);  // NaN if not finite
  int8_t* high = reinterpret_cast<int8_t*>(to.high) + row * kSplitKeys;
  int8_t* low = reinterpret_cast<int8_t*>(to.low) + row * kSplitKeys;
  for (int i = first; i < end; i += kLanes) {
    const vi32 code = round_to_i32(load(scaled + i) * inverse);
    store_i8(high + i, code >> 7);
    store_i8(low + i, code & 127);
  }
}

// weights [R][kSplitKeys], times the scales of one group of the values, as integers.
template <int R>
void quantise_weights(const float* weights, const SplitView& split, size_t scale_offset,
                      const Int8Weights& to) {
  float scaled[R][kSplitKeys];
  vi32 max[R] = {};
  const int first = split.first * kSubBlockTokens, end = split.end * kSubBlockTokens;
  for (int i = first; i < end; i += kLanes) {
    const char* scales = split.values[static_cast<size_t>(i / kSubBlockTokens)] + scale_offset;
    const vf32 scale = load_bf16(reinterpret_cast<const uint16_t*>(scales) + i % kSubBlockTokens);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf32 weight = load(weights + r * kSplitKeys + i);
      // An unseen key's scale may be anything, a NaN as well.
      const vf32 x = weight != vf32{} ? weight * scale : vf32{};
      store(scaled[r] + i, x);
      const vi32 bits = as_i32(x);  // of numbers from 0 on: ordered like them, NaN above all
      max[r] = bits > max[r] ? bits : max[r];
    }
  }
  for (int r = 0; r < R; ++r) {
    quantise_row(scaled[r], first, end, reduce_max_of_bits(max[r]), to, r);
  }
}

struct Int8WeighArgs {
  Int8Weights weights;
  int size;      // numbers of a value head
  int key_size;  // and of a key head
  const SplitView* split;
  float* values;  // [R][size]
};

template <int R, int V>
__attribute__((noinline)) void weigh_int8_vectors(const Int8WeighArgs& args, int first) {
  const size_t quad_bytes = static_cast<size_t>(args.size) * sizeof(int32_t);
  const size_t offset = static_cast<size_t>(first) * sizeof(int32_t);
  const uint8_t* high = args.weights.high + args.split->first * kSubBlockTokens;
  const uint8_t* low = args.weights.low + args.split->first * kSubBlockTokens;
  vi32 acc[2][R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[0][r][v] = acc[1][r][v] = vi32{};
  }
  for (int s = args.split->first; s < args.split->end; ++s) {
    const char* values = args.split->values[static_cast<size_t>(s)] + offset;
    const char* ahead = args.split->next_keys[static_cast<size_t>(s)] + offset;
    for (int quad = 0; quad < kSubBlockTokens / 4; ++quad) {
      vi32 x[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        x[v] = load_i32(values + v * kLanes * 4);
        prefetch_l1(ahead + v * kLanes * 4);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vi32 h = broadcast_i32(high + r * kSplitKeys);
        const vi32 l = broadcast_i32(low + r * kSplitKeys);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
          acc[0][r][v] = dot_u7s8(acc[0][r][v], h, x[v]);
          acc[1][r][v] = dot_u7s8(acc[1][r][v], l, x[v]);
        }
      }
      high += 4;
      low += 4;
      values += quad_bytes;
      ahead += quad_bytes;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const vf32 scale = broadcast(args.weights.scales[r]);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      store(args.values + r * args.size + first + v * kLanes,
            to_f32((acc[0][r][v] << 7) + acc[1][r][v]) * scale);
    }
  }
}

// scores: the rows' weights, [R][kSplitKeys].
template <int R>
void weigh_int8_tile(const Int8WeighArgs& args, const float* scores) {
  constexpr int kVectors = int8_tile_vectors(R);
  fetch_scales(*args.split, args.split->next_keys, args.key_size);
  const size_t scales = static_cast<size_t>(args.size) * kSubBlockTokens;
  for (int group = 0; group < args.size / kInt8Group; ++group) {
    const size_t scale_offset = scales + static_cast<size_t>(group) * kSubBlockTokens * 2;
    quantise_weights<R>(scores, *args.split, scale_offset, args.weights);
    for (int i = 0; i < kInt8Group; i += kVectors * kLanes) {
      weigh_int8_vectors<R, kVectors>(args, group * kInt8Group + i);
    }
  }
}

using Int8Score = void (*)(const Int8ScoreArgs&);
using Int8Weigh = void (*)(const Int8WeighArgs&, const float*);

template <size_t... R>
constexpr std::array<Int8Score, sizeof...(R)> int8_score_table(std::index_sequence<R...>) {
  return {&score_int8_tile<static_cast<int>(R) + 1>...};
}
template <size_t... R>
constexpr std::array<Int8Weigh, sizeof...(R)> int8_weigh_table(std::index_sequence<R...>) {
  return {&weigh_int8_tile<static_cast<int>(R) + 1>...};
}

inline void score_int8(const Int8ScoreArgs& args, int num_rows) {
  static constexpr auto kTable = int8_score_table(std::make_index_sequence<kTileRows>());
  kTable[static_cast<size_t>(num_rows - 1)](args);
}
inline void weigh_int8(const Int8WeighArgs& args, const float* scores, int num_rows) {
  static constexpr auto kTable = int8_weigh_table(std::make_index_sequence<kTileRows>());
  kTable[static_cast<size_t>(num_rows - 1)](args, scores);
}

}  // namespace kvloom
