// The tape as the native library runs it: instructions over slots of an arena, one call per step.
//
// All instructions of a segment run in one region of the thread team. An instruction has a number
// of items in each step; threads take them from a counter, so that a busy core costs its share and
// no more, and meet before the next instruction. A short one of a single item is done by whoever
// ends the instruction before it, while the others wait. A tape is cut into segments where ranks
// exchange values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "kvloom/arena.hpp"
#include "kvloom/far_reads.hpp"
#include "kvloom/read_ahead.hpp"
#include "kvloom/step.hpp"
#include "kvloom/thread_team.hpp"

namespace kvloom {

// What an instruction may use while it plans a step.
struct StepContext {
  const Step& step;
  const Arena& arena;
  int num_threads;
};

// What an instruction may use while it runs an item.
struct ThreadContext {
  int index;         // of the thread
  uint8_t* scratch;  // the thread's own, 64-byte aligned, of scratch_bytes()
};

class Instruction {
 public:
  virtual ~Instruction() = default;

  // Plan the step's work; returns the number of items. Called by one thread, before all items.
  virtual int prepare(const StepContext& context) = 0;

  // Compute one item. Any thread, any order.
  virtual void run_item(int item, const ThreadContext& thread) = 0;

  // Scratch that a thread needs, whatever the step.
  virtual size_t scratch_bytes() const { return 0; }

  // What it reads from far away; null: nothing that earlier instructions could bring near.
  virtual const FarReads* far_reads() const { return nullptr; }

  // The weights that it reads, if it reads all of them in order; or nothing.
  virtual MemoryRange weights() const { return {}; }

  // How much it could bring near of what a later instruction reads, compared with others.
  virtual int64_t num_spare_fetches() const { return 0; }
  virtual void bring_near(const FarShare&) {}
};

// Something that several instructions need planned once per step, before they are.
class StepPlanner {
 public:
  virtual ~StepPlanner() = default;
  virtual void plan(const Step& step) = 0;
};

// For each instruction, the weights that are read next once it is done.
inline std::vector<MemoryRange> find_next_weights(
    const std::vector<std::unique_ptr<Instruction>>& instructions) {
  std::vector<MemoryRange> found(instructions.size());
  for (size_t i = instructions.size(); i-- > 1;) {
    const MemoryRange own = instructions[i]->weights();
    found[i - 1] = own.start == own.end ? found[i] : own;
  }
  return found;
}

class Program {
 public:
  // The team may serve others in between; it must outlive the program.
  Program(ThreadTeam& team, const std::vector<SlotSpec>& slots, StepCapacity capacity)
      : team_(team), arena_(slots, capacity) {}
  ~Program() { team_.finish(); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void add(std::unique_ptr<Instruction> instruction) {
    instructions_.push_back(std::move(instruction));
    segment_ends_.back() = instructions_.size();
  }

  void add(std::unique_ptr<StepPlanner> planner) { planners_.push_back(std::move(planner)); }

  // Later instructions belong to another segment.
  void end_segment() { segment_ends_.push_back(instructions_.size()); }

  // After the last instruction, before the first step.
  void finish() {
    size_t num_bytes = 0;
    for (const auto& instruction : instructions_) {
      num_bytes = std::max(num_bytes, instruction->scratch_bytes());
    }
    scratch_stride_ = static_cast<size_t>(round_up(num_bytes, kCacheLineBytes));
    scratch_ = std::make_unique<Region>(scratch_stride_ * team_.num_threads());
    num_items_.assign(instructions_.size(), 0);
    next_weights_ = find_next_weights(instructions_);
    for (const auto& instruction : instructions_) {
      const MemoryRange range = instruction->weights();
      reads_weights_.push_back(range.start != range.end);
    }
    size_t first = 0;
    for (size_t i = 0; i < instructions_.size(); ++i) {
      if (instructions_[i]->far_reads() == nullptr) continue;
      share_reads(*instructions_[i]->far_reads(), first, i);
      first = i + 1;
    }
  }

  // Plan a step: it must stay where it is until its last segment has run.
  void begin(const Step& step) {
    team_.finish();
    plan(step);
  }

  void run_segment(int segment) {
    const size_t first = segment == 0 ? 0 : segment_ends_[static_cast<size_t>(segment) - 1];
    team_.run(Run{this, nullptr, first, segment_ends_[static_cast<size_t>(segment)]});
  }

  // What threads do of instructions [first, end), once the step is planned, if it is given.
  struct Run {
    void operator()(int thread) const noexcept { program->run_thread(thread, *this); }
    Program* program = nullptr;
    const Step* step = nullptr;
    size_t first = 0, end = 0;
  };

  // Starts all segments of a step, which is planned when those before it are done: run and step
  // must stay where they are until the team has finished the ticket that is returned.
  uint32_t start(const Step& step, Run& run) {
    run = {this, &step, 0, instructions_.size()};
    return team_.begin(run);
  }
  void wait(uint32_t ticket) { team_.finish(ticket); }

  int num_segments() const { return static_cast<int>(segment_ends_.size()); }
  const Arena& arena() const { return arena_; }

 private:
  // Where the loop ends that begins with instruction i: those of a single item, which takes about a
  // microsecond where no weights are read, are part of it.
  size_t end_of_loop(size_t i, size_t end) const {
    if (num_items_[i] == 0) return i + 1;
    for (++i; i < end && num_items_[i] <= (reads_weights_[i] ? 0 : 1); ++i) {
    }
    return i;
  }

  // Instructions [first, end) bring it near together.
  void share_reads(const FarReads& reads, size_t first, size_t end) {
    FarShare share{&reads, team_.num_threads(), 0, 0, 0};
    for (size_t i = first; i < end; ++i) share.total += instructions_[i]->num_spare_fetches();
    for (size_t i = first; i < end; ++i) {
      share.first = share.end;
      share.end += instructions_[i]->num_spare_fetches();
      if (share.end > share.first) instructions_[i]->bring_near(share);
    }
  }

  void plan(const Step& step) {
    fill_in_late_tokens(step);
    for (const auto& planner : planners_) planner->plan(step);
    const StepContext context{step, arena_, team_.num_threads()};
    for (size_t i = 0; i < instructions_.size(); ++i) {
      num_items_[i] = instructions_[i]->prepare(context);
    }
  }

  void run_thread(int thread, const Run& region) {
    if (region.step != nullptr) {
      team_.for_each_item(thread, 1, [&](int64_t) { plan(*region.step); });
    }
    const ThreadContext context{thread, scratch_->data() + scratch_stride_ * thread};
    ReadAhead ahead(thread, team_.num_threads());
    for (size_t i = region.first; i < region.end;) {
      const size_t next = end_of_loop(i, region.end);
      const auto run = [&](int64_t item) {
        instructions_[i]->run_item(static_cast<int>(item), context);
      };
      const auto finish = [&] {
        for (size_t one = i + 1; one < next; ++one) {
          if (num_items_[one] > 0) instructions_[one]->run_item(0, context);
        }
      };
      ahead.turn_to(next_weights_[next - 1]);
      team_.for_each_item(thread, num_items_[i], run, [&] { ahead.bring_some(); }, finish);
      i = next;
    }
  }

  ThreadTeam& team_;
  Arena arena_;
  std::vector<std::unique_ptr<StepPlanner>> planners_;
  std::vector<std::unique_ptr<Instruction>> instructions_;
  std::vector<size_t> segment_ends_{0};
  std::vector<MemoryRange> next_weights_;  // by instruction
  std::vector<bool> reads_weights_;        // by instruction
  std::vector<int> num_items_;             // of the step, by instruction
  std::unique_ptr<Region> scratch_;
  size_t scratch_stride_ = 0;
};

}  // namespace kvloom
