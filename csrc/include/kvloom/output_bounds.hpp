// Between which numbers outputs lie whose estimates are known: what a GEMM keeps of each panel.
#pragma once

#include <limits>

#include "kvloom/best_outputs.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// An output is within norm * |w| + error * |w - w'| of its estimate; see screen.hpp.
struct RowBound {
  float norm;
  float error;
};

struct OutputBounds {
  const float* norms;    // [outputs of whole panels] |w|
  const float* errors;   // [outputs of whole panels] |w - w'|
  const RowBound* rows;  // [num_rows]
};

// Of a panel's outputs, estimated as y [kPanelOutputs]: what the greatest is at most, in the place
// of BestOutputs' greatest, and what it is at least, in the place of its lanes. Estimates of -inf
// do not count.
KVLOOM_INLINE void keep_bounds(const float* y, int panel, const OutputBounds& bounds, int row,
                               const BestOutputs<float>& kept) {
  const vf32 norm = broadcast(bounds.rows[row].norm), error = broadcast(bounds.rows[row].error);
  vf32 most = broadcast(-std::numeric_limits<float>::infinity()), least = most;
  for (int i = 0; i < kPanelOutputs; i += kLanes) {
    const int output = panel * kPanelOutputs + i;
    const vf32 distance =
        fma(error, load(bounds.errors + output), norm * load(bounds.norms + output));
    most = vmax(load(y + i) + distance, most);
    least = vmax(load(y + i) - distance, least);
  }
  kept.greatest[panel] = reduce_max(most);
  kept.lanes[panel] = reduce_max(least);
}

}  // namespace kvloom
