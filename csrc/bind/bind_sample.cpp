// Sampling and scoring of rows of logits. Everything that comes from Python is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "kvloom/sample.hpp"
#include "kvloom/thread_team.hpp"

namespace nb = nanobind;

namespace kvloom {
namespace {

template <class T, size_t kDims>
using In = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <class T, size_t kDims>
using Out = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
// Logits may be rows of something wider, such as padded rows in the arena of a program.
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

// Rows of logits, or what a program keeps of them if a step wants their best only.
struct KeptLogits {
  Logits rows;
  bool are_best_only;
};

constexpr int64_t kMaxVocabSize = 1 << 24;

void check(bool is_right, const char* message) {
  if (!is_right) throw nb::value_error(message);
}

void check_ids(const int32_t* ids, int64_t count, int32_t vocab_size) {
  bool are_right = true;
  for (int64_t i = 0; i < count; ++i) are_right &= ids[i] >= 0 && ids[i] < vocab_size;
  check(are_right, "a token id is outside the vocabulary");
}

template <class T>
std::vector<T> copy(const In<T, 1>& array) {
  return {array.data(), array.data() + array.shape(0)};
}

// The arrays that rows of a step point into; copies of ids, so that they stay as they were checked.
struct Edits {
  Edits(const In<int32_t, 1>& history, const In<int32_t, 1>& bias_ids,
        const In<double, 1>& bias_values, const In<int32_t, 1>& banned_ids,
        std::optional<In<uint32_t, 2>> grammar)
      : history(copy(history)),
        bias_ids(copy(bias_ids)),
        bias_values(copy(bias_values)),
        banned_ids(copy(banned_ids)),
        grammar(std::move(grammar)) {}

  std::vector<int32_t> history, bias_ids;
  std::vector<double> bias_values;
  std::vector<int32_t> banned_ids;
  std::optional<In<uint32_t, 2>> grammar;

  static void check_span(const SampleSpan& span, const std::vector<int32_t>& ids,
                         int32_t vocab_size) {
    const int64_t size = static_cast<int64_t>(ids.size());
    check(
        span.start >= 0 && span.count >= 0 && span.start <= size && span.count <= size - span.start,
        "a span is outside its array");
    check_ids(ids.data() + span.start, span.count, vocab_size);
  }

  void check_row(const SampleRow& row, int32_t vocab_size) const {
    check(bias_ids.size() == bias_values.size(), "bias_ids and bias_values differ in length");
    check_span(row.bias, bias_ids, vocab_size);
    check_span(row.banned, banned_ids, vocab_size);
    if (has_penalties(row)) {
      check_span(row.prompt, history, vocab_size);
      check_span(row.output, history, vocab_size);
    }
    for (int64_t i = 0; i < row.bias.count; ++i) {
      check(std::isfinite(bias_values[static_cast<size_t>(row.bias.start + i)]),
            "a bias is not finite");
    }
    const int64_t num_grammar_rows = grammar ? static_cast<int64_t>(grammar->shape(0)) : 0;
    check(row.grammar_row >= -1 && row.grammar_row < num_grammar_rows,
          "a grammar row is outside its array");
    check(!grammar || static_cast<int64_t>(grammar->shape(1)) >= cdiv(vocab_size, 32),
          "a grammar row has fewer bits than the vocabulary has tokens");
  }

  SampleEdits pointers() const {
    return {history.data(),
            bias_ids.data(),
            bias_values.data(),
            banned_ids.data(),
            grammar ? grammar->data() : nullptr,
            grammar ? static_cast<int64_t>(grammar->shape(1)) : 0};
  }
};

// Where log-probabilities go.
struct Scores {
  Out<double, 1> logprobs;
  Out<int32_t, 1> ranks;
  Out<int32_t, 2> top_ids;
  Out<double, 2> top_logprobs;

  void check_shapes(size_t num_rows) const {
    check(logprobs.shape(0) == num_rows && ranks.shape(0) == num_rows &&
              top_ids.shape(0) == num_rows && top_logprobs.shape(0) == num_rows &&
              top_ids.shape(1) == top_logprobs.shape(1),
          "arrays of scores do not have one row per row of logits");
  }

  ScoreOutput pointers() const {
    return {logprobs.data(), ranks.data(), top_ids.data(), top_logprobs.data(),
            static_cast<int64_t>(top_ids.shape(1))};
  }
};

bool is_within(double value, double low, double high) { return value >= low && value <= high; }

// A NaN is within nothing.
void check_numbers(const SampleRow& row) {
  constexpr double kMost = 1e6;
  check(is_within(row.temperature, 0.0, kMost), "temperature must be within [0, 1e6]");
  check(row.top_p > 0.0 && row.top_p <= 1.0, "top_p must be within (0, 1]");
  check(is_within(row.min_p, 0.0, 1.0), "min_p must be within [0, 1]");
  check(row.repetition_penalty > 0.0 && row.repetition_penalty <= kMost,
        "repetition_penalty must be above 0");
  check(is_within(row.frequency_penalty, -kMost, kMost) &&
            is_within(row.presence_penalty, -kMost, kMost),
        "penalties must be finite");
  check(row.top_k >= 0, "top_k must not be negative");
  check(row.output_index >= 0, "output_index must not be negative");
}

// The rows of a step, copied so that nobody changes them after they were checked.
std::vector<SampleRow> copy_rows(const In<uint8_t, 2>& records) {
  check(records.shape(1) == sizeof(SampleRow), "a record does not have the bytes of a row");
  std::vector<SampleRow> rows(records.shape(0));
  if (!rows.empty()) std::memcpy(rows.data(), records.data(), records.nbytes());
  return rows;
}

// Chooses and scores tokens on a team of threads.
class TokenSampler {
 public:
  TokenSampler(ThreadTeam& team, int64_t vocab_size) : team_(team) {
    check(vocab_size > 0 && vocab_size <= kMaxVocabSize, "vocab_size must be within [1, 2**24]");
    vocab_size_ = static_cast<int32_t>(vocab_size);
    for (int i = 0; i <= team.num_threads(); ++i) {
      scratch_.push_back(std::make_unique<SampleScratch>(vocab_size_));
    }
  }
  ~TokenSampler() { team_.finish(); }
  TokenSampler(const TokenSampler&) = delete;
  TokenSampler& operator=(const TokenSampler&) = delete;

  size_t scratch_bytes() const { return scratch_.size() * SampleScratch::num_bytes(vocab_size_); }

  // chosen [2, num_rows] gets token ids, then statuses.
  void sample(const Logits& logits, const In<uint8_t, 2>& records, const Out<int32_t, 2>& chosen,
              const Edits& edits, const Scores& scores, bool are_best_only) {
    const std::vector<SampleRow> rows = copy_rows(records);
    const SampleArgs args = checked_args({logits, are_best_only}, rows, chosen, edits, scores);
    run(sample_num_items(args),
        [&](int64_t item, SampleScratch& scratch) { sample_run_item(args, item, scratch); });
  }

  // sample(), behind what the team has begun: it may be called before the logits are there.
  // Returns at once; finish() waits for it, and lets go of the arrays. One that nobody finished is
  // finished first.
  void start(const Logits& logits, const In<uint8_t, 2>& records, const Out<int32_t, 2>& chosen,
             const Edits& edits, const Scores& scores, bool are_best_only) {
    finish();
    auto next =
        std::make_unique<Started>(Started{this, {logits, are_best_only}, chosen, edits, scores});
    next->rows = copy_rows(records);
    // Of what it holds itself: the caller may drop his.
    next->args = checked_args(next->logits, next->rows, next->chosen, next->edits, next->scores);
    next->ticket = team_.begin(*next);
    started_ = std::move(next);
  }

  // Nothing happens if nothing was started, or if it has been finished.
  void finish() {
    if (started_ == nullptr) return;
    const uint32_t ticket = started_->ticket;
    {
      nb::gil_scoped_release release;
      team_.finish(ticket);
    }
    // Another thread may have done the same, and started the next.
    if (started_ != nullptr && started_->ticket == ticket) started_.reset();
  }

  // Row i of logits scores token_ids[i], with its num_top[i] best tokens.
  void score(const Logits& logits, const In<int32_t, 1>& token_ids, const In<int32_t, 1>& num_top,
             const Scores& scores) {
    const size_t num_rows = token_ids.shape(0);
    check_logits(logits, num_rows);
    check(num_top.shape(0) == num_rows, "num_top and token_ids differ in length");
    scores.check_shapes(num_rows);
    check_ids(token_ids.data(), static_cast<int64_t>(num_rows), vocab_size_);
    for (size_t i = 0; i < num_rows; ++i) {
      check(num_top.data()[i] >= 0 &&
                num_top.data()[i] <= static_cast<int64_t>(scores.top_ids.shape(1)),
            "num_top is more than top_ids has room for");
    }
    TokenScoreArgs args{};
    args.logits = logits.data();
    args.logits_stride = logits.stride(0);
    args.vocab_size = vocab_size_;
    args.num_rows = static_cast<int64_t>(num_rows);
    args.token_ids = token_ids.data();
    args.num_top = num_top.data();
    args.scores = scores.pointers();
    run(score_num_items(args),
        [&](int64_t item, SampleScratch& scratch) { score_run_item(args, item, scratch); });
  }

 private:
  // A call that has not been finished; holds what it reads and writes.
  struct Started {
    void operator()(int thread) const noexcept {
      owner->team_.for_each_item(thread, sample_num_items(args), [&](int64_t item) {
        sample_run_item(args, item, *owner->scratch_[static_cast<size_t>(thread)]);
      });
    }
    TokenSampler* owner;
    KeptLogits logits;
    Out<int32_t, 2> chosen;
    Edits edits;
    Scores scores;
    std::vector<SampleRow> rows = {};
    SampleArgs args = {};
    uint32_t ticket = 0;
  };

  SampleArgs checked_args(const KeptLogits& kept, const std::vector<SampleRow>& rows,
                          const Out<int32_t, 2>& chosen, const Edits& edits,
                          const Scores& scores) const {
    const Logits& logits = kept.rows;
    check_logits(logits, rows.size());
    check(chosen.shape(0) == 2 && chosen.shape(1) == rows.size(), "chosen must be [2, num_rows]");
    bool has_scores = false;
    for (const SampleRow& row : rows) {
      check_numbers(row);
      edits.check_row(row, vocab_size_);
      check(row.num_logprobs >= -1 &&
                row.num_logprobs <= static_cast<int64_t>(scores.top_ids.shape(1)),
            "num_logprobs is more than top_ids has room for");
      has_scores |= row.num_logprobs >= 0;
      check(!kept.are_best_only || (wants_best_only(row) && vocab_size_ > 1),
            "a row asks for more than its best logit, and only that was kept");
    }
    if (has_scores) scores.check_shapes(rows.size());
    SampleArgs args{};
    args.logits = logits.data();
    args.logits_stride = logits.stride(0);
    args.vocab_size = vocab_size_;
    args.num_rows = static_cast<int64_t>(rows.size());
    args.are_best_only = kept.are_best_only;
    args.rows = rows.data();
    args.edits = edits.pointers();
    args.token_ids = chosen.data();
    args.statuses = chosen.data() + rows.size();
    args.scores = scores.pointers();
    return args;
  }

  void check_logits(const Logits& logits, size_t num_rows) const {
    check(logits.shape(0) == num_rows && logits.shape(1) == static_cast<size_t>(vocab_size_),
          "logits must be [num_rows, vocab_size]");
    check(logits.size() == 0 || logits.stride(1) == 1, "the logits of a row must lie together");
  }

  template <class Function>
  void run(int64_t num_items, const Function& function) {
    if (num_items == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> one_call_at_a_time(mutex_);  // the scratch is shared
    // Waking the other threads takes longer than one row.
    if (num_items == 1) return function(0, *scratch_.back());
    team_.run([&](int thread) noexcept {
      team_.for_each_item(thread, num_items,
                          [&](int64_t item) { function(item, *scratch_[thread]); });
    });
  }

  ThreadTeam& team_;
  int32_t vocab_size_;
  std::vector<std::unique_ptr<SampleScratch>> scratch_;  // one per thread, and the caller's own
  std::mutex mutex_;
  std::unique_ptr<Started> started_;
};

}  // namespace

void bind_sample(nb::module_& module) {
  // Without conversion: a converted array is a copy, and what is written there is lost.
  module.def("draw_uniform", &draw_uniform, nb::arg("seed"), nb::arg("output_index"),
             "The random number within [0, 1) of a request's output token.");
  module.attr("sample_row_bytes") = sizeof(SampleRow);
  nb::class_<Edits>(module, "SampleEdits", "Arrays that the rows of a step point into.")
      .def(nb::init<const In<int32_t, 1>&, const In<int32_t, 1>&, const In<double, 1>&,
                    const In<int32_t, 1>&, std::optional<In<uint32_t, 2>>>(),
           nb::arg("history").noconvert(), nb::arg("bias_ids").noconvert(),
           nb::arg("bias_values").noconvert(), nb::arg("banned_ids").noconvert(),
           nb::arg("grammar").noconvert().none());
  nb::class_<Scores>(module, "SampleScores", "Arrays that log-probabilities are written to.")
      .def(nb::init<Out<double, 1>, Out<int32_t, 1>, Out<int32_t, 2>, Out<double, 2>>(),
           nb::arg("logprobs").noconvert(), nb::arg("ranks").noconvert(),
           nb::arg("top_ids").noconvert(), nb::arg("top_logprobs").noconvert());
  nb::class_<TokenSampler>(module, "TokenSampler", "Chooses and scores tokens of rows of logits.")
      .def(nb::init<ThreadTeam&, int64_t>(), nb::arg("team"), nb::arg("vocab_size"),
           nb::keep_alive<1, 2>())
      .def_prop_ro("scratch_bytes", &TokenSampler::scratch_bytes, "Bytes of all threads.")
      .def("sample", &TokenSampler::sample, nb::arg("logits").noconvert(),
           nb::arg("records").noconvert(), nb::arg("chosen").noconvert(), nb::arg("edits"),
           nb::arg("scores"), nb::arg("are_best_only") = false)
      .def("start", &TokenSampler::start, nb::arg("logits").noconvert(),
           nb::arg("records").noconvert(), nb::arg("chosen").noconvert(), nb::arg("edits"),
           nb::arg("scores"), nb::arg("are_best_only") = false)
      .def("finish", &TokenSampler::finish)
      .def("score", &TokenSampler::score, nb::arg("logits").noconvert(),
           nb::arg("token_ids").noconvert(), nb::arg("num_top").noconvert(), nb::arg("scores"));
}

}  // namespace kvloom
