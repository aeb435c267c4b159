// Rows of outputs of which only the greatest is asked for: what a GEMM keeps of them, and what a
// greedy choice reads. A sixteenth of the memory is written and read again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvloom/format.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// In the memory of the row whose outputs they stand for, which has at least two. Float is float, or
// const float.
template <class Float>
struct BestOutputs {
  BestOutputs(Float* row, int num_outputs)
      : num_panels(static_cast<int>(cdiv(num_outputs, kPanelOutputs))),
        greatest(row),
        lanes(row + num_panels) {}

  int num_panels;
  Float* greatest;  // [num_panels] of each panel's outputs; NaN if one of them is
  Float* lanes;     // [num_panels] which of the panel's outputs, the first of equal ones: an int32

  // A lane of the panel, whatever the memory holds.
  int lane(int panel) const {
    int32_t lane;
    std::memcpy(&lane, lanes + panel, sizeof(lane));
    return lane & (kPanelOutputs - 1);
  }
};

// Outputs y [kPanelOutputs] of a panel to their place in a row.
KVLOOM_INLINE void keep_best(const float* y, int panel, const BestOutputs<float>& row) {
  vf32 most = load(y);
  for (int i = kLanes; i < kPanelOutputs; i += kLanes) most = vmax(load(y + i), most);
  const float greatest = reduce_max(most);
  uint32_t equal = 0, nans = 0;
  for (int i = 0; i < kPanelOutputs; i += kLanes) {
    const vf32 values = load(y + i);
    equal |= lanes_of(values == broadcast(greatest)) << i;
    nans |= lanes_of(values != values) << i;
  }
  const int32_t lane = __builtin_ctz(nans != 0 ? nans : equal);
  row.greatest[panel] = nans != 0 ? std::numeric_limits<float>::quiet_NaN() : greatest;
  std::memcpy(row.lanes + panel, &lane, sizeof(lane));
}

// The same of the last panel, of which `count` outputs are the weight's.
inline void keep_best_of(const float* y, int count, int panel, const BestOutputs<float>& row) {
  float padded[kPanelOutputs];
  std::fill(padded, padded + kPanelOutputs, -std::numeric_limits<float>::infinity());
  std::copy(y, y + count, padded);
  keep_best(padded, panel, row);
}

}  // namespace kvloom
