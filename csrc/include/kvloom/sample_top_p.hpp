// Keeping the fewest, heaviest tokens whose weights reach a share of the whole, without sorting the
// vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvloom/sample_scan.hpp"

namespace kvloom {

// So few are sorted.
constexpr int32_t kFewEnough = 256;

// Among equal weights the lower id comes first.
inline bool is_heavier(const WeightedIndex& a, const WeightedIndex& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.index < b.index);
}

// The lightest of the fewest, heaviest candidates whose weights reach `needed`. Halves the range it
// lies in, so that nothing but the last few hundred is sorted.
inline WeightedIndex find_lightest_kept(int32_t count, double needed, SampleScratch& scratch) {
  WeightedIndex* order = scratch.order.get();
  for (int32_t i = 0; i < count; ++i) order[i] = {scratch.values[i], i};
  int32_t first = 0;
  int32_t end = count;
  double mass = 0.0;  // of the candidates before `first`, which all stay
  // Most distributions reach top_p with a few tokens, so the first look is at those.
  for (int32_t middle = kFewEnough; end - first > kFewEnough; middle = first + (end - first) / 2) {
    std::nth_element(order + first, order + middle, order + end, is_heavier);
    double heavier = mass;
    for (int32_t i = first; i < middle; ++i) heavier += order[i].weight;
    if (heavier >= needed) {
      end = middle;
    } else {
      mass = heavier;
      first = middle;
    }
  }
  std::sort(order + first, order + end, is_heavier);
  while (first < end - 1 && (mass += order[first].weight) < needed) ++first;
  return order[first];
}

// Keeps the fewest, heaviest candidates whose weights reach `needed`; returns how many.
inline int32_t keep_top_p(int32_t count, double needed, SampleScratch& scratch) {
  const WeightedIndex lightest = find_lightest_kept(count, needed, scratch);
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const WeightedIndex candidate{scratch.values[i], i};
    scratch.ids[kept] = scratch.ids[i];
    scratch.values[kept] = candidate.weight;
    kept += !is_heavier(lightest, candidate);
  }
  return kept;
}

// ---- The same over all tokens, by scratch.weights ----

// Weights of at least some limit.
struct HeavyWeights {
  double mass;
  int32_t count;
};

// Of weights of at least `lightest`, which no token with a logit below `floor` has.
inline HeavyWeights sum_heavy(int32_t vocab_size, double lightest, double floor,
                              const SampleScratch& scratch) {
  vf64 mass = {};
  vi64 count = {};
  for (int32_t block = 0; block < num_sample_blocks(vocab_size); ++block) {
    if (scratch.block_maxima[block] < floor) continue;
    const double* weights = scratch.weights.get() + int64_t{block} * kSampleBlock;
    for (int i = 0; i < kSampleBlock; i += kLanes64) {
      const vf64 weight = load_f64(weights + i);
      const vi64 is_heavy = weight >= vf64{} + lightest;
      mass += is_heavy ? weight : vf64{};
      count -= is_heavy;
    }
  }
  int64_t total = 0;
  for (int lane = 0; lane < kLanes64; ++lane) total += count[lane];
  return {reduce_add_f64(mass), static_cast<int32_t>(total)};
}

// Weights within [light, heavy): among them is the lightest that stays. `above` are those that are
// heavier, which do not reach what is needed.
struct WeightBracket {
  double light;
  double heavy;
  HeavyWeights above;
  double floor;  // no token within or above the bracket has a logit below this
};

// Narrows a range of exponents until the bracket holds few tokens, or none but equals. A model is
// mostly sure, so the first look is near the best: there it skips nearly all blocks.
inline WeightBracket find_bracket(int32_t vocab_size, const Weighing& weighing, double needed,
                                  const SampleScratch& scratch) {
  constexpr int kMaxLooks = 40;  // by then what is left are equals
  constexpr double kFirstLook = 8.0;
  constexpr double kDeepest = 70.0;  // see Weighing::negligible()
  WeightBracket bracket{std::numeric_limits<double>::min(),
                        std::numeric_limits<double>::infinity(),
                        {0.0, 0},
                        kMinusInf};
  int32_t num_light = vocab_size;
  double shallow = 0.0;
  double deep = kDeepest;
  for (int i = 0; i < kMaxLooks && shallow < kDeepest; ++i) {
    if (num_light - bracket.above.count <= kFewEnough) break;
    const double middle = deep < kDeepest ? 0.5 * (shallow + deep) : shallow + kFirstLook;
    const double weight = std::exp(-middle);
    const double floor = weighing.floor_at(-middle - 1e-9);  // wide enough for rounding
    const HeavyWeights heavier = sum_heavy(vocab_size, weight, floor, scratch);
    if (heavier.mass >= needed) {
      bracket.light = weight;
      bracket.floor = floor;
      num_light = heavier.count;
      deep = middle;
    } else {
      bracket.heavy = weight;
      bracket.above = heavier;
      shallow = middle;
    }
  }
  return bracket;
}

// Tokens with weights within the bracket to scratch.ids, ascending, and scratch.values.
inline int32_t gather_bracket(int32_t vocab_size, const WeightBracket& bracket,
                              SampleScratch& scratch) {
  int32_t count = 0;
  for (int32_t block = 0; block < num_sample_blocks(vocab_size); ++block) {
    if (scratch.block_maxima[block] < bracket.floor) continue;
    const int32_t first = block * kSampleBlock;
    vi64 is_within = {};
    for (int i = 0; i < kSampleBlock; i += kLanes64) {
      const vf64 weight = load_f64(scratch.weights.get() + first + i);
      is_within |= (weight >= vf64{} + bracket.light) & (weight < vf64{} + bracket.heavy);
    }
    int64_t found = 0;
    for (int lane = 0; lane < kLanes64; ++lane) found |= is_within[lane];
    if (found == 0) continue;
    for (int32_t i = first; i < std::min(first + kSampleBlock, vocab_size); ++i) {
      const double weight = scratch.weights[i];
      scratch.ids[count] = i;
      scratch.values[count] = weight;
      count += (weight >= bracket.light) & (weight < bracket.heavy);
    }
  }
  return count;
}

// Sets weights to 0 that come after `lightest`, a token and its weight, or all of a block at once
// by its sum in scratch.block_values; returns the sum of those that stay. None of those has a logit
// below `floor`.
inline double drop_lighter(int32_t vocab_size, const WeightedIndex& lightest, double floor,
                           SampleScratch& scratch) {
  double total = 0.0;
  for (int32_t block = 0; block < num_sample_blocks(vocab_size); ++block) {
    scratch.block_values[block] = 0.0;
    if (scratch.block_maxima[block] < floor) continue;
    const int32_t first = block * kSampleBlock;
    double* weights = scratch.weights.get() + first;
    // Equals stay up to the token, and go behind it.
    for (int32_t i = std::max(first, lightest.index + 1); i < first + kSampleBlock; ++i) {
      if (weights[i - first] <= lightest.weight) weights[i - first] = 0.0;
    }
    vf64 sum = {};
    for (int i = 0; i < kSampleBlock; i += kLanes64) {
      const vf64 weight = load_f64(weights + i);
      const vf64 kept = weight >= vf64{} + lightest.weight ? weight : vf64{};
      store_f64(weights + i, kept);
      sum += kept;
    }
    scratch.block_values[block] = reduce_add_f64(sum);
    total += scratch.block_values[block];
  }
  return total;
}

// The sum of all weights, and how much of it the tokens that stay must reach.
struct MassNeeded {
  double total;
  double needed;
};

// Sets all but the fewest, heaviest of scratch.weights that reach what is needed to 0; returns the
// sum of those.
inline double drop_beyond_top_p(int32_t vocab_size, const Weighing& weighing,
                                const MassNeeded& mass, SampleScratch& scratch) {
  const WeightBracket bracket = find_bracket(vocab_size, weighing, mass.needed, scratch);
  const int32_t count = gather_bracket(vocab_size, bracket, scratch);
  if (count == 0) return mass.total;  // rounding: all that weigh anything are needed
  WeightedIndex lightest = find_lightest_kept(count, mass.needed - bracket.above.mass, scratch);
  lightest.index = scratch.ids[lightest.index];
  return drop_lighter(vocab_size, lightest, bracket.floor, scratch);
}

}  // namespace kvloom
