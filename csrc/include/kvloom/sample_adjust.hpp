// What a request's parameters do to its logits before the draw, in float64 as the definition in
// src/kvloom/sampling/logits.py does it: bias, penalties, and masks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvloom/sample_row.hpp"
#include "kvloom/sample_scan.hpp"

namespace kvloom {

inline bool has_penalties(const SampleRow& row) {
  return row.repetition_penalty != 1.0 || row.frequency_penalty != 0.0 ||
         row.presence_penalty != 0.0;
}

inline bool has_adjustments(const SampleRow& row) {
  return row.bias.count > 0 || row.banned.count > 0 || row.grammar_row >= 0 || has_penalties(row);
}

// Adds `amount` to the count of each token of `span`, noting the tokens it meets first.
inline void count_tokens(const int32_t* history, SampleSpan span, int32_t amount,
                         SampleScratch& scratch, int32_t& num_seen) {
  for (int64_t i = span.start; i < span.start + span.count; ++i) {
    const int32_t token = history[i];
    if (scratch.counts[token] == 0) {
      scratch.seen[num_seen++] = token;
      scratch.counts[token] = 1;  // seen; occurrences in the output are counted above this
    }
    scratch.counts[token] += amount;
  }
}

inline void penalise(const SampleRow& row, const int32_t* history, SampleScratch& scratch) {
  int32_t num_seen = 0;
  if (row.repetition_penalty != 1.0) count_tokens(history, row.prompt, 0, scratch, num_seen);
  count_tokens(history, row.output, 1, scratch, num_seen);
  for (int32_t i = 0; i < num_seen; ++i) {
    const int32_t token = scratch.seen[i];
    double& logit = scratch.logits[token];
    if (row.repetition_penalty != 1.0) {
      logit = logit > 0.0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    }
    const int32_t num_generated = scratch.counts[token] - 1;
    if (num_generated > 0) {
      logit -= row.frequency_penalty * num_generated + row.presence_penalty;
    }
    scratch.counts[token] = 0;
  }
}

// Bit i % 32 of word i / 32 allows token i.
inline void mask_by_grammar(const uint32_t* words, int32_t vocab_size, double* logits) {
  for (int32_t first = 0; first < vocab_size; first += 32) {
    const uint32_t word = words[first / 32];
    if (word == 0xffffffffu) continue;
    const int32_t size = std::min(32, vocab_size - first);
    for (int32_t bit = 0; bit < size; ++bit) {
      if (((word >> bit) & 1) == 0) logits[first + bit] = kMinusInf;
    }
  }
}

// Writes the adjusted logits of one row to scratch.logits; a token that is banned has -inf.
inline void adjust_logits(const float* logits, int32_t vocab_size, const SampleRow& row,
                          const SampleEdits& edits, SampleScratch& scratch) {
  std::copy(logits, logits + vocab_size, scratch.logits.get());
  for (int64_t i = row.bias.start; i < row.bias.start + row.bias.count; ++i) {
    scratch.logits[edits.bias_ids[i]] += edits.bias_values[i];
  }
  if (has_penalties(row)) penalise(row, edits.history, scratch);
  // What is at -inf stays there, so the masks may come last.
  for (int64_t i = row.banned.start; i < row.banned.start + row.banned.count; ++i) {
    scratch.logits[edits.banned_ids[i]] = kMinusInf;
  }
  if (row.grammar_row >= 0) {
    mask_by_grammar(edits.grammar + row.grammar_row * edits.grammar_stride, vocab_size,
                    scratch.logits.get());
  }
}

}  // namespace kvloom
