// How tokens choose experts, and the order in which experts meet their tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvloom/types.hpp"

namespace kvloom {

enum class RouteScore { Softmax, SoftmaxOfChosen, Sigmoid };
enum class GroupScore { Max, SumOfTwo };

// As `Routing` of ops/base.py, over num_experts logits.
struct Routing {
  int num_experts = 0;
  int num_choices = 0;
  RouteScore score = RouteScore::Softmax;
  bool is_normalised = false;
  float factor = 1.0f;
  int num_groups = 1;
  int num_chosen_groups = 1;
  GroupScore group_score = GroupScore::Max;
};

// What route_row needs besides, in floats.
constexpr size_t route_scratch_floats(const Routing& routing) {
  return static_cast<size_t>(2 * routing.num_experts + 2 * routing.num_groups);
}

inline void softmax(const float* x, int size, float* out) {
  float largest = x[0];
  for (int i = 1; i < size; ++i) largest = std::max(largest, x[i]);
  float total = 0.0f;
  for (int i = 0; i < size; ++i) total += out[i] = std::exp(x[i] - largest);
  for (int i = 0; i < size; ++i) out[i] /= total;
}

// Takes the largest value away, the first of equals: it becomes NaN, which is never taken. Returns
// its index; `size` if there is none.
inline int take_largest(float* x, int size) {
  int best = size;
  for (int i = 0; i < size; ++i) {
    if (x[i] == x[i] && (best == size || x[i] > x[best])) best = i;
  }
  if (best < size) x[best] = std::numeric_limits<float>::quiet_NaN();
  return best;
}

inline float group_merit(const float* merits, int size, GroupScore score) {
  float first = -std::numeric_limits<float>::infinity(), second = first;
  for (int i = 0; i < size; ++i) {
    second = std::max(second, std::min(first, merits[i]));
    first = std::max(first, merits[i]);
  }
  return score == GroupScore::Max ? first : first + second;
}

// Experts outside the best groups get the merit -inf: they come after all others.
inline void keep_best_groups(const Routing& routing, float* merits, float* groups) {
  const int size = routing.num_experts / routing.num_groups;
  float* is_kept = groups + routing.num_groups;
  for (int g = 0; g < routing.num_groups; ++g) {
    groups[g] = group_merit(merits + g * size, size, routing.group_score);
    is_kept[g] = 0.0f;
  }
  for (int i = 0; i < routing.num_chosen_groups; ++i) {
    const int best = take_largest(groups, routing.num_groups);
    if (best < routing.num_groups) is_kept[best] = 1.0f;
  }
  for (int e = 0; e < routing.num_experts; ++e) {
    if (is_kept[e / size] == 0.0f) merits[e] = -std::numeric_limits<float>::infinity();
  }
}

inline void finish_weights(const Routing& routing, float* weights) {
  const int count = routing.num_choices;
  if (routing.score == RouteScore::SoftmaxOfChosen) softmax(weights, count, weights);
  float divisor = 1.0f;
  if (routing.is_normalised) {
    divisor = routing.score == RouteScore::Sigmoid ? 1e-20f : 0.0f;
    float total = 0.0f;
    for (int i = 0; i < count; ++i) total += weights[i];
    divisor += total;
  }
  for (int i = 0; i < count; ++i) weights[i] = weights[i] / divisor * routing.factor;
}

// Logits of one token -> out [2 x num_choices]: ids of its experts, the best first, then their
// weights. `bias` [num_experts] helps to choose, or is null. A NaN comes last; ids are different
// ones in any case.
inline void route_row(const Routing& routing, const float* logits, const float* bias,
                      float* scratch, float* out) {
  float* scores = scratch;
  float* merits = scores + routing.num_experts;
  const int size = routing.num_experts;
  if (routing.score == RouteScore::Softmax) {
    softmax(logits, size, scores);
  } else if (routing.score == RouteScore::Sigmoid) {
    for (int e = 0; e < size; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  } else {
    std::copy(logits, logits + size, scores);
  }
  for (int e = 0; e < size; ++e) {
    const float merit = bias == nullptr ? scores[e] : scores[e] + bias[e];
    merits[e] = merit == merit ? merit : -std::numeric_limits<float>::infinity();
  }
  if (routing.num_groups > 1) keep_best_groups(routing, merits, merits + size);
  for (int i = 0; i < routing.num_choices; ++i) {
    const int expert = take_largest(merits, size);
    out[i] = static_cast<float>(expert);
    out[routing.num_choices + i] = scores[expert];
  }
  finish_weights(routing, out + routing.num_choices);
}

// What is no id counts as expert 0, so that no number can lead outside the experts.
constexpr int expert_id(float id, int num_experts) {
  return id >= 0.0f && id < static_cast<float>(num_experts) ? static_cast<int>(id) : 0;
}

// The tokens of each expert, side by side. A place is where one choice of one token lies in that
// order: experts in the order of their ids, tokens of an expert in that of the batch.
class ExpertOrder {
 public:
  ExpertOrder(int num_experts, int num_choices, int max_num_rows)
      : num_experts_(num_experts),
        num_choices_(num_choices),
        max_num_rows_(max_num_rows),
        starts_(static_cast<size_t>(num_experts) + 1),
        chosen_(static_cast<size_t>(num_experts)),
        place_of_(static_cast<size_t>(max_num_rows) * static_cast<size_t>(num_choices)),
        choice_at_(place_of_.size()) {}

  int num_experts() const { return num_experts_; }
  int num_choices() const { return num_choices_; }
  int max_num_rows() const { return max_num_rows_; }

  // Bytes that the constructor allocates.
  static size_t num_bytes(int num_experts, int num_choices, int max_num_rows) {
    return sizeof(int32_t) *
           (2 * static_cast<size_t>(num_experts) + 1 +
            2 * static_cast<size_t>(max_num_rows) * static_cast<size_t>(num_choices));
  }

  // From routes [num_rows, 2 x num_choices].
  void sort(const float* routes, int num_rows) {
    std::fill(starts_.begin(), starts_.end(), 0);
    for_each_choice(routes, num_rows, [&](int, int expert) { ++starts_[expert + 1]; });
    num_chosen_ = 0;
    for (int e = 0; e < num_experts_; ++e) {
      if (starts_[e + 1] > 0) chosen_[num_chosen_++] = e;
      starts_[e + 1] += starts_[e];
    }
    // starts_[e] walks through e's places, then stands where e + 1 begins.
    for_each_choice(routes, num_rows, [&](int choice, int expert) {
      const int place = starts_[expert]++;
      place_of_[choice] = place;
      choice_at_[place] = choice;
    });
    for (int e = num_experts_; e > 0; --e) starts_[e] = starts_[e - 1];
    starts_[0] = 0;
  }

  int num_chosen() const { return num_chosen_; }
  int chosen(int index) const { return chosen_[index]; }
  int first_place(int expert) const { return starts_[expert]; }
  int count(int expert) const { return starts_[expert + 1] - starts_[expert]; }

  // Choice c of row r is number r x num_choices + c.
  int place_of(int choice) const { return place_of_[choice]; }
  int choice_at(int place) const { return choice_at_[place]; }

  int expert_at(int place) const {
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), place);
    return static_cast<int>(next - starts_.begin()) - 1;
  }

 private:
  template <class Function>
  void for_each_choice(const float* routes, int num_rows, Function function) const {
    for (int row = 0; row < num_rows; ++row) {
      const float* ids = routes + size_t{2} * static_cast<size_t>(row * num_choices_);
      for (int i = 0; i < num_choices_; ++i) {
        function(row * num_choices_ + i, expert_id(ids[i], num_experts_));
      }
    }
  }

  int num_experts_, num_choices_, max_num_rows_;
  int num_chosen_ = 0;
  std::vector<int32_t> starts_;     // [num_experts + 1]
  std::vector<int32_t> chosen_;     // [num_experts] ids of the experts that have tokens
  std::vector<int32_t> place_of_;   // by choice
  std::vector<int32_t> choice_at_;  // by place
};

}  // namespace kvloom
