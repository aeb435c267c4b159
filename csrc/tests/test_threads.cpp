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
        team.for_each_item(37, [&](int64_t i) { first[static_cast<size_t>(i)] += 1; });
        team.for_each_item(37, [&](int64_t i) {
          second[static_cast<size_t>(i)] += first[static_cast<size_t>(36 - i)];
        });
        team.for_each_item(0, [&](int64_t) { ++num_threads_seen; });
      });
      CHECK(num_threads_seen == num_threads);
      CHECK(first == std::vector<int>(37, 1) && second == first);
    }
  }
}

}  // namespace kvloom
