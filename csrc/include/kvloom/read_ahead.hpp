// What a thread will read next. It brings the beginning near while it has to wait for others: the
// memory would rest otherwise.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvloom/simd.hpp"
#include "kvloom/thread_team.hpp"
#include "kvloom/types.hpp"

namespace kvloom {

// Memory that is read from its start to its end; of several threads, each reads its part.
struct MemoryRange {
  uintptr_t start = 0;
  uintptr_t end = 0;
};

class ReadAhead {
 public:
  ReadAhead(int thread, int num_threads)
      : thread_(static_cast<uintptr_t>(thread)),
        num_threads_(static_cast<uintptr_t>(num_threads)) {}

  // `range` is what is read next. Goes on where it was if that is nothing new.
  void turn_to(const MemoryRange& range) {
    if (range.start == range_start_) return;
    range_start_ = range.start;
    const uintptr_t size = range.end - range.start;
    left_.start = range.start + size * thread_ / num_threads_;
    const uintptr_t end = range.start + size * (thread_ + 1) / num_threads_;
    left_.end = std::min(end, left_.start + kMostBytes);
  }

  // One look of a thread that waits: brings some lines near, and takes little longer than a pause.
  void bring_some() {
    for (int i = 0; i < kLinesPerLook && left_.start < left_.end; ++i) {
      prefetch_l2(reinterpret_cast<const void*>(left_.start));
      left_.start += kCacheLineBytes;
    }
    pause_cpu();
  }

  // What it would bring near yet.
  const MemoryRange& left() const { return left_; }

 private:
  static constexpr uintptr_t kMostBytes = 128 << 10;  // a small part of a usual second cache
  static constexpr int kLinesPerLook = 2;

  uintptr_t thread_, num_threads_;
  uintptr_t range_start_ = 0;
  MemoryRange left_;
};

}  // namespace kvloom
