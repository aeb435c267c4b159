// Sampling where Python's tests cannot run: against a plain twin, on arrays that end with the row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "check.hpp"
#include "kvloom/sample.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kVocabSizes[] = {1, 31, 50, 64, 65, 333, 1000};

SampleRow default_row() {
  SampleRow row{};
  row.temperature = row.top_p = row.repetition_penalty = 1.0;
  row.num_logprobs = row.grammar_row = -1;
  return row;
}

// keep_tokens() and _draw() of the numpy sampler, with every token sorted.
int32_t draw_plainly(const std::vector<double>& logits, const SampleRow& row) {
  const double peak = *std::max_element(logits.begin(), logits.end());
  const int64_t size = static_cast<int64_t>(logits.size());
  std::vector<int32_t> best(logits.size());
  std::iota(best.begin(), best.end(), 0);
  std::stable_sort(best.begin(), best.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (row.temperature == 0.0) return best[0];
  const int64_t top_k = row.top_k > 0 && row.top_k < size ? row.top_k : size;
  const double last = logits[static_cast<size_t>(best[static_cast<size_t>(top_k - 1)])];
  std::vector<double> weights(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((logits[i] - peak) / row.temperature);
    weights[i] = logits[i] >= last && weight >= row.min_p ? weight : 0.0;
  }
  const double needed = row.top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
  double mass = 0.0;
  for (const int32_t i : best) {
    double& weight = weights[static_cast<size_t>(i)];
    if (row.top_p < 1.0 && mass >= needed) weight = 0.0;
    mass += weight;
  }
  const double point = draw_uniform(row.seed, static_cast<uint64_t>(row.output_index)) *
                       std::accumulate(weights.begin(), weights.end(), 0.0);
  mass = 0.0;
  int32_t token = 0;
  while ((mass += weights[static_cast<size_t>(token)]) <= point) ++token;
  return token;
}

SampleRow random_row(Random& random, int32_t vocab_size) {
  SampleRow row = default_row();
  row.seed = random.bits() >> 1;
  row.output_index = random.integer(0, 1000);
  if (random.integer(0, 1) == 0) row.temperature = 0.25 * static_cast<double>(random.integer(0, 8));
  if (random.integer(0, 1) == 0) row.top_k = random.integer(1, vocab_size + 3);
  if (random.integer(0, 1) == 0) row.top_p = static_cast<double>(random.integer(1, 99)) / 100.1;
  if (random.integer(0, 2) == 0) row.min_p = static_cast<double>(random.integer(1, 99)) / 100.1;
  return row;
}

KVLOOM_TEST(uniform_numbers_are_those_of_numpy) {
  CHECK(draw_uniform(0, 0) == 0x1.7a5d3204726c0p-7);
  CHECK(draw_uniform(1, 0) == 0x1.36da89edd58a0p-2);
  CHECK(draw_uniform(9223372036854775807u, 5) == 0x1.b4a373f733ee3p-1);
  CHECK(draw_uniform(12345678901234567u, uint64_t{1} << 40) == 0x1.bce6a9bf79568p-1);
}

KVLOOM_TEST(weights_are_exponentials) {
  for (double x = 0.0; x > -720.0; x -= 0.37) {
    double values[kLanes64] = {};
    values[kLanes64 - 1] = x;
    store_f64(values, exp_f64(load_f64(values)));
    CHECK(values[0] == 1.0);
    const double expected = x < -708.0 ? 0.0 : std::exp(x);
    CHECK_NEAR(values[kLanes64 - 1], expected, 4e-16 * expected);
  }
}

KVLOOM_TEST(tokens_are_those_of_the_plain_twin) {
  Random random(4);
  for (const int32_t vocab_size : kVocabSizes) {
    SampleScratch scratch(vocab_size);
    for (int trial = 0; trial < 60; ++trial) {
      std::vector<float> logits = random.reals(vocab_size);
      const float spread = trial % 3 == 0 ? 0.01f : 8.0f;
      for (float& logit : logits) {
        logit *= spread;
        if (trial % 4 == 1) logit = std::round(logit);  // ties
      }
      const SampleRow row = random_row(random, vocab_size);
      const SampledToken found = sample_row(logits.data(), vocab_size, row, SampleEdits{}, scratch);
      CHECK(found.status == SampleStatus::Ok);
      CHECK(found.token_id == draw_plainly({logits.begin(), logits.end()}, row));
    }
  }
}

KVLOOM_TEST(bias_penalties_and_masks_by_definition) {
  constexpr int32_t kVocabSize = 70;
  const std::vector<int32_t> history = {3, 3, 69, 0, 3, 5, 5};  // the prompt ends after 3 tokens
  const std::vector<int32_t> bias_ids = {69, 1};
  const std::vector<double> bias_values = {2.0, -1.5};
  const std::vector<int32_t> banned_ids = {7};
  const std::vector<uint32_t> grammar = {0xffffffffu, 0xfffffffeu, 0x3fu};
  const SampleEdits edits{history.data(),    bias_ids.data(), bias_values.data(),
                          banned_ids.data(), grammar.data(),  3};
  SampleRow row = default_row();
  row.repetition_penalty = 2.0;
  row.frequency_penalty = 0.25;
  row.presence_penalty = 0.5;
  row.prompt = {0, 3};
  row.output = {3, 4};
  row.bias = {0, 2};
  row.banned = {0, 1};
  row.grammar_row = 0;
  const std::vector<float> logits(kVocabSize, 1.0f);
  SampleScratch scratch(kVocabSize);
  for (int repeat = 0; repeat < 2; ++repeat) {  // the counts must be clean again
    adjust_logits(logits.data(), kVocabSize, row, edits, scratch);
    for (int32_t i = 0; i < kVocabSize; ++i) {
      double expected = 1.0;
      if (i == 0 || i == 3) expected = 0.5 - 0.25 - 0.5;
      if (i == 5) expected = 0.5 - 2 * 0.25 - 0.5;
      if (i == 69) expected = 3.0 / 2.0;
      if (i == 1) expected = -0.5;
      if (i == 7 || i == 32) expected = kMinusInf;
      CHECK(scratch.logits[i] == expected);
    }
  }
}

KVLOOM_TEST(rows_without_a_token_say_why) {
  for (const int32_t vocab_size : kVocabSizes) {
    SampleScratch scratch(vocab_size);
    const std::vector<int32_t> all_ids = [&] {
      std::vector<int32_t> ids(static_cast<size_t>(vocab_size));
      std::iota(ids.begin(), ids.end(), 0);
      return ids;
    }();
    SampleEdits edits{};
    edits.banned_ids = all_ids.data();
    SampleRow row = default_row();
    std::vector<float> logits(static_cast<size_t>(vocab_size), -kInfinity);
    const auto status = [&] {
      return sample_row(logits.data(), vocab_size, row, edits, scratch).status;
    };
    CHECK(status() == SampleStatus::OnlyMinusInf);
    logits.back() = 0.0f;
    CHECK(status() == SampleStatus::Ok);
    row.banned = {0, vocab_size};
    CHECK(status() == SampleStatus::NoTokenLeft);
    logits.back() = kInfinity;
    CHECK(status() == SampleStatus::PlusInf);
    logits.back() = std::numeric_limits<float>::quiet_NaN();
    CHECK(status() == SampleStatus::Nan);
  }
}

// The best of each panel, for a vocabulary of whole panels or less than one.
std::vector<float> kept_of(const std::vector<float>& logits) {
  std::vector<float> kept(logits.size());
  const int32_t vocab_size = static_cast<int32_t>(logits.size());
  const BestOutputs<float> best(kept.data(), vocab_size);
  for (int panel = 0; panel < best.num_panels; ++panel) {
    const float* y = logits.data() + panel * kPanelOutputs;
    keep_best_of(y, std::min(kPanelOutputs, vocab_size - panel * kPanelOutputs), panel, best);
  }
  return kept;
}

KVLOOM_TEST(the_best_of_panels_is_the_greedy_token) {
  Random random(9);
  SampleRow row = default_row();
  row.temperature = 0.0;
  for (const int32_t vocab_size : kVocabSizes) {
    if (vocab_size == 1) continue;
    SampleScratch scratch(vocab_size);
    std::vector<float> logits = random.reals(vocab_size);
    const auto check = [&] {
      const SampledToken expected = sample_row(logits.data(), vocab_size, row, {}, scratch);
      const SampledToken found = best_token(kept_of(logits).data(), vocab_size, scratch);
      CHECK(found.status == expected.status && found.token_id == expected.token_id);
    };
    check();
    for (float& logit : logits) logit = std::round(logit);
    check();
    for (const float bad : {-kInfinity, kInfinity, std::nanf("")}) {
      logits[static_cast<size_t>(vocab_size / 2)] = bad;
      check();
    }
    std::fill(logits.begin(), logits.end(), -kInfinity);
    check();
  }
}

KVLOOM_TEST(log_probabilities_by_definition) {
  Random random(5);
  for (const int32_t vocab_size : kVocabSizes) {
    const std::vector<float> logits = random.reals(vocab_size);
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(double{logit});
    double logprob;
    int32_t rank;
    int32_t top_ids[4];
    double top_logprobs[4];
    SampleScratch scratch(vocab_size);
    const int32_t token = vocab_size / 2;
    score_token(logits.data(), vocab_size, {token, 4, 0},
                {&logprob, &rank, top_ids, top_logprobs, 4}, scratch);
    CHECK_NEAR(logprob, logits[static_cast<size_t>(token)] - std::log(sum), 1e-12);
    std::vector<float> sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    CHECK(sorted[static_cast<size_t>(rank - 1)] == logits[static_cast<size_t>(token)]);
    for (size_t i = 0; i < std::min<size_t>(4, sorted.size()); ++i) {
      CHECK(logits[static_cast<size_t>(top_ids[i])] == sorted[i]);
      CHECK_NEAR(top_logprobs[i], sorted[i] - std::log(sum), 1e-12);
    }
  }
}

}  // namespace
}  // namespace kvloom
