// What threads bring near while they wait: the beginning of what each of them reads next.
#include "kvloom/read_ahead.hpp"

#include <memory>
#include <vector>

#include "check.hpp"
#include "kvloom/program.hpp"

namespace kvloom {
namespace {

constexpr uintptr_t kStart = 1 << 20, kSmall = 6 << 10;

KVLOOM_TEST(threads_share_what_is_read_next) {
  for (const int num_threads : {1, 2, 3}) {
    uintptr_t end = kStart;
    for (int thread = 0; thread < num_threads; ++thread) {
      ReadAhead ahead(thread, num_threads);
      CHECK(ahead.left().start == ahead.left().end);
      ahead.turn_to({kStart, kStart + kSmall});
      CHECK(ahead.left().start == end);
      end = ahead.left().end;
    }
    CHECK(end == kStart + kSmall);
  }
}

KVLOOM_TEST(a_thread_looks_ahead_no_further_than_its_cache_holds) {
  ReadAhead ahead(1, 2);
  ahead.turn_to({kStart, kStart + (64 << 20)});
  CHECK(ahead.left().start == kStart + (32 << 20));
  CHECK(ahead.left().end == ahead.left().start + (128 << 10));
}

KVLOOM_TEST(each_look_goes_on_until_all_is_near) {
  ReadAhead ahead(0, 1);
  ahead.turn_to({kStart, kStart + kSmall});
  int num_looks = 0;
  for (uintptr_t before = kStart; ahead.left().start < ahead.left().end; ++num_looks) {
    ahead.bring_some();
    CHECK(ahead.left().start > before);
    before = ahead.left().start;
    ahead.turn_to({kStart, kStart + kSmall});  // nothing new: it stays where it is
    CHECK(ahead.left().start == before);
  }
  CHECK(num_looks > 1);
  ahead.bring_some();
  CHECK(ahead.left().start == kStart + kSmall);
  ahead.turn_to({2 * kStart, 2 * kStart + kSmall});
  CHECK(ahead.left().start == 2 * kStart);
}

class WeightsInstruction final : public Instruction {
 public:
  explicit WeightsInstruction(MemoryRange weights) : weights_(weights) {}

  int prepare(const StepContext&) override { return 1; }
  void run_item(int, const ThreadContext&) override {}
  MemoryRange weights() const override { return weights_; }

 private:
  MemoryRange weights_;
};

KVLOOM_TEST(the_next_weights_are_those_of_the_next_instruction_that_has_any) {
  std::vector<std::unique_ptr<Instruction>> instructions;
  CHECK(find_next_weights(instructions).empty());
  for (const uintptr_t start : {10, 0, 0, 20, 30, 0}) {
    instructions.emplace_back(new WeightsInstruction({start, start == 0 ? 0 : start + 5}));
  }
  const std::vector<MemoryRange> found = find_next_weights(instructions);
  const uintptr_t expected[] = {20, 20, 20, 30, 0, 0};
  for (size_t i = 0; i < instructions.size(); ++i) {
    CHECK(found[i].start == expected[i]);
    CHECK(found[i].end == (expected[i] == 0 ? 0 : expected[i] + 5));
  }
}

}  // namespace
}  // namespace kvloom
