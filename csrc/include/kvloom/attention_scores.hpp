// What rows make of their scores of one split: a greatest score, and weights.
//
// Several vectors or rows are beside each other in the loops, since each result of a chain of
// maxima or sums waits for the one before.
#pragma once

#include <algorithm>
#include <limits>

#include "kvloom/attention_plan.hpp"
#include "kvloom/softmax_state.hpp"
#include "kvloom/tanh.hpp"

namespace kvloom {

constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// Scores become soft_cap * tanh(score / soft_cap).
inline void cap_scores(float* scores, KeyRange range, float soft_cap) {
  const vf32 cap = broadcast(soft_cap);
  for (int i = range.first; i < range.end; i += kLanes) {
    store(scores + i, cap * tanh(load(scores + i) / cap));
  }
}

// The vector of scores from key i on, those of unseen keys overwritten.
KVLOOM_INLINE vf32 hide_unseen(float* scores, int i, KeyRange seen) {
  const vf32 x = load(scores + i);
  if (i >= seen.first && i + kLanes <= seen.end) return x;
  const vi32 is_seen = first_lanes(seen.end - i) & ~first_lanes(seen.first - i);
  const vf32 masked = is_seen ? x : broadcast(kUnseen);
  store(scores + i, masked);
  return masked;
}

// Overwrites the scores of unseen keys; returns the greatest score, kUnseen if no key is seen.
// Scores are those of keys [range.first, range.end) of the split, of which a row sees `seen`.
inline float mask_scores(float* scores, KeyRange range, KeyRange seen) {
  constexpr int kVectors = 4;
  vf32 greatest[kVectors];
  for (int v = 0; v < kVectors; ++v) greatest[v] = broadcast(kUnseen);
  int i = range.first;
  for (; i < std::min(seen.first, range.end); i += kLanes) {
    greatest[0] = vmax(greatest[0], hide_unseen(scores, i, seen));
  }
  const int all_seen = std::min(seen.end, range.end) - kVectors * kLanes;
  for (; i <= all_seen; i += kVectors * kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      greatest[v] = vmax(greatest[v], load(scores + i + v * kLanes));
    }
  }
  for (; i < range.end; i += kLanes) {
    greatest[0] = vmax(greatest[0], hide_unseen(scores, i, seen));
  }
  return reduce_max(vmax(vmax(greatest[0], greatest[1]), vmax(greatest[2], greatest[3])));
}

// Rows of scores and what they become: weights 2^(score - max), 0 for unseen keys, and their sums.
struct WeightRows {
  float* scores;      // [rows][kSplitKeys]; overwritten, but for bf16
  uint16_t* rounded;  // [rows][kSplitKeys]: bf16 weights
  const float* max;   // [rows]
  float* sum;         // [rows]
};

template <bool kIsBf16, int kRows>
void weigh_rows(const WeightRows& rows, int first, KeyRange range) {
  vf32 base[kRows], total[kRows];
  for (int r = 0; r < kRows; ++r) {
    const float max = rows.max[first + r];
    base[r] = broadcast(max == kUnseen ? 0.0f : max);
    total[r] = vf32{};
  }
  float* scores = rows.scores + first * kSplitKeys;
  uint16_t* rounded = rows.rounded + first * kSplitKeys;
  for (int i = range.first; i < range.end; i += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const vf32 x = load(scores + r * kSplitKeys + i) - base[r];
      const vf32 weight = kIsBf16 ? rough_exp2(x) : exp2(x);
      total[r] = total[r] + weight;
      if (kIsBf16) {
        store_bf16(rounded + r * kSplitKeys + i, weight);
      } else {
        store(scores + r * kSplitKeys + i, weight);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) rows.sum[first + r] = reduce_add(total[r]);
}

template <bool kIsBf16>
void weigh_scores(const WeightRows& rows, int num_rows, KeyRange range) {
  for (int first = 0; first < num_rows; first += 4) {
    switch (num_rows - first) {
      case 1:
        weigh_rows<kIsBf16, 1>(rows, first, range);
        break;
      case 2:
        weigh_rows<kIsBf16, 2>(rows, first, range);
        break;
      case 3:
        weigh_rows<kIsBf16, 3>(rows, first, range);
        break;
      default:
        weigh_rows<kIsBf16, 4>(rows, first, range);
    }
  }
}

}  // namespace kvloom
