// The thread team under sanitizers; tests/kernels/test_threads.py does more where Python runs.
#include "kvloom/thread_team.hpp"

#include <atomic>
#include <vector>

#include "check.hpp"

namespace kvloom {

KVLOOM_TEST(every_item_is_done_once_and_before_the_barrier_opens) {
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    ThreadTeam team(num_threads);
    for (int region = 0; region < 50; ++region) {
      std::vector<int> first(37), second(37);  // plain: an item done twice at once would be a race
      std::atomic<int> num_threads_seen{0};
      team.run([&](int thread) noexcept {
        if (thread >= 0 && thread < num_threads) ++num_threads_seen;
        team.for_each_item(thread, 37, [&](int64_t i) { first[static_cast<size_t>(i)] += 1; });
        team.for_each_item(thread, 37, [&](int64_t i) {
          second[static_cast<size_t>(i)] += first[static_cast<size_t>(36 - i)];
        });
        team.for_each_item(thread, 0, [&](int64_t) { ++num_threads_seen; });
      });
      CHECK(num_threads_seen == num_threads);
      CHECK(first == std::vector<int>(37, 1) && second == first);
    }
  }
}

KVLOOM_TEST(a_thread_takes_its_own_run_of_items_in_order_and_then_those_of_the_next) {
  constexpr int kNumThreads = 3, kNumItems = 1000;
  ThreadTeam team(kNumThreads);
  std::vector<std::vector<int64_t>> taken(kNumThreads);
  team.run([&](int thread) noexcept {
    team.for_each_item(thread, kNumItems,
                       [&](int64_t i) { taken[static_cast<size_t>(thread)].push_back(i); });
  });
  for (int64_t thread = 0; thread < kNumThreads; ++thread) {
    // Counted from where the thread's run begins, round the end, items only rise.
    const int64_t start = kNumItems * thread / kNumThreads;
    int64_t last = -1;
    for (const int64_t item : taken[static_cast<size_t>(thread)]) {
      const int64_t place = (item - start + kNumItems) % kNumItems;
      CHECK(place > last);
      last = place;
    }
  }
}

}  // namespace kvloom
