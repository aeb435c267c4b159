// Y = X W^T with an epilogue: X packed rows (pack_rows.hpp), W packed panels (format.hpp).
//
//   Gemm gemm{weight, rows, epilogue};
//   GemmPlan plan = plan_gemm(gemm, num_threads);          // once per step
//   for each item in 0 .. plan.num_items - 1, on any thread, in any order:
//     run_gemm_item(gemm, plan, item, scratch_of_this_thread);
//
// A row's result does not depend on the other rows, bit for bit: inputs are summed in one order
// for every tile height. The exception is row_format_for's switch for quantised weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvloom/far_reads.hpp"
#include "kvloom/format.hpp"
#include "kvloom/gemm_dequantise.hpp"
#include "kvloom/gemm_epilogue.hpp"
#include "kvloom/gemm_kernels.hpp"
#include "kvloom/pack_rows.hpp"

namespace kvloom {

// From this many rows on, quantised weights take BF16 rows: a panel is dequantised once for many.
// That pays only where dot products of bytes are slower than those of floats. Elsewhere int8 rows
// are ahead at every number of rows, and a row's result does not depend on how many there are.
constexpr int kDequantiseRows = kLanes == 4 ? 64 : std::numeric_limits<int>::max();

struct Gemm {
  PackedWeight weight;
  PackedRows rows;  // in the format of row_format_for(weight.format, num_rows)
  Epilogue epilogue;
};

// Blocks of tiles, whose packed rows stay in the cache, times chunks of units of panels.
struct GemmPlan {
  int num_items = 0;
  int num_blocks = 0;
  int num_chunks = 0;
};

// The format that rows must be packed in for a weight.
constexpr RowFormat row_format_for(Format weight, int num_rows) {
  if (weight == Format::F32) return RowFormat::F32;
  if (weight == Format::BF16 || num_rows >= kDequantiseRows) return RowFormat::BF16;
  return RowFormat::S8;
}

constexpr bool is_quantised(Format format) { return format == Format::Q8 || format == Format::Q4; }

// Whether run_gemm_item makes bf16 panels of the weight's before it multiplies them.
constexpr bool is_dequantised(const Gemm& gemm) {
  return is_quantised(gemm.weight.format) && gemm.rows.format == RowFormat::BF16;
}

// `bytes` from `start` on, to be brought near while the kernel reads a panel.
inline Stream stream_of(const Gemm& gemm, uintptr_t start, size_t bytes) {
  const Format read = is_dequantised(gemm) ? Format::BF16 : gemm.weight.format;
  const int num_advances = advances_per_group(read) * num_groups(gemm.weight.num_inputs);
  return {start, static_cast<uintptr_t>(cdiv(static_cast<int64_t>(bytes), num_advances))};
}

// Bytes of scratch that one thread needs, 64-byte aligned, whatever the number of rows.
constexpr size_t gemm_scratch_bytes(Format format, int num_inputs) {
  return is_quantised(format) ? kMaxUnitPanels * panel_bytes(Format::BF16, num_inputs) : 0;
}

inline int num_units(const Gemm& gemm) {
  return static_cast<int>(cdiv(num_panels(gemm.weight.order, gemm.weight.num_outputs),
                               unit_panels(gemm.epilogue.kind)));
}

// Items of some microseconds, at least four per thread where there is enough work: threads end
// together, and a slow core does fewer of them. The estimates of a core's speed are rough.
inline GemmPlan plan_gemm(const Gemm& gemm, int num_threads) {
  constexpr double kItemSeconds = 2e-6, kBytesPerSecond = 20e9, kFlopsPerSecond = 400e9;
  constexpr double kBlockBytes = 512 << 10;  // half of a usual L2 cache
  GemmPlan plan;
  if (gemm.rows.num_rows == 0) return plan;
  const double rows_bytes = static_cast<double>(
      packed_rows_bytes(gemm.rows.format, gemm.rows.num_rows, gemm.rows.num_inputs));
  plan.num_blocks =
      std::min(static_cast<int>(rows_bytes / kBlockBytes) + 1, num_tiles(gemm.rows.num_rows));
  const int units = num_units(gemm);
  const double unit_bytes =
      static_cast<double>(panel_bytes(gemm.weight.format, gemm.rows.num_inputs)) *
      unit_panels(gemm.epilogue.kind);
  const double unit_flops = 2.0 * kPanelOutputs * unit_panels(gemm.epilogue.kind) *
                            gemm.rows.num_inputs * gemm.rows.num_rows / plan.num_blocks;
  const double unit_seconds = std::max(unit_bytes / kBytesPerSecond, unit_flops / kFlopsPerSecond);
  const int wanted = static_cast<int>(units * unit_seconds / kItemSeconds);
  const int least = 4 * num_threads;
  const int chunks = static_cast<int>(round_up(std::max(wanted, least), num_threads));
  plan.num_chunks = std::min(chunks, units);
  plan.num_items = plan.num_blocks * plan.num_chunks;
  return plan;
}

// Part i of n of `count` things, as equal as possible: [count * i / n, count * (i + 1) / n).
constexpr int part_start(int count, int part, int num_parts) {
  return static_cast<int>(int64_t{count} * part / num_parts);
}

// One item: tiles of a block times panels of a chunk.
struct GemmRange {
  int first_tile;
  int end_tile;
  int first_panel;
  int end_panel;
};

inline GemmRange item_range(const Gemm& gemm, const GemmPlan& plan, int item) {
  const int block = item / plan.num_chunks, chunk = item % plan.num_chunks;
  const int tiles = num_tiles(gemm.rows.num_rows), units = num_units(gemm);
  const int width = unit_panels(gemm.epilogue.kind);
  const int panels = num_panels(gemm.weight.order, gemm.weight.num_outputs);
  return {part_start(tiles, block, plan.num_blocks), part_start(tiles, block + 1, plan.num_blocks),
          part_start(units, chunk, plan.num_chunks) * width,
          std::min(part_start(units, chunk + 1, plan.num_chunks) * width, panels)};
}

// The weights to bring near while `tile` of the block is multiplied with `panel`: a single tile
// looks a little ahead of itself, several share the panel that is next, be it another item's: a
// thread takes items in order.
inline Stream next_weights(const Gemm& gemm, const GemmRange& range, int panel, int tile) {
  constexpr size_t kAhead = 8192;
  const size_t bytes = panel_bytes(gemm.weight.format, gemm.weight.num_inputs);
  const size_t tiles = static_cast<size_t>(range.end_tile - range.first_tile);
  const size_t index = static_cast<size_t>(tile - range.first_tile);
  const auto start = reinterpret_cast<uintptr_t>(group_at(gemm.weight, panel, 0));
  const int panels = num_panels(gemm.weight.order, gemm.weight.num_outputs);
  const auto end = reinterpret_cast<uintptr_t>(group_at(gemm.weight, panels, 0));
  const bool is_alone = tiles == 1 && !is_dequantised(gemm);
  const size_t unit_bytes = bytes * static_cast<size_t>(unit_panels(gemm.epilogue.kind));
  // Of narrow strips the first leaves half of the panel's bytes for the second to ask for.
  const bool is_narrow = gemm.rows.format == RowFormat::S8 &&
                         lines_per_step(gemm.rows.format, gemm.rows.num_rows) == 1;
  const size_t ahead =
      is_alone ? kAhead + (is_narrow ? bytes / 2 : 0) : unit_bytes + bytes * index / tiles;
  if (start + ahead + 2 * kCacheLineBytes >= end) return {start, 0};
  return stream_of(gemm, start + ahead, std::min(bytes / tiles, end - start - ahead));
}

// What to bring near while `tile` is multiplied with `panel`: weights, and a piece of `far` where
// they leave a line of each step free. With many tiles too: no hardware foresees another panel.
inline Lookahead look_ahead(const Gemm& gemm, const GemmRange& range, int panel, int tile,
                            FarPieces& far) {
  const int tiles = range.end_tile - range.first_tile;
  const Stream weights = next_weights(gemm, range, panel, tile);
  if (tiles == 1 && lines_per_step(gemm.rows.format, gemm.rows.num_rows) > 1) {
    return {weights, {weights.next + kCacheLineBytes, weights.step}, false};
  }
  const uintptr_t piece = far.take();
  if (piece == 0) return {weights, weights, tiles > 1};
  return {weights, stream_of(gemm, piece, far.reads->piece_bytes()), tiles > 1};
}

// The panels of a unit as the kernel reads them: where they are stored, or dequantised in scratch.
inline void find_sources(const Gemm& gemm, int first_panel, int num_panels, uint8_t* scratch,
                         const uint8_t* (&sources)[kMaxUnitPanels]) {
  for (int i = 0; i < num_panels; ++i) {
    sources[i] = group_at(gemm.weight, first_panel + i, 0);
    if (!is_dequantised(gemm)) continue;
    dequantise_panel(gemm.weight, first_panel + i, scratch);
    sources[i] = scratch;
    scratch += panel_bytes(Format::BF16, gemm.weight.num_inputs);
  }
}

// `far` is what to bring near of a later instruction's.
inline void run_gemm_item(const Gemm& gemm, const GemmPlan& plan, int item, uint8_t* scratch,
                          FarPieces far = {}) {
  const GemmRange range = item_range(gemm, plan, item);
  const TileFunctions& functions = *find_tile_functions(gemm.weight.format, gemm.rows.format);
  const int width = unit_panels(gemm.epilogue.kind);
  TileProducts products;
  TileArgs args;
  args.num_groups = num_groups(gemm.weight.num_inputs);
  for (int panel = range.first_panel; panel < range.end_panel; panel += width) {
    const int panels = std::min(width, range.end_panel - panel);
    const uint8_t* sources[kMaxUnitPanels];
    find_sources(gemm, panel, panels, scratch, sources);
    if (panels < width) std::memset(products.y[1], 0, sizeof(products.y[1]));
    products.panel = panel;
    for (int tile = range.first_tile; tile < range.end_tile; ++tile) {
      products.first_row = first_row_of_tile(gemm.rows.num_rows, tile);
      products.num_rows = first_row_of_tile(gemm.rows.num_rows, tile + 1) - products.first_row;
      args.rows = tile_at(gemm.rows, products.first_row);
      look_ahead_to_outputs(gemm.epilogue, products);
      for (int i = 0; i < panels; ++i) {
        args.panel = sources[i];
        args.y = &products.y[i][0][0];
        args.ahead = look_ahead(gemm, range, panel + i, tile, far);
        functions[static_cast<size_t>(products.num_rows - 1)](args);
      }
      finish_tile(gemm.weight, gemm.epilogue, products);
    }
  }
}

}  // namespace kvloom
