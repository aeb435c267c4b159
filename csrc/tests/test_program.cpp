// The arena, and programs run on several threads: each item once, whatever the step.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvloom/arena.hpp"
#include "kvloom/pack_weights.hpp"
#include "kvloom/program.hpp"
#include "kvloom/program_instructions.hpp"

namespace kvloom {
namespace {

using testing::Random;

bool is_aligned(const uint8_t* data) {
  return reinterpret_cast<uintptr_t>(data) % kCacheLineBytes == 0;
}

KVLOOM_TEST(region_is_zero_and_aligned) {
  for (const size_t num_bytes : {size_t{1}, size_t{5000}, 3 * kHugePageBytes + 1}) {
    const Region region(num_bytes);
    CHECK(is_aligned(region.data()));
    CHECK(region.data()[0] == 0 && region.data()[num_bytes - 1] == 0);
    region.data()[num_bytes - 1] = 1;
  }
  const Region empty(0);
  CHECK(empty.num_bytes() == 0);
}

KVLOOM_TEST(pool_hands_out_pieces_apart) {
  RegionPool pool;
  std::vector<RegionPiece> pieces;
  // Small ones that share a region, one that begins the next, and one larger than a region.
  for (const size_t num_bytes : {1ul, 100ul, 30ul << 20, 20ul << 20, 40ul << 20}) {
    pieces.push_back(pool.allocate(num_bytes));
    CHECK(is_aligned(pieces.back().data));
    pieces.back().data[0] = static_cast<uint8_t>(pieces.size());
    pieces.back().data[num_bytes - 1] = static_cast<uint8_t>(pieces.size());
  }
  for (size_t i = 0; i < pieces.size(); ++i) CHECK(pieces[i].data[0] == i + 1);
}

KVLOOM_TEST(arena_holds_its_slots_apart) {
  // Rows of 8 bytes for 10 tokens, then of 12 and of 4 for 5 rows of logits.
  const Arena arena({{RowCount::Tokens, 8}, {RowCount::Logits, 12}, {RowCount::Logits, 4}},
                    {10, 5});
  const size_t sizes[] = {80, 60, 20};
  for (int slot = 0; slot < 3; ++slot) {
    CHECK(is_aligned(arena.bytes(slot)));
    std::memset(arena.bytes(slot), slot + 1, sizes[slot]);
  }
  for (int slot = 0; slot < 3; ++slot) {
    for (size_t i = 0; i < sizes[slot]; ++i) CHECK(arena.bytes(slot)[i] == slot + 1);
  }
}

KVLOOM_TEST(arena_refuses_rows_that_no_memory_holds) {
  bool has_failed = false;
  try {
    // A petabyte: more than addresses reach.
    const Arena arena({{RowCount::Logits, 1 << 20}}, {1, 1 << 30});
  } catch (const std::bad_alloc&) {
    has_failed = true;
  }
  CHECK(has_failed);
}

// Counts how often each item runs, and that all items of the instruction before it are done.
class CountingInstruction final : public Instruction {
 public:
  CountingInstruction(int items_per_token, const CountingInstruction* before)
      : items_per_token_(items_per_token), before_(before) {}

  int prepare(const StepContext& context) override {
    visits_ = std::vector<std::atomic<int>>(
        static_cast<size_t>(items_per_token_ * context.step.num_tokens));
    return static_cast<int>(visits_.size());
  }

  void run_item(int item, const ThreadContext& thread) override {
    if (before_ != nullptr && !before_->is_done()) ++num_errors;
    // Nobody else may write this thread's scratch.
    auto* const scratch = reinterpret_cast<int*>(thread.scratch);
    scratch[0] = thread.index;
    ++visits_[static_cast<size_t>(item)];
    if (scratch[0] != thread.index) ++num_errors;
  }

  size_t scratch_bytes() const override { return sizeof(int); }

  bool is_done() const {
    for (const auto& count : visits_) {
      if (count != 1) return false;
    }
    return true;
  }

  std::atomic<int> num_errors{0};

 private:
  int items_per_token_;
  const CountingInstruction* before_;
  std::vector<std::atomic<int>> visits_;
};

KVLOOM_TEST(program_runs_each_item_once_and_in_order) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadTeam team(num_threads);
    Program program(team, {{RowCount::Tokens, 4}}, {100, 1});
    std::vector<CountingInstruction*> all;
    for (const int items : {3, 0, 1, 20}) {
      CountingInstruction* before = all.empty() ? nullptr : all.back();
      auto next = std::make_unique<CountingInstruction>(items, before);
      all.push_back(next.get());
      program.add(std::unique_ptr<Instruction>(std::move(next)));
      if (items == 1) program.end_segment();
    }
    program.finish();
    CHECK(program.num_segments() == 2);
    for (const int num_tokens : {1, 100, 0, 7}) {
      Step step;
      step.num_tokens = num_tokens;
      program.begin(step);
      program.run_segment(0);
      CHECK(all[2]->is_done() && (num_tokens == 0) == all[3]->is_done());
      program.run_segment(1);
      for (const CountingInstruction* instruction : all) {
        CHECK(instruction->is_done() && instruction->num_errors == 0);
      }
    }
  }
}

// Embedding, then a product, of a few tokens: against sums in double.
KVLOOM_TEST(program_embeds_and_multiplies) {
  constexpr int kVocab = 33, kSize = 40, kOutputs = 50;
  Random random(3);
  const std::vector<float> table = random.reals(kVocab * kSize);
  const std::vector<float> weight = random.reals(kOutputs * kSize);
  RegionPool pool;
  std::vector<RegionPiece> pieces;
  const auto pack = [&](const std::vector<float>& rows, int num_outputs) {
    pieces.push_back(
        pool.allocate(packed_weight_bytes(Format::F32, OutputOrder::Plain, num_outputs, kSize)));
    PackedWeight packed{Format::F32, OutputOrder::Plain, num_outputs, kSize, pieces.back().data};
    const auto* data = reinterpret_cast<const uint8_t*>(rows.data());
    pack_outputs(packed, {SourceFormat::F32, data, 0, num_outputs});
    return packed;
  };
  const PackedWeight packed_table = pack(table, kVocab), packed_weight = pack(weight, kOutputs);

  const size_t packed_row_bytes = packed_rows_bytes(RowFormat::F32, 1, kSize);
  ThreadTeam team(2);
  Program program(team,
                  {{RowCount::Tokens, kSize * sizeof(float)},
                   {RowCount::Tokens, packed_row_bytes},
                   {RowCount::Tokens, kOutputs * sizeof(float)}},
                  {20, 1});
  const Operand x{0, RowCount::Tokens, kSize}, y{2, RowCount::Tokens, kOutputs};
  program.add(std::unique_ptr<Instruction>(new EmbeddingInstruction(packed_table, 0, x)));
  program.add(std::unique_ptr<Instruction>(new PackInstruction(x, Format::F32, 1)));
  ProductResult result;
  result.out = y;
  program.add(std::unique_ptr<Instruction>(new GemmInstruction(packed_weight, 1, result)));
  program.finish();

  std::vector<int32_t> ids = {5, 32, 0, 7, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  Step step;
  step.num_tokens = static_cast<int>(ids.size());
  step.token_ids = ids.data();
  program.begin(step);
  program.run_segment(0);
  const float* out = program.arena().floats(2);
  for (size_t row = 0; row < ids.size(); ++row) {
    for (int i = 0; i < kOutputs; ++i) {
      double expected = 0.0;
      for (int k = 0; k < kSize; ++k) {
        expected += double{table[ids[row] * kSize + k]} * weight[i * kSize + k];
      }
      CHECK_NEAR(out[row * kOutputs + static_cast<size_t>(i)], expected, 1e-5);
    }
  }
}

// Writes each token's id, and a number of its step, to a row of its own.
class NotingInstruction : public Instruction {
 public:
  int prepare(const StepContext& context) override {
    step_ = &context.step;
    out_ = context.arena.floats(0);
    return context.step.num_tokens;
  }
  void run_item(int item, const ThreadContext&) override {
    out_[item] = static_cast<float>(step_->token_ids[item]);
  }

 private:
  const Step* step_ = nullptr;
  float* out_ = nullptr;
};

KVLOOM_TEST(a_step_may_start_behind_one_that_its_tokens_come_from) {
  for (const int num_threads : {1, 2, 3}) {
    ThreadTeam team(num_threads);
    Program program(team, {{RowCount::Tokens, sizeof(float)}}, {8, 1});
    program.add(std::unique_ptr<Instruction>(new NotingInstruction));
    program.finish();
    const float* noted = program.arena().floats(0);
    for (int round = 0; round < 100; ++round) {
      std::vector<int32_t> first_ids = {round, 7, 5}, second_ids = {0, 9, 0, 1}, sampled(3);
      Step first, second;
      first.num_tokens = 3;
      first.token_ids = first_ids.data();
      second.num_tokens = 4;
      second.token_ids = second_ids.data();
      second.late = {{{0, 2}, {2, 0}}, sampled.data()};
      // What samples the first step: the next id of each.
      const auto sample = [&](int thread) noexcept {
        team.for_each_item(thread, 3, [&](int64_t i) {
          sampled[static_cast<size_t>(i)] = static_cast<int32_t>(noted[i]) + 1;
        });
      };
      Program::Run first_run, second_run;
      program.start(first, first_run);
      const uint32_t ticket = team.begin(sample);
      const uint32_t last = program.start(second, second_run);
      team.finish(ticket);
      CHECK((sampled == std::vector<int32_t>{round + 1, 8, 6}));
      program.wait(last);
      CHECK((std::vector<float>(noted, noted + 4) ==
             std::vector<float>{6, 9, static_cast<float>(round + 1), 1}));
    }
  }
}

}  // namespace
}  // namespace kvloom
