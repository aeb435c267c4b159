// What the formats of keys and values differ in, and a thread's scratch memory.
#pragma once

#include "kvloom/attention_int8.hpp"
#include "kvloom/attention_plan.hpp"
#include "kvloom/attention_tile.hpp"
#include "kvloom/softmax_state.hpp"

namespace kvloom {

// ---- Scratch of one thread ----

struct AttentionScratch {
  char* queries;  // [kItemRows] rows of head_size x 4 bytes, tile by tile
  float* totals;  // states of kItemRows rows
  float* part;    // states of a tile, of one split
  float* scores;  // [kTileRows][kSplitKeys]
  char* weights;  // [kTileRows][kSplitKeys] in two bytes each
  float* scales;  // [kTileRows] of int8 weights
  char* tail;     // the values of a sub-block
  char* latent;   // the values of a split; of a latent layout
  size_t bytes;
};

inline AttentionScratch attention_scratch_at(const AttentionShape& shape, char* memory) {
  const size_t state_bytes =
      static_cast<size_t>(shape.layout.head_size_v + kStateExtraFloats) * sizeof(float);
  AttentionScratch scratch = {};
  const auto take = [&](size_t bytes) {
    char* taken = memory + scratch.bytes;
    scratch.bytes += static_cast<size_t>(round_up(static_cast<int64_t>(bytes), kCacheLineBytes));
    return taken;
  };
  scratch.queries = take(static_cast<size_t>(kItemRows * shape.layout.head_size) * 4);
  scratch.totals = reinterpret_cast<float*>(take(kItemRows * state_bytes));
  scratch.part = reinterpret_cast<float*>(take(kTileRows * state_bytes));
  scratch.scores = reinterpret_cast<float*>(take(kTileRows * kSplitKeys * sizeof(float)));
  scratch.weights = take(kTileRows * kSplitKeys * sizeof(uint16_t));
  scratch.scales = reinterpret_cast<float*>(take(kTileRows * sizeof(float)));
  scratch.tail = take(shape.layout.value_bytes());
  scratch.latent = take(shape.layout.is_latent ? kSplitSubBlocks * shape.layout.value_bytes() : 0);
  return scratch;
}

inline size_t attention_scratch_bytes(const AttentionShape& shape) {
  alignas(kCacheLineBytes) char nowhere[1];
  return attention_scratch_at(shape, nowhere).bytes;
}

struct AttentionTileArgs {
  const AttentionShape* shape;
  const AttentionScratch* scratch;
  char* queries;  // packed
  int num_rows;
};

struct UnitQueries {  // rows of units, interleaved
  static void pack(const AttentionTileArgs& tile, const void* q, size_t row_bytes, int row) {
    const char* from = static_cast<const char*>(q);
    for (size_t i = 0; i < row_bytes; i += 4) {
      const size_t place = i * static_cast<size_t>(tile.num_rows) + static_cast<size_t>(row) * 4;
      std::memcpy(tile.queries + place, from + i, 4);
    }
  }
};

struct F32AttentionKernel {
  static constexpr bool kHasBf16Weights = false, kHasTail = true;
  static constexpr size_t kQueryBytes = 4;
  static void pack(const AttentionTileArgs& tile, const void* q, int row) {
    UnitQueries::pack(tile, q, static_cast<size_t>(tile.shape->layout.head_size) * 4, row);
  }
  static void score(const AttentionTileArgs& tile, const SplitView& split) {
    kvloom::score<F32Dot>({reinterpret_cast<const int32_t*>(tile.queries),
                           tile.shape->layout.head_size, &split, tile.scratch->scores},
                          tile.num_rows);
  }
  static void weigh(const AttentionTileArgs& tile, const SplitView& split, float* values) {
    kvloom::weigh<F32Dot>({reinterpret_cast<const char*>(tile.scratch->scores),
                           tile.shape->layout.head_size_v, &split, values},
                          tile.num_rows);
  }
};

struct Bf16AttentionKernel {
  static constexpr bool kHasBf16Weights = true, kHasTail = true;
  static constexpr size_t kQueryBytes = 2;
  static void pack(const AttentionTileArgs& tile, const void* q, int row) {
    UnitQueries::pack(tile, q, static_cast<size_t>(tile.shape->layout.head_size) * 2, row);
  }
  static void score(const AttentionTileArgs& tile, const SplitView& split) {
    kvloom::score<Bf16Dot>({reinterpret_cast<const int32_t*>(tile.queries),
                            tile.shape->layout.head_size / 2, &split, tile.scratch->scores},
                           tile.num_rows);
  }
  static void weigh(const AttentionTileArgs& tile, const SplitView& split, float* values) {
    kvloom::weigh<Bf16Dot>({tile.scratch->weights, tile.shape->layout.head_size_v, &split, values},
                           tile.num_rows);
  }
};

struct Int8AttentionKernel {
  static constexpr bool kHasBf16Weights = false;
  static constexpr bool kHasTail = false;  // codes are finite, unseen scales are not used
  static constexpr size_t kQueryBytes = 4;
  static Int8Queries queries(const AttentionTileArgs& tile) {
    return int8_queries_at(tile.queries, tile.num_rows, tile.shape->layout.head_size);
  }
  static void pack(const AttentionTileArgs& tile, const void* q, int row) {
    pack_int8_query(static_cast<const float*>(q), tile.shape->layout.head_size, queries(tile), row,
                    tile.num_rows);
  }
  static void score(const AttentionTileArgs& tile, const SplitView& split) {
    const KVLayout& layout = tile.shape->layout;
    score_int8({queries(tile), layout.head_size, layout.head_size_v, &split, tile.scratch->scores},
               tile.num_rows);
  }
  static void weigh(const AttentionTileArgs& tile, const SplitView& split, float* values) {
    uint8_t* high = reinterpret_cast<uint8_t*>(tile.scratch->weights);
    const Int8Weights weights = {high, high + kTileRows * kSplitKeys, tile.scratch->scales};
    const KVLayout& layout = tile.shape->layout;
    weigh_int8({weights, layout.head_size_v, layout.head_size, &split, values},
               tile.scratch->scores, tile.num_rows);
  }
};

}  // namespace kvloom
