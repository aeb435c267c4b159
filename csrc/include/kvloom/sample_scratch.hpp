// What one thread needs to sample or score a row of logits. Nothing is allocated while sampling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvloom/types.hpp"

namespace kvloom {

// Logits are scanned in blocks whose maxima tell which ones a second look can skip.
constexpr int kSampleBlock = 64;

constexpr int32_t num_sample_blocks(int32_t vocab_size) {
  return static_cast<int32_t>(cdiv(vocab_size, kSampleBlock));
}

// A token that may be drawn, and its weight; used where candidates are put in order.
struct WeightedIndex {
  double weight;
  int32_t index;
};

// Arrays for rows of up to `vocab_size` logits. Memory that is not written is never touched, so
// that a step that is greedy throughout costs a few kilobytes per thread.
class SampleScratch {
 public:
  explicit SampleScratch(int32_t vocab_size)
      : vocab_size(vocab_size),
        num_blocks(num_sample_blocks(vocab_size)),
        block_maxima(new double[num_blocks]),
        block_values(new double[num_blocks]),
        logits(new double[padded(vocab_size)]),
        weights(new double[padded(vocab_size)]),
        counts(new int32_t[vocab_size]()),
        seen(new int32_t[vocab_size]),
        ids(new int32_t[padded(vocab_size)]),
        values(new double[padded(vocab_size)]),
        order(new WeightedIndex[vocab_size]) {}

  // Bytes that one scratch allocates.
  static constexpr size_t num_bytes(int32_t vocab_size) {
    const size_t blocks = static_cast<size_t>(num_sample_blocks(vocab_size));
    const size_t size = static_cast<size_t>(vocab_size);
    return 2 * blocks * sizeof(double) + 3 * padded(vocab_size) * sizeof(double) +
           2 * size * sizeof(int32_t) + padded(vocab_size) * sizeof(int32_t) +
           size * sizeof(WeightedIndex);
  }

  const int32_t vocab_size;
  const int32_t num_blocks;
  const std::unique_ptr<double[]> block_maxima;  // [num_blocks]
  const std::unique_ptr<double[]> block_values;  // [num_blocks] maxima to select from; sums
  const std::unique_ptr<double[]> logits;        // [vocab_size] of a row with penalties or masks
  const std::unique_ptr<double[]> weights;       // [vocab_size] of all tokens
  const std::unique_ptr<int32_t[]> counts;       // [vocab_size]; all 0 between rows
  const std::unique_ptr<int32_t[]> seen;         // tokens that counts are not 0 for
  const std::unique_ptr<int32_t[]> ids;          // candidates, ascending
  const std::unique_ptr<double[]> values;  // what they are compared by: logits, exponents, weights
  const std::unique_ptr<WeightedIndex[]> order;  // the same where they are put in order

 private:
  // Loops over candidates run in whole blocks.
  static constexpr size_t padded(int32_t vocab_size) {
    return static_cast<size_t>(round_up(vocab_size, kSampleBlock));
  }
};

}  // namespace kvloom
