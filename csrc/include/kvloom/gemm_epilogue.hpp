// What becomes of the products of a tile: see Epilogue.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvloom/best_outputs.hpp"
#include "kvloom/format.hpp"
#include "kvloom/gemm_activation.hpp"
#include "kvloom/output_bounds.hpp"
#include "kvloom/pack_rows.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

enum class EpilogueKind {
  Store,   // out[m][n] = y
  Add,     // out[m][n] += y: the residual
  Best,    // out[m] becomes BestOutputs
  Bounds,  // bounds are kept of each panel's greatest, and nothing else
  // activation(gate_i) * up_i from a GateUp weight, [num_rows, num_outputs / 2]:
  GatedStore,  // as f32 rows
  GatedPack,   // as the packed rows of the next GEMM
};

// What becomes of Y [num_rows, num_outputs].
struct Epilogue {
  EpilogueKind kind = EpilogueKind::Store;
  Activation activation = Activation::Silu;
  const float* bias = nullptr;           // [num_outputs], gate before up, or none
  float* out = nullptr;                  // f32 rows; not with GatedPack or Bounds
  size_t out_stride = 0;                 // floats from one row of out to the next
  PackedRows packed;                     // GatedPack: num_inputs = num_outputs / 2
  const OutputBounds* bounds = nullptr;  // Bounds: by which the products are estimates
};

constexpr bool is_gated(EpilogueKind kind) { return kind >= EpilogueKind::GatedStore; }

// Whether of each panel of a row two numbers are kept, and no outputs.
constexpr bool is_summary(EpilogueKind kind) {
  return kind == EpilogueKind::Best || kind == EpilogueKind::Bounds;
}

// Panels whose products an epilogue takes together: a packed group of 32 gated values needs two.
constexpr int kMaxUnitPanels = 2;
constexpr int unit_panels(EpilogueKind kind) {
  return kind == EpilogueKind::GatedPack ? kMaxUnitPanels : 1;
}

// The products of one tile with the panels of one unit; panels beyond the weight hold zeros.
struct TileProducts {
  int first_row = 0;
  int num_rows = 0;
  int panel = 0;  // the first of the unit
  alignas(kCacheLineBytes) float y[kMaxUnitPanels][kMaxTileRows][kPanelOutputs];
};

// The bias of a panel's lanes; 0 in lanes without an output.
inline void panel_bias(const PackedWeight& weight, const float* bias, int panel,
                       float (&lanes)[kPanelOutputs]) {
  const bool is_gate_up = weight.order == OutputOrder::GateUp;
  const int size = is_gate_up ? weight.num_outputs / 2 : weight.num_outputs;
  const int width = is_gate_up ? kPanelOutputs / 2 : kPanelOutputs;
  std::memset(lanes, 0, sizeof(lanes));
  for (int lane = 0; lane < kPanelOutputs; ++lane) {
    const int row = panel * width + lane % width;
    if (row < size) lanes[lane] = bias[row + (lane / width) * size];
  }
}

inline void add_bias(const PackedWeight& weight, const float* bias, int index,
                     TileProducts& products) {
  float lanes[kPanelOutputs];
  panel_bias(weight, bias, products.panel + index, lanes);
  for (int r = 0; r < products.num_rows; ++r) {
    float* y = products.y[index][r];
    for (int i = 0; i < kPanelOutputs; i += kLanes) store(y + i, load(y + i) + load(lanes + i));
  }
}

// `count` values to a row of out, or added to it.
KVLOOM_INLINE void write_outputs(float* out, const float* y, int count, bool is_added) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(out + i, is_added ? load(out + i) + load(y + i) : load(y + i));
  }
  for (; i < count; ++i) out[i] = is_added ? out[i] + y[i] : y[i];
}

// 16 gated values of a row of a panel.
KVLOOM_INLINE void gate(Activation activation, const float* y, float* gated) {
  constexpr int kHalf = kPanelOutputs / 2;
  for (int i = 0; i < kHalf; i += kLanes) {
    store(gated + i, activate_gated(activation, load(y + i), load(y + kHalf + i)));
  }
}

inline void finish_gated_tile(const PackedWeight& weight, const Epilogue& epilogue,
                              const TileProducts& products) {
  constexpr int kHalf = kPanelOutputs / 2;
  const int size = weight.num_outputs / 2;
  const int first = products.panel * kHalf;
  const int num_panels = unit_panels(epilogue.kind);
  // Values of the unit's panels beside each other, which is a group of the packed rows.
  float gated[kMaxTileRows][kMaxUnitPanels * kHalf];
  for (int r = 0; r < products.num_rows; ++r) {
    for (int i = 0; i < num_panels; ++i) {
      gate(epilogue.activation, products.y[i][r], gated[r] + i * kHalf);
    }
  }
  if (epilogue.kind == EpilogueKind::GatedPack) {
    // As many rows are packed as are multiplied, in the same tiles.
    return pack_tile_group({epilogue.packed.format, tile_at(epilogue.packed, products.first_row),
                            products.num_rows, 0},
                           first / kGroupInputs, gated);
  }
  for (int r = 0; r < products.num_rows; ++r) {
    const size_t row = static_cast<size_t>(products.first_row + r);
    float* out = epilogue.out + epilogue.out_stride * row + first;
    write_outputs(out, gated[r], std::min(kHalf, size - first), false);
  }
}

// Brings near what finish_tile reads and writes, while the products are computed: rows of a wide
// matrix are pages apart, and no hardware foresees so many places.
// Inlined by force: GCC takes a function of prefetches alone for one without effect, and drops it.
KVLOOM_INLINE void look_ahead_to_outputs(const Epilogue& epilogue, const TileProducts& products) {
  if (epilogue.kind == EpilogueKind::Bounds) {
    look_ahead_to_bounds(*epilogue.bounds, products.first_row, products.num_rows, products.panel);
  }
  if (epilogue.kind == EpilogueKind::GatedPack || is_summary(epilogue.kind)) return;
  const int width = is_gated(epilogue.kind) ? kPanelOutputs / 2 : kPanelOutputs;
  for (int r = 0; r < products.num_rows; ++r) {
    const size_t row = static_cast<size_t>(products.first_row + r);
    prefetch_two_lines(epilogue.out + epilogue.out_stride * row + products.panel * width);
  }
}

// A panel's outputs of all rows, those beyond the weight -inf.
inline void summarise_tile(const PackedWeight& weight, const Epilogue& epilogue,
                           const TileProducts& products) {
  if (epilogue.kind == EpilogueKind::Bounds) {
    return keep_bounds(products.y[0], products.first_row, products.num_rows, products.panel,
                       *epilogue.bounds);
  }
  for (int r = 0; r < products.num_rows; ++r) {
    float* out = epilogue.out + epilogue.out_stride * static_cast<size_t>(products.first_row + r);
    keep_best(products.y[0][r], products.panel, BestOutputs<float>(out, weight.num_outputs));
  }
}

inline void finish_tile(const PackedWeight& weight, const Epilogue& epilogue,
                        TileProducts& products) {
  if (epilogue.bias != nullptr) {
    for (int i = 0; i < unit_panels(epilogue.kind); ++i) {
      add_bias(weight, epilogue.bias, i, products);
    }
  }
  if (is_gated(epilogue.kind)) return finish_gated_tile(weight, epilogue, products);
  const int first = products.panel * kPanelOutputs;
  const int count = std::min(kPanelOutputs, weight.num_outputs - first);
  if (is_summary(epilogue.kind)) {
    for (int r = 0; r < products.num_rows && count < kPanelOutputs; ++r) {
      float* y = products.y[0][r];
      std::fill(y + count, y + kPanelOutputs, -std::numeric_limits<float>::infinity());
    }
    return summarise_tile(weight, epilogue, products);
  }
  for (int r = 0; r < products.num_rows; ++r) {
    const float* y = products.y[0][r];
    float* row = epilogue.out + epilogue.out_stride * static_cast<size_t>(products.first_row + r);
    write_outputs(row + first, y, count, epilogue.kind == EpilogueKind::Add);
  }
}

}  // namespace kvloom
