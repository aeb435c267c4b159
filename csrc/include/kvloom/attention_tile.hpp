// The inner loops of attention: scores of a tile of rows against keys, and sums of values weighted
// by rows. Both f32 and bf16 are sequences of 32-bit units: one f32 number, or a pair of bf16
// numbers of one dot product.
//
// Each accumulator adds its products in an order that depends neither on the number of rows in the
// tile (R) nor on the number of vectors beside it (V): a row's numbers are the same in every tile.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "kvloom/attention_plan.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

constexpr int kSplitSubBlocks = kSplitKeys / kSubBlockTokens;

// What a tile reads of one split: its sub-blocks [first, end). Numbers of keys and weights count
// from the split's first key; the arrays have one entry for each sub-block of a split.
struct SplitView {
  int first;
  int end;
  std::array<const char*, kSplitSubBlocks> keys;
  std::array<const char*, kSplitSubBlocks> values;
  std::array<const char*, kSplitSubBlocks> next_keys;  // to be fetched while values are summed
};

struct F32Dot {
  static constexpr int kTokensPerUnit = 1;
  static constexpr int kWeightBytes = 4;
  static KVLOOM_INLINE vf32 step(vf32 acc, vi32 a, vi32 b) {
    return fma(as_f32(a), as_f32(b), acc);
  }
};

struct Bf16Dot {
  static constexpr int kTokensPerUnit = 2;
  static constexpr int kWeightBytes = 2;
  static KVLOOM_INLINE vf32 step(vf32 acc, vi32 a, vi32 b) { return dot_bf16(acc, a, b); }
};

// Vectors beside each other in a tile of R rows, for as many accumulators as there are registers.
constexpr int tile_vectors(int num_rows) {
  if (kLanes == 16) return num_rows <= 6 ? 4 : 2;
  return num_rows <= 2 ? 4 : 2;
}

constexpr size_t kUnitRowBytes = kSubBlockTokens * sizeof(int32_t);  // a unit of a sub-block's keys

struct ScoreArgs {
  const int32_t* q;  // [num_units][R]
  int num_units;     // units of a key head
  const SplitView* split;
  float* scores;  // [R][kSplitKeys]; those between multiples of V x kLanes are written
};

// Where a vector of a split's scores finds its keys; outside of the view those of its first or last
// sub-block. `ahead` is what will be read next: the values.
struct KeyVector {
  const char* keys;
  const char* ahead;
};

KVLOOM_INLINE KeyVector key_vector(const SplitView& split, int index) {
  const int token = index * kLanes;
  const size_t sub =
      static_cast<size_t>(std::min(std::max(token / kSubBlockTokens, split.first), split.end - 1));
  const size_t offset = static_cast<size_t>(token % kSubBlockTokens) * sizeof(int32_t);
  return {split.keys[sub] + offset, split.values[sub] + offset};
}

// Vectors [first, end) hold the scores of a view, if they are computed `step` at a time.
struct VectorRange {
  int first;
  int end;
};

KVLOOM_INLINE VectorRange score_vectors_of(const SplitView& split, int step) {
  constexpr int kPerSubBlock = kSubBlockTokens / kLanes;
  const int first = split.first * kPerSubBlock;
  return {first - first % step, split.end * kPerSubBlock};
}

template <class Dot, int R, int V>
__attribute__((noinline)) void score_vectors(const ScoreArgs& args, int first_vector) {
  const char* keys[V];
  const char* ahead[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    const KeyVector vector = key_vector(*args.split, first_vector + v);
    keys[v] = vector.keys;
    ahead[v] = vector.ahead;
  }
  const int32_t* q = args.q;
  vf32 acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = vf32{};
  }
  for (size_t at = 0; at < static_cast<size_t>(args.num_units) * kUnitRowBytes;
       at += kUnitRowBytes) {
    vi32 k[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      k[v] = load_i32(keys[v] + at);
      prefetch_l1(ahead[v] + at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vi32 x = broadcast_i32(q + r);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = Dot::step(acc[r][v], x, k[v]);
    }
    q += R;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      store(args.scores + r * kSplitKeys + (first_vector + v) * kLanes, acc[r][v]);
    }
  }
}

template <class Dot, int R>
void score_tile(const ScoreArgs& args) {
  constexpr int kVectors = tile_vectors(R);
  const VectorRange range = score_vectors_of(*args.split, kVectors);
  for (int v = range.first; v < range.end; v += kVectors) score_vectors<Dot, R, kVectors>(args, v);
}

struct WeighArgs {
  const char* weights;  // [R][kSplitKeys] in the storage format; 0 for keys that a row does not see
  int size;             // numbers of a value head
  const SplitView* split;
  float* values;  // [R][size]
};

template <class Dot, int R, int V>
__attribute__((noinline)) void weigh_vectors(const WeighArgs& args, int first) {
  constexpr int kUnits = kSubBlockTokens / Dot::kTokensPerUnit;
  constexpr size_t kWeightRowBytes = static_cast<size_t>(kSplitKeys) * Dot::kWeightBytes;
  const size_t unit_bytes = static_cast<size_t>(args.size) * sizeof(int32_t);
  const size_t offset = static_cast<size_t>(first) * sizeof(int32_t);
  const char* weights =
      args.weights + static_cast<size_t>(args.split->first) * kUnits * sizeof(int32_t);
  vf32 acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = vf32{};
  }
  for (int s = args.split->first; s < args.split->end; ++s) {
    const char* values = args.split->values[static_cast<size_t>(s)] + offset;
    const char* ahead = args.split->next_keys[static_cast<size_t>(s)] + offset;
    for (int unit = 0; unit < kUnits; ++unit) {
      vi32 x[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        x[v] = load_i32(values + v * kLanes * 4);
        if (v * kLanes * 4 % static_cast<int>(kCacheLineBytes) == 0) {
          prefetch_l1(ahead + v * kLanes * 4);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vi32 w = broadcast_i32(weights + static_cast<size_t>(r) * kWeightRowBytes);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[r][v] = Dot::step(acc[r][v], w, x[v]);
      }
      weights += sizeof(int32_t);
      values += unit_bytes;
      ahead += unit_bytes;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(args.values + r * args.size + first + v * kLanes, acc[r][v]);
  }
}

template <class Dot, int R>
void weigh_tile(const WeighArgs& args) {
  constexpr int kVectors = tile_vectors(R);
  int i = 0;
  for (; i + kVectors * kLanes <= args.size; i += kVectors * kLanes) {
    weigh_vectors<Dot, R, kVectors>(args, i);
  }
  for (; i + 2 * kLanes <= args.size; i += 2 * kLanes) weigh_vectors<Dot, R, 2>(args, i);
  if (i < args.size) weigh_vectors<Dot, R, 1>(args, i);
}

// tables[R - 1]: the functions for R rows.
template <class Dot, size_t... R>
constexpr std::array<void (*)(const ScoreArgs&), sizeof...(R)> score_table(
    std::index_sequence<R...>) {
  return {&score_tile<Dot, static_cast<int>(R) + 1>...};
}
template <class Dot, size_t... R>
constexpr std::array<void (*)(const WeighArgs&), sizeof...(R)> weigh_table(
    std::index_sequence<R...>) {
  return {&weigh_tile<Dot, static_cast<int>(R) + 1>...};
}

template <class Dot>
void score(const ScoreArgs& args, int num_rows) {
  static constexpr auto kTable = score_table<Dot>(std::make_index_sequence<kTileRows>());
  kTable[static_cast<size_t>(num_rows - 1)](args);
}
template <class Dot>
void weigh(const WeighArgs& args, int num_rows) {
  static constexpr auto kTable = weigh_table<Dot>(std::make_index_sequence<kTileRows>());
  kTable[static_cast<size_t>(num_rows - 1)](args);
}

}  // namespace kvloom
