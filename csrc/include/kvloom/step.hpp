// What one forward pass works on. Plain views; whoever makes a Step has checked every number in it.
#pragma once

#include <cstdint>
#include <vector>

namespace kvloom {

// Where the tokens of a step live in one KV cache group.
struct KVGroupStep {
  const int32_t* block_table = nullptr;  // [num_requests, table_width] block ids
  int table_width = 0;
  const int64_t* slots = nullptr;  // [num_tokens]; -1 stores nothing
  int block_size = 0;              // tokens
  // [num_requests] the block of the text that a row of the table begins with; none: the first
  const int32_t* first_columns = nullptr;
};

// Tokens that the step before samples: token `place` of the batch is sampled_ids[row].
struct LateTokens {
  struct Token {
    int32_t place, row;
  };
  std::vector<Token> tokens;
  const int32_t* sampled_ids = nullptr;
};

// A flat batch of tokens, those of one request after those of another, then tokens of none, which
// fill the batch up.
struct Step {
  int num_tokens = 0;
  int num_rows = 0;  // of logits
  int num_requests = 0;
  int32_t* token_ids = nullptr;          // [num_tokens]
  const int64_t* positions = nullptr;    // [num_tokens]
  const int32_t* logits_rows = nullptr;  // [num_rows] tokens whose logits are wanted
  const int32_t* query_start = nullptr;  // [num_requests + 1] first token of each request
  const int32_t* seq_lens = nullptr;     // [num_requests] stored tokens, this step's included
  std::vector<KVGroupStep> groups;
  LateTokens late;
  bool wants_best_only = false;  // of each row of logits: the head may keep BestOutputs
};

// Once the step before has been sampled.
inline void fill_in_late_tokens(const Step& step) {
  for (const LateTokens::Token& token : step.late.tokens) {
    step.token_ids[token.place] = step.late.sampled_ids[token.row];
  }
}

// Which of a step's counts the rows of a value follow.
enum class RowCount { Tokens, Logits };

inline int num_rows_of(const Step& step, RowCount rows) {
  return rows == RowCount::Tokens ? step.num_tokens : step.num_rows;
}

}  // namespace kvloom
