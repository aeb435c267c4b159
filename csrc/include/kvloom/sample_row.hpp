// What a row of logits is sampled by.
#pragma once

#include <cstdint>

namespace kvloom {

// A part of one of SampleEdits' arrays.
struct SampleSpan {
  int64_t start;
  int64_t count;
};

// One row's request. All fields have 8 bytes: Python fills an array of these as a numpy record.
struct SampleRow {
  double temperature;  // 0 takes the most likely token
  double top_p;        // within (0, 1]; 1 keeps all
  double min_p;        // within [0, 1]; 0 keeps all
  double repetition_penalty;
  double frequency_penalty;
  double presence_penalty;
  uint64_t seed;
  int64_t top_k;         // 0 keeps all
  int64_t num_logprobs;  // -1: no log-probabilities; otherwise the number of best tokens to report
  int64_t output_index;  // number of tokens generated before this one
  SampleSpan prompt;     // in history; read only if the repetition penalty is on
  SampleSpan output;     // in history; read only if a penalty is on
  SampleSpan bias;       // in bias_ids and bias_values
  SampleSpan banned;     // in banned_ids: last tokens of bad words, and the stops of min_tokens
  int64_t grammar_row;   // row of grammar, or -1
};

// Arrays that the spans of all rows point into.
struct SampleEdits {
  const int32_t* history;   // token ids
  const int32_t* bias_ids;  // no id twice in a row's span
  const double* bias_values;
  const int32_t* banned_ids;
  const uint32_t* grammar;  // [*, grammar_stride]: bit i % 32 of word i / 32 allows token i
  int64_t grammar_stride;   // words
};

}  // namespace kvloom
