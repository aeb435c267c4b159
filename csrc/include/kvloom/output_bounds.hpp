// Between which numbers outputs lie whose estimates are known: what a GEMM keeps of each panel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kvloom/format.hpp"
#include "kvloom/pack_rows.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// An output is within norm * |w| + error * |w - w'| of its estimate; see screen.hpp.
struct RowBound {
  float norm;
  float error;
};

// Of each panel's greatest output of a row: what it is at most, and at least. Panels beyond the
// weight have -inf.
class PanelBounds {
 public:
  static constexpr int kBlockPanels = kCacheLineBytes / static_cast<int>(sizeof(float));

  PanelBounds(float* first, size_t step, int num_panels)
      : num_panels_(num_panels), first_(first), step_(step) {}

  int num_panels() const { return num_panels_; }
  int num_blocks() const { return static_cast<int>(cdiv(num_panels_, kBlockPanels)); }
  float* most(int block) const { return first_ + step_ * static_cast<size_t>(block); }
  float* least(int block) const { return most(block) + kBlockPanels; }

 private:
  int num_panels_;
  float* first_;
  size_t step_;
};

// What the bounds of outputs are made of, and where they go: [blocks of panels][max_num_rows][most,
// least][kBlockPanels], so that what is written of a tile is near each other.
struct OutputBounds {
  const float* norms;    // [outputs of whole panels] |w|
  const float* errors;   // [outputs of whole panels] |w - w'|
  const RowBound* rows;  // [max_num_rows]
  int num_panels;
  int max_num_rows;
  float* kept;  // [num_kept(...)]

  static size_t num_kept(int num_panels, int max_num_rows) {
    return static_cast<size_t>(round_up(num_panels, PanelBounds::kBlockPanels)) * 2 *
           static_cast<size_t>(max_num_rows);
  }

  PanelBounds of_row(int row) const {
    constexpr size_t kRowFloats = 2 * PanelBounds::kBlockPanels;
    return {kept + kRowFloats * static_cast<size_t>(row),
            kRowFloats * static_cast<size_t>(max_num_rows), num_panels};
  }

  // Before bounds are kept for the first time.
  void clear() const { std::fill_n(kept, num_kept(num_panels, max_num_rows), kNothing); }

  static constexpr float kNothing = -std::numeric_limits<float>::infinity();
};

// Brings near what keep_bounds() reads and writes.
KVLOOM_INLINE void look_ahead_to_bounds(const OutputBounds& bounds, int first_row, int num_rows,
                                        int panel) {
  prefetch_two_lines(bounds.norms + panel * kPanelOutputs);
  prefetch_two_lines(bounds.errors + panel * kPanelOutputs);
  if (panel % PanelBounds::kBlockPanels != 0) return;
  for (int r = 0; r < num_rows; ++r) {
    prefetch_two_lines(bounds.of_row(first_row + r).most(panel / PanelBounds::kBlockPanels));
  }
}

// The bounds of a tile's rows from estimates y of a panel: of all rows side by side, the last one
// in the place of those that the tile does not have. Estimates of -inf do not count.
inline void keep_bounds(const float (*y)[kPanelOutputs], int first_row, int num_rows, int panel,
                        const OutputBounds& bounds) {
  static_assert(kMaxTileRows <= kLanes, "a row has a lane");
  const auto greater = [](vi32 a, vi32 b) { return as_i32(vmax(as_f32(a), as_f32(b))); };
  const float* norms = bounds.norms + panel * kPanelOutputs;
  const float* errors = bounds.errors + panel * kPanelOutputs;
  vi32 most[kLanes], least[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    most[r] = least[r] = as_i32(broadcast(OutputBounds::kNothing));
    if (r >= kMaxTileRows) continue;
    const int index = std::min(r, num_rows - 1);
    const RowBound& row = bounds.rows[first_row + index];
    const vf32 norm = as_f32(broadcast_i32(&row.norm)), error = as_f32(broadcast_i32(&row.error));
#pragma GCC unroll 8
    for (int i = 0; i < kPanelOutputs; i += kLanes) {
      const vf32 estimate = load(y[index] + i);
      const vf32 distance = fma(error, load(errors + i), norm * load(norms + i));
      most[r] = greater(as_i32(estimate + distance), most[r]);
      least[r] = greater(as_i32(estimate - distance), least[r]);
    }
  }
  const int block = panel / PanelBounds::kBlockPanels, place = panel % PanelBounds::kBlockPanels;
  float all_most[kLanes], all_least[kLanes];
  store_i32(all_most, reduce_each(most, greater));
  store_i32(all_least, reduce_each(least, greater));
  for (int r = 0; r < num_rows; ++r) {
    const PanelBounds row = bounds.of_row(first_row + r);
    row.most(block)[place] = all_most[r];
    row.least(block)[place] = all_least[r];
  }
}

}  // namespace kvloom
