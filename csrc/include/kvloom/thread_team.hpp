// A team of threads that does one region of work at a time, the caller among them, and sleeps in
// between.
//
//   team.run([&](int thread) noexcept {                            // once on each thread
//     team.for_each_item(thread, num_panels, [&](int64_t panel) {  // each item once
//       run_item(args, panel, thread);
//     });                                                          // all items are done
//   });
//
// With begin() and finish() instead of run(), the others work while the caller does something else.
//
// Every thread of a region makes the same calls of for_each_item() and barrier(), in the same
// order, but not at the same time: other threads do the items of one that has no core.
// Functions must not throw: no thread could go on past a barrier that another one never reaches.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "kvloom/types.hpp"

namespace kvloom {

// Tells the processor that this is a loop of waiting.
KVLOOM_INLINE void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Releases threads that wait for `epoch` to move on: they look for a while, then they sleep.
class Gate {
 public:
  uint32_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  void wait_past(uint32_t epoch, int num_spins) {
    wait_past(epoch, num_spins, [] { pause_cpu(); });
  }

  // Calls meanwhile() between looks at the epoch.
  template <class Meanwhile>
  void wait_past(uint32_t epoch, int num_spins, Meanwhile&& meanwhile) {
    for (int i = 0; i < num_spins; ++i) {
      if (this->epoch() != epoch) return;
      meanwhile();
    }
    // Sequentially consistent, as in open(): either we see the new epoch, or open() sees us asleep.
    num_asleep_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      opened_.wait(lock, [&] { return epoch_.load() != epoch; });
    }
    num_asleep_.fetch_sub(1);
  }

  void open() {
    epoch_.fetch_add(1);
    if (num_asleep_.load() == 0) return;
    // Without the lock a thread between its look at the epoch and its sleep would miss the call.
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    opened_.notify_all();
  }

 private:
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable opened_;
};

namespace detail {

// Counts the forks between us and the process that loaded the library: threads do not survive a
// fork.
inline std::atomic<uint32_t>& num_forks() {
  static std::atomic<uint32_t> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count; });
  (void)registered;
  return count;
}

// The threads and what they share. One per team and process.
class Crew {
 public:
  using Entry = void (*)(void* function, int thread) noexcept;

  explicit Crew(int num_threads)
      : num_threads_(num_threads), shares_(new Share[static_cast<size_t>(num_threads)]) {
    // Signals are for the threads of the application: one of ours would run no Python handler.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {  // the system gives no more threads
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      stop();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Crew() { stop(); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Whether the threads are of this process, and not of the one it was forked from.
  bool is_alive() const { return born_after_forks_ == num_forks(); }

  void run(Entry entry, void* function) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    start_region({entry, function, false});
    end_regions(num_begun_);
  }

  uint32_t begin(Entry entry, void* function) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    start_region({entry, function, true});
    return num_begun_;
  }

  void finish(uint32_t ticket) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    end_regions(ticket);
  }

  // The ticket of the last region that begin() has started.
  uint32_t last_ticket() const { return num_begun_; }

  // Whether there are regions that nobody has finished.
  bool is_open() const { return num_begun_ != num_finished_; }

  // What another crew had begun and not finished before a fork left it without threads. A region of
  // run() ends with its caller, who is not there either, or is about to fork himself.
  void begin_anew(const Crew& lost) {
    for (uint32_t i = lost.num_finished_; i != lost.num_begun_; ++i) {
      const OpenRegion& region = lost.regions_[i % kMaxOpen];
      if (region.outlives_caller) begin(region.entry, region.function);
    }
  }

  void barrier() {
    if (num_threads_ == 1) return;
    const uint32_t epoch = barrier_.epoch();
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      num_arrived_.store(0, std::memory_order_relaxed);
      barrier_.open();
    } else {
      barrier_.wait_past(epoch, kNumSpins);
    }
  }

  template <class Function, class Meanwhile, class Finish>
  void for_each_item(int thread, int64_t num_items, Function&& function, Meanwhile&& meanwhile,
                     Finish&& finish) {
    if (num_items == 0) return;
    const uint32_t loop = shares_[static_cast<size_t>(thread)].num_loops++;
    int64_t num_done = 0;
    for (int i = 0; i < num_threads_; ++i) {
      num_done += do_items((thread + i) % num_threads_, loop, num_items, function);
    }
    // A loop is over when its items are done, whoever did them: a thread that lost its core is not
    // waited for, unless it holds an item.
    if (num_done != 0 &&
        num_done_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == num_items) {
      num_done_.store(0, std::memory_order_relaxed);
      finish();
      loops_.open();
    } else {
      loops_.wait_past(loop, kNumSpins, meanwhile);
    }
  }

 private:
  // The items of one thread: num_items * t / n and on. Each on lines of its own, so that a thread
  // shares no memory with others before it helps them.
  struct alignas(2 * kCacheLineBytes) Share {
    // A loop, and how many of its items were taken, in the upper and the lower half.
    std::atomic<uint64_t> taken{0};
    uint32_t num_loops = 0;  // that the thread has come to
  };

  // Takes what is left of a thread's items, in their order; returns how many it did.
  template <class Function>
  int64_t do_items(int owner, uint32_t loop, int64_t num_items, Function&& function) {
    const int64_t start = num_items * owner / num_threads_;
    const int64_t count = num_items * (owner + 1) / num_threads_ - start;
    std::atomic<uint64_t>& taken = shares_[static_cast<size_t>(owner)].taken;
    int64_t num_done = 0;
    for (int64_t item; (item = take_item(taken, loop, count)) < count; ++num_done) {
      function(start + item);
    }
    return num_done;
  }

  // The first of `count` items of a loop that nobody took; `count` if there is none.
  int64_t take_item(std::atomic<uint64_t>& taken, uint32_t loop, int64_t count) {
    uint64_t seen = taken.load(std::memory_order_acquire);
    for (;;) {
      int64_t item = static_cast<int64_t>(seen & 0xffffffffu);
      if (seen >> 32 != loop) {
        // Left from an earlier loop, or of a later one: then ours is seen to be over, too.
        if (loops_.epoch() != loop) return count;
        item = 0;
      }
      if (item >= count) return count;
      const uint64_t next = uint64_t{loop} << 32 | static_cast<uint64_t>(item + 1);
      if (taken.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) return item;
    }
  }

  // Some 40 microseconds: longer than threads drift apart in a step, shorter than a time slice, so
  // that with fewer free cores than threads the one that waits soon leaves its core to the one it
  // waits for.
  static constexpr int kNumSpins = 1500;

  // Two steps, each with its sampling.
  static constexpr uint32_t kMaxOpen = 4;

  struct OpenRegion {
    Entry entry;
    void* function;
    bool outlives_caller;
  };

  void start_region(const OpenRegion& region) {
    if (num_begun_ - num_finished_ == kMaxOpen) end_regions(num_finished_ + 1);
    regions_[num_begun_ % kMaxOpen] = region;
    ++num_begun_;
    start_.open();
  }

  // The caller takes its part of each, which may be to find that nothing is left.
  void end_regions(uint32_t ticket) {
    while (is_open() && static_cast<int32_t>(ticket - num_finished_) > 0) {
      const OpenRegion& region = regions_[num_finished_ % kMaxOpen];
      region.entry(region.function, 0);
      barrier();
      ++num_finished_;
    }
  }

  void serve(int thread) {
    // Epochs count regions from 0, so a thread that starts late still takes part in the first.
    for (uint32_t region = 0;; ++region) {
      start_.wait_past(region, 0);  // no spinning: between steps the cores are the application's
      if (is_stopping_) return;
      const OpenRegion& own = regions_[region % kMaxOpen];
      own.entry(own.function, thread);
      barrier();
    }
  }

  void stop() {
    end_regions(num_begun_);
    is_stopping_ = true;
    start_.open();
    for (std::thread& thread : threads_) thread.join();
  }

  const int num_threads_;
  const uint32_t born_after_forks_ = num_forks();
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  // Written before start_ opens, read after.
  OpenRegion regions_[kMaxOpen];  // region i at i % kMaxOpen, until it is finished
  bool is_stopping_ = false;
  // Under the mutex; read without it to see whether there is anything to finish.
  std::atomic<uint32_t> num_begun_{0}, num_finished_{0};
  Gate start_;
  std::unique_ptr<Share[]> shares_;  // [num_threads]
  // On cache lines of their own: the ones are hammered while the others are waited for.
  alignas(kCacheLineBytes) std::atomic<int64_t> num_done_{0};  // items of the loop that is not over
  alignas(kCacheLineBytes) Gate loops_;                        // its epoch: how many are over
  alignas(kCacheLineBytes) std::atomic<int> num_arrived_{0};
  alignas(kCacheLineBytes) Gate barrier_;
};

}  // namespace detail

class ThreadTeam {
 public:
  // num_threads >= 1, the caller of run() included. Threads start with the first region.
  explicit ThreadTeam(int num_threads) : num_threads_(num_threads) { detail::num_forks(); }
  ~ThreadTeam() {
    detail::Crew* crew = crew_.load();
    if (crew != nullptr && crew->is_alive()) delete crew;
  }
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls function(thread) once for each thread in [0, num_threads); returns when all are done.
  // Regions of one team run one after another, whoever calls; a region must not start another one
  // of its own team. Throws std::system_error if threads cannot be started.
  template <class Function>
  void run(Function&& function) {
    living_crew().run(entry_of<std::remove_reference_t<Function>>(), address_of(function));
  }

  // Starts a region as run() does, but the caller goes on. It takes its part in finish(), or in the
  // next run(), by whichever thread; until then the function must stay where it is. Regions are
  // done in order: the other threads go on to the next once the caller has taken its part. Returns
  // a ticket for finish().
  template <class Function>
  uint32_t begin(Function& function) {
    return living_crew().begin(entry_of<Function>(), address_of(function));
  }

  // Returns when the region of that ticket is done, and all before it.
  void finish(uint32_t ticket) {
    const detail::Crew* crew = crew_.load();
    if (crew != nullptr && crew->is_open()) living_crew().finish(ticket);
  }

  // Returns when all regions are done that have begun.
  void finish() {
    const detail::Crew* crew = crew_.load();
    if (crew != nullptr) finish(crew->last_ticket());
  }

  // Inside a region: waits until every thread of the team is here.
  void barrier() { crew().barrier(); }

  // Inside a region: calls function(item) once for each item in [0, num_items), over all threads;
  // returns when all are done, be it that a thread has yet to come: it finds nothing left to do and
  // must not read what finish() or the items of later loops change. Each thread takes a run of
  // neighbours in order, so that what it reads can be brought near before it is there, and then
  // what others have left of theirs. A thread that finds nothing left calls meanwhile() again and
  // again until all are done: it should take little longer than pause_cpu(). The thread that does
  // the last item, if there are any, calls finish() before the others go on. num_items /
  // num_threads < 2^32.
  template <class Function, class Meanwhile, class Finish>
  void for_each_item(int thread, int64_t num_items, Function&& function, Meanwhile&& meanwhile,
                     Finish&& finish) {
    crew().for_each_item(thread, num_items, function, meanwhile, finish);
  }
  template <class Function, class Meanwhile>
  void for_each_item(int thread, int64_t num_items, Function&& function, Meanwhile&& meanwhile) {
    for_each_item(thread, num_items, function, meanwhile, [] {});
  }
  template <class Function>
  void for_each_item(int thread, int64_t num_items, Function&& function) {
    for_each_item(thread, num_items, function, [] { pause_cpu(); });
  }

 private:
  template <class Function>
  static detail::Crew::Entry entry_of() {
    static_assert(std::is_nothrow_invocable_v<Function&, int>, "a region must be noexcept");
    return [](void* address, int thread) noexcept { (*static_cast<Function*>(address))(thread); };
  }
  template <class Function>
  static void* address_of(Function& function) {
    return const_cast<void*>(static_cast<const void*>(&function));
  }

  detail::Crew& crew() { return *crew_.load(std::memory_order_relaxed); }

  // Starts the threads if there are none yet. In a forked child the old ones do not exist, and may
  // have held locks for ever: they are left behind as they are, and what they had begun begins
  // anew. No lock here either, for the same reason.
  detail::Crew& living_crew() {
    detail::Crew* crew = crew_.load();
    if (crew != nullptr && crew->is_alive()) return *crew;
    auto fresh = std::make_unique<detail::Crew>(num_threads_);
    detail::Crew* const lost = crew;
    if (!crew_.compare_exchange_strong(crew, fresh.get())) return *crew;  // another was faster
    if (lost != nullptr) fresh->begin_anew(*lost);
    return *fresh.release();
  }

  const int num_threads_;
  std::atomic<detail::Crew*> crew_{nullptr};
};

}  // namespace kvloom
