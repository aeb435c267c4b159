// Finding the greatest output of a wide BF16 weight while half of it is read.
//
// A copy in int8 estimates all outputs of a row, each within a bound that is certain. Those that
// may be the greatest are few, mostly fewer than ten of a whole vocabulary: their panels alone are
// multiplied exactly, with the very numbers that the whole product would give.
//
// Let x be a row, w an output's weights, x' and w' what int8 makes of them. Then
//   |x w - x' w'| <= |x - x'| |w| + |x'| |w - w'|      (Cauchy and Schwarz)
// and what n sums and products of floats come to is within n 2^-23 |x| |w| of what it should be; or
// within n 2^-126, where numbers are so small that a machine takes them for 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvloom/arena.hpp"
#include "kvloom/embedding.hpp"
#include "kvloom/gemm.hpp"
#include "kvloom/output_bounds.hpp"
#include "kvloom/pack_weights.hpp"

namespace kvloom {

// Of rows and weights below it no estimate overflows.
constexpr double kMostNorm = 1e15;

// What norms are taken for at least: their product is above n 2^-126 for n up to 80,000.
constexpr double kLeastRowNorm = 1e-14, kLeastNorm = 1e-19;

// The greatest f16 that is not above value >= 0.
inline uint16_t truncate_to_f16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const int exponent = static_cast<int>(bits >> 23) - 112;
  if (exponent >= 31) return 0x7bff;
  if (exponent > 0) return static_cast<uint16_t>(exponent << 10 | (bits >> 13 & 0x3ffu));
  if (exponent < -10) return 0;
  return static_cast<uint16_t>(((bits & 0x7fffffu) | 0x800000u) >> (14 - exponent));
}

// 32 values as a Q8_0 block; returns the sum of squares of what that changes.
inline double make_q8_block(const float* values, uint8_t* block) {
  float largest = 0.0f;
  for (int i = 0; i < kGroupInputs; ++i) largest = std::max(largest, std::fabs(values[i]));
  const uint16_t scale = truncate_to_f16(largest / 127.0f);
  const float step = f16_to_f32(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  std::memcpy(block, &scale, sizeof(scale));
  double error = 0.0;
  for (int i = 0; i < kGroupInputs; ++i) {
    const float code = std::nearbyint(values[i] * inverse);
    // Written so that a NaN becomes a number.
    const auto whole = static_cast<int8_t>(code > -127.0f ? std::min(code, 127.0f) : -127.0f);
    block[2 + i] = static_cast<uint8_t>(whole);
    const double off = double{values[i]} - double{step} * whole;
    error += off * off;
  }
  return error;
}

// The copy of a BF16 weight, and how far it is off.
class Screen {
 public:
  // Of a plain weight, which must stay where and what it is. Call make_panel() for each of its
  // panels.
  explicit Screen(const PackedWeight& exact)
      : exact_(exact),
        panels_(num_weight_bytes(exact.num_outputs, exact.num_inputs)),
        norms_(2 * norm_bytes(exact.num_outputs)) {
    coarse_ = {Format::Q8, OutputOrder::Plain, exact.num_outputs, exact.num_inputs, panels_.data()};
  }

  static size_t num_bytes(int num_outputs, int num_inputs) {
    return num_weight_bytes(num_outputs, num_inputs) + 2 * norm_bytes(num_outputs);
  }

  // Panels may be made by different threads, with `values` [padded_inputs] of their own.
  void make_panel(int panel, float* values) {
    const int first = panel * kPanelOutputs;
    const int end = std::min(first + kPanelOutputs, exact_.num_outputs);
    std::fill_n(values, padded_inputs(exact_.num_inputs), 0.0f);
    for (int output = first; output < end; ++output) make_output(output, values);
  }

  // Whether all weights are numbers of a usual size; once all panels are made.
  bool is_usable() const {
    const float* norms = this->norms();
    return std::all_of(norms, norms + exact_.num_outputs, [](float x) { return x < kMostNorm; });
  }

  const PackedWeight& exact() const { return exact_; }
  const PackedWeight& coarse() const { return coarse_; }
  const float* norms() const { return reinterpret_cast<const float*>(norms_.data()); }
  const float* errors() const {
    return reinterpret_cast<const float*>(norms_.data() + norm_bytes(exact_.num_outputs));
  }

 private:
  static size_t num_weight_bytes(int num_outputs, int num_inputs) {
    return packed_weight_bytes(Format::Q8, OutputOrder::Plain, num_outputs, num_inputs);
  }
  static size_t norm_bytes(int num_outputs) {
    return sizeof(float) * static_cast<size_t>(round_up(num_outputs, kPanelOutputs));
  }

  void make_output(int output, float* values) {
    unpack_row(exact_, output, values);
    const PanelLane place = panel_lane(exact_, output);
    double square = 0.0, error = 0.0;
    for (int i = 0; i < exact_.num_inputs; ++i) square += double{values[i]} * values[i];
    for (int group = 0; group < num_groups(exact_.num_inputs); ++group) {
      uint8_t block[2 + kGroupInputs];
      error += make_q8_block(values + group * kGroupInputs, block);
      pack_q8_block(group_at(coarse_, place.panel, group), place.lane, block);
    }
    float* norms = reinterpret_cast<float*>(norms_.data());
    norms[output] = static_cast<float>(std::max(std::sqrt(square), kLeastNorm) * kRoundedUp);
    norms[static_cast<size_t>(round_up(exact_.num_outputs, kPanelOutputs)) +
          static_cast<size_t>(output)] = static_cast<float>(std::sqrt(error) * kRoundedUp);
  }

  static constexpr double kRoundedUp = 1.0 + 1e-6;  // more than a float's rounding takes away

  PackedWeight exact_, coarse_;
  Region panels_, norms_;
};

// ---- Rows ----

// Row `row` of packed BF16 rows as a tile of its own: [padded_inputs].
inline void unpack_bf16_row(const PackedRows& rows, int row, uint16_t* values) {
  const RowPlace place = row_place(rows, row);
  const uint8_t* from = place.tile + 4 * place.row_in_tile;
  const size_t step = 4 * static_cast<size_t>(place.tile_rows);
  for (int i = 0; i < padded_inputs(rows.num_inputs); i += 2) {
    std::memcpy(values + i, from, 4);
    from += step;
  }
}

// Packs a row, values [padded_inputs] of bf16, as int8; returns what that makes of its bound: NaN
// where its estimates are good for nothing.
inline RowBound pack_coarse_row(const PackedRows& coarse, int row, const uint16_t* values) {
  const RowPlace place = row_place(coarse, row);
  double square = 0.0, coarse_square = 0.0, error = 0.0;
  for (int group = 0; group < num_groups(coarse.num_inputs); ++group) {
    float x[kGroupInputs];
    for (int i = 0; i < kGroupInputs; i += kLanes) {
      store(x + i, load_bf16(values + group * kGroupInputs + i));
    }
    pack_row_group(place, group, x);
    S8Group quantised;
    quantise_group(x, &quantised);
    for (int i = 0; i < kGroupInputs; ++i) {
      const double whole = double{quantised.scale} * quantised.codes[i];
      square += double{x[i]} * x[i];
      coarse_square += whole * whole;
      error += (x[i] - whole) * (x[i] - whole);
    }
  }
  const double norm = std::sqrt(square), rounding = (coarse.num_inputs + 64) * 0x1p-23;
  if (!(norm < kMostNorm)) return {std::nanf(""), std::nanf("")};
  return {static_cast<float>(std::max(std::sqrt(error) + rounding * norm, kLeastRowNorm) * 1.001),
          static_cast<float>(std::sqrt(coarse_square) * 1.001)};
}

// ---- What is left to be done exactly ----

// What the greatest output of a row is at least.
inline float least_maximum(const PanelBounds& bounds) {
  vf32 most = broadcast(OutputBounds::kNothing);
  for (int block = 0; block < bounds.num_blocks(); ++block) {
    for (int i = 0; i < PanelBounds::kBlockPanels; i += kLanes) {
      most = vmax(load(bounds.least(block) + i), most);
    }
  }
  return reduce_max(most);
}

// visit(panel) for each panel that may hold it. `least` is finite.
template <class Visit>
inline void for_each_candidate(const PanelBounds& bounds, float least, Visit visit) {
  for (int block = 0; block < bounds.num_blocks(); ++block) {
    for (int i = 0; i < PanelBounds::kBlockPanels; i += kLanes) {
      uint32_t left = lanes_of(load(bounds.most(block) + i) >= broadcast(least));
      for (; left != 0; left &= left - 1) {
        visit(block * PanelBounds::kBlockPanels + i + __builtin_ctz(left));
      }
    }
  }
}

inline int count_candidates(const PanelBounds& bounds, float least) {
  int count = 0;
  for_each_candidate(bounds, least, [&](int) { ++count; });
  return count;
}

// A row, and what is made of it panel by panel.
struct ExactRow {
  const PackedWeight& weight;
  const uint16_t* values;  // the row as a tile of its own
  BestOutputs<float> kept;
};

inline void finish_panel(const ExactRow& row, int panel) {
  alignas(kCacheLineBytes) float y[kPanelOutputs];
  TileArgs args;
  args.rows = reinterpret_cast<const uint8_t*>(row.values);
  args.panel = group_at(row.weight, panel, 0);
  args.num_groups = num_groups(row.weight.num_inputs);
  args.y = y;
  const auto here = reinterpret_cast<uintptr_t>(args.panel);
  args.ahead = {{here, 0}, {here, 0}, false};
  (*find_tile_functions(Format::BF16, RowFormat::BF16))[0](args);
  const int count = std::min(kPanelOutputs, row.weight.num_outputs - panel * kPanelOutputs);
  keep_best_of(y, count, panel, row.kept);
}

// Those of candidates exactly, and others that nobody chooses.
inline void finish_candidates(const ExactRow& row, const PanelBounds& bounds, float least) {
  std::fill_n(row.kept.greatest, bounds.num_panels(), OutputBounds::kNothing);
  for_each_candidate(bounds, least, [&](int panel) { finish_panel(row, panel); });
}

}  // namespace kvloom
