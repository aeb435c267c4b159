// The thread team as a Python object, so that one team serves the programs and the sampler of an
// engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvloom/thread_team.hpp"

namespace nb = nanobind;

namespace kvloom {
namespace {

constexpr int kMaxThreads = 1024;

void check_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw nb::value_error("num_threads must be from 1 to 1024");
  }
}

// What run_counting_regions() counts, on all threads.
struct Counts {
  std::vector<std::atomic<int64_t>> visits;      // [num_items], how often each item was handed out
  std::atomic<int64_t> num_early_departures{0};  // barriers left before all items were done
};

void count_region(ThreadTeam& team, Counts& counts, int64_t num_before) {
  const int64_t num_items = static_cast<int64_t>(counts.visits.size());
  std::atomic<int64_t> num_done{0};
  team.run([&](int thread) noexcept {
    for (int64_t round = 1; round <= 2; ++round) {
      team.for_each_item(thread, num_items, [&](int64_t item) {
        counts.visits[static_cast<size_t>(item)].fetch_add(1);
        num_done.fetch_add(1);
      });
      if (num_done.load() < round * num_items) counts.num_early_departures.fetch_add(1);
      team.barrier();  // no thread starts the next round before the others have looked
    }
  });
  for (const auto& visits : counts.visits) {
    if (visits.load() != num_before + 2) counts.num_early_departures.fetch_add(1);
  }
}

// Goes `num_regions` times over `num_items` items twice, with barriers. Returns how often each item
// was visited; raises if a thread passed a barrier too early. For tests.
std::vector<int64_t> run_counting_regions(ThreadTeam& team, int num_regions, int num_items) {
  if (num_regions < 0 || num_items < 0) throw nb::value_error("counts must not be negative");
  Counts counts{std::vector<std::atomic<int64_t>>(static_cast<size_t>(num_items)), {}};
  {
    nb::gil_scoped_release release;
    for (int region = 0; region < num_regions; ++region) count_region(team, counts, 2 * region);
  }
  if (counts.num_early_departures.load() != 0) {
    throw std::runtime_error("a thread passed a barrier too early");
  }
  return {counts.visits.begin(), counts.visits.end()};
}

}  // namespace

void bind_threads(nb::module_& module) {
  nb::class_<ThreadTeam>(module, "ThreadTeam",
                         "Threads that share the work of a step, the calling thread among them.")
      .def(
          "__init__",
          [](ThreadTeam* self, int num_threads) {
            check_num_threads(num_threads);
            new (self) ThreadTeam(num_threads);
          },
          nb::arg("num_threads"))
      .def_prop_ro("num_threads", &ThreadTeam::num_threads)
      .def(
          "finish", [](ThreadTeam& team) { team.finish(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Returns when all is done that programs and samplers have started.")
      .def("run_counting_regions", &run_counting_regions, nb::arg("num_regions"),
           nb::arg("num_items"));
}

}  // namespace kvloom
