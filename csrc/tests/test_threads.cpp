// The thread team under sanitizers; tests/kernels/test_threads.py does more where Python runs.
#include "kvloom/thread_team.hpp"

#include <atomic>
#include <functional>
#include <thread>
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

KVLOOM_TEST(a_thread_that_has_no_core_is_not_waited_for) {
  ThreadTeam team(2);
  std::atomic<bool> may_go_on{false};
  std::vector<int> done(9);
  team.run([&](int thread) noexcept {
    while (thread == 1 && !may_go_on) pause_cpu();
    for (int loop = 0; loop < 3; ++loop) {
      team.for_each_item(thread, 9, [&](int64_t i) {
        if (done[static_cast<size_t>(i)] == loop) ++done[static_cast<size_t>(i)];
      });
    }
    may_go_on = true;  // the loops are over without the other one
  });
  CHECK(done == std::vector<int>(9, 3));
}

KVLOOM_TEST(a_thread_that_waits_for_another_may_do_something_meanwhile) {
  ThreadTeam team(2);
  std::atomic<int> num_started{0}, num_calls{0};
  team.run([&](int thread) noexcept {
    const auto run = [&](int64_t item) {
      ++num_started;
      while (num_started < 2) pause_cpu();  // each thread has its own item
      while (item == 0 && num_calls < 3) pause_cpu();
    };
    team.for_each_item(thread, 2, run, [&] { ++num_calls; });
  });
  CHECK(num_calls >= 3);
}

KVLOOM_TEST(the_thread_that_ends_a_loop_finishes_it_before_the_others_go_on) {
  constexpr int kNumThreads = 3, kNumItems = 7;
  ThreadTeam team(kNumThreads);
  std::atomic<int> num_done{0}, num_finished{0}, num_wrong{0};
  team.run([&](int thread) noexcept {
    for (int loop = 1; loop <= 200; ++loop) {
      team.for_each_item(
          thread, kNumItems, [&](int64_t) { ++num_done; }, [] { pause_cpu(); },
          [&] {
            num_wrong += num_done != loop * kNumItems;
            std::this_thread::yield();
            num_wrong += ++num_finished != loop;
          });
      num_wrong += num_finished < loop;
    }
  });
  CHECK(num_wrong == 0);
  CHECK(num_finished == 200);
}

KVLOOM_TEST(threads_that_come_late_find_their_place) {
  constexpr int kNumThreads = 3, kNumLoops = 2000, kNumItems = 4;
  ThreadTeam team(kNumThreads);
  std::vector<int> done(kNumItems);  // plain: items of two loops at once would be a race
  std::atomic<int> num_wrong{0};
  team.run([&](int thread) noexcept {
    for (int loop = 0; loop < kNumLoops; ++loop) {
      // Each thread is slow in stretches of its own.
      const int num_pauses = loop / 50 % kNumThreads == thread ? 300 : 0;
      for (int i = 0; i < num_pauses; ++i) pause_cpu();
      team.for_each_item(thread, 1 + loop % kNumItems, [&](int64_t item) {
        const int before = done[static_cast<size_t>(item)]++;
        // Loops of at least item + 1 items, of those before this one.
        const int expected = loop / kNumItems * (kNumItems - static_cast<int>(item)) +
                             loop % kNumItems - static_cast<int>(item);
        if (before != expected) ++num_wrong;
      });
    }
  });
  CHECK(num_wrong == 0);
}

KVLOOM_TEST(regions_that_were_begun_go_on_without_the_caller_and_in_order) {
  constexpr int kNumItems = 50;
  for (const int num_threads : {1, 2, 3}) {
    ThreadTeam team(num_threads);
    std::vector<int> first(kNumItems), second(kNumItems);  // plain: an overlap would be a race
    std::atomic<int> num_wrong{0};
    for (int round = 1; round <= 200; ++round) {
      const auto fill = [&](int thread) noexcept {
        team.for_each_item(thread, kNumItems, [&](int64_t i) { ++first[static_cast<size_t>(i)]; });
      };
      const auto copy = [&](int thread) noexcept {
        team.for_each_item(thread, kNumItems, [&](int64_t i) {
          num_wrong += first[static_cast<size_t>(kNumItems - 1 - i)] != round;
          ++second[static_cast<size_t>(i)];
        });
      };
      const uint32_t filled = team.begin(fill);
      const uint32_t copied = team.begin(copy);
      if (round % 2 == 0) {
        team.finish(filled);
        CHECK(first == std::vector<int>(kNumItems, round));
      }
      if (round % 3 == 0) {
        team.run([](int) noexcept {});  // finishes all before it
      } else {
        team.finish(copied);
      }
      CHECK(second == std::vector<int>(kNumItems, round));
    }
    CHECK(num_wrong == 0);
  }
}

KVLOOM_TEST(other_threads_work_on_what_was_begun_while_the_caller_does_not_wait) {
  ThreadTeam team(2);
  std::atomic<int> num_done{0};
  const auto region = [&](int thread) noexcept {
    team.for_each_item(thread, 10, [&](int64_t) { ++num_done; });
  };
  const uint32_t ticket = team.begin(region);
  while (num_done < 10) pause_cpu();  // or the test never ends
  team.finish(ticket);
  CHECK(num_done == 10);
}

KVLOOM_TEST(more_regions_than_there_is_room_for_wait_and_none_is_lost) {
  std::vector<int> order;
  {
    ThreadTeam team(2);
    std::vector<std::function<void(int)>> regions;
    for (int i = 0; i < 11; ++i) {
      regions.emplace_back([&team, &order, i](int thread) noexcept {
        team.for_each_item(thread, 1, [&](int64_t) { order.push_back(i); });
      });
    }
    struct Call {
      void operator()(int thread) const noexcept { (*function)(thread); }
      const std::function<void(int)>* function;
    };
    std::vector<Call> calls;
    for (const auto& region : regions) calls.push_back({&region});
    for (Call& call : calls) team.begin(call);
    team.finish();
    CHECK(order.size() == 11);
    for (Call& call : calls) team.begin(call);
    team.finish();
  }
  for (size_t i = 0; i < order.size(); ++i) CHECK(order[i] == static_cast<int>(i % 11));
  CHECK(order.size() == 22);
}

}  // namespace kvloom
