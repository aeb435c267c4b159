// Memory: large zeroed regions with huge pages, a pool of them for weights, and the arena in which
// the values of a forward pass share slots.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kvloom/step.hpp"
#include "kvloom/types.hpp"

namespace kvloom {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Zeroed memory that the system hands out as it is touched. Large regions begin at a huge page and
// ask for more of them: fewer address translations, which is worth a tenth of attention's time.
class Region {
 public:
  explicit Region(size_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes == 0) return;
    const size_t alignment = num_bytes >= kHugePageBytes ? kHugePageBytes : 0;
    mapped_bytes_ = num_bytes + alignment;
    mapped_ =
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(mapped_);
    const size_t skipped = alignment ? (alignment - address % alignment) % alignment : 0;
    data_ = static_cast<uint8_t*>(mapped_) + skipped;
    // Advice only: where the system has no huge pages, everything works as before.
    if (alignment) madvise(data_, num_bytes, MADV_HUGEPAGE);
  }
  ~Region() {
    if (data_ != nullptr) munmap(mapped_, mapped_bytes_);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
  size_t num_bytes_;
};

// A piece of a shared region; keeps the region alive.
struct RegionPiece {
  std::shared_ptr<Region> region;
  uint8_t* data = nullptr;
  size_t num_bytes = 0;
};

// Hands out 64-byte aligned pieces of large regions one after another, so that small weights share
// huge pages. Pieces go back when their whole region does.
class RegionPool {
 public:
  RegionPiece allocate(size_t num_bytes) {
    const size_t needed = static_cast<size_t>(round_up(num_bytes, kCacheLineBytes));
    if (needed >= kRegionBytes) {
      auto own = std::make_shared<Region>(needed);
      return {own, own->data(), num_bytes};
    }
    if (!region_ || used_bytes_ + needed > kRegionBytes) {
      region_ = std::make_shared<Region>(kRegionBytes);
      used_bytes_ = 0;
    }
    uint8_t* data = region_->data() + used_bytes_;
    used_bytes_ += needed;
    return {region_, data, num_bytes};
  }

 private:
  static constexpr size_t kRegionBytes = size_t{32} << 20;
  std::shared_ptr<Region> region_;
  size_t used_bytes_ = 0;
};

// A piece of the arena that values use one after another: as many rows as the step has.
struct SlotSpec {
  RowCount rows = RowCount::Tokens;
  size_t row_bytes = 0;
};

// The most a step may hold.
struct StepCapacity {
  int num_tokens = 0;
  int num_rows = 0;
};

// The memory of a forward pass.
class Arena {
 public:
  Arena(const std::vector<SlotSpec>& slots, StepCapacity capacity)
      : region_(arena_bytes(slots, capacity)) {
    uint8_t* next = region_.data();
    for (const SlotSpec& slot : slots) {
      data_.push_back(next);
      next += slot_bytes(slot, capacity);
    }
  }

  uint8_t* bytes(int slot) const { return data_[slot]; }
  float* floats(int slot) const { return reinterpret_cast<float*>(data_[slot]); }

 private:
  static size_t arena_bytes(const std::vector<SlotSpec>& slots, StepCapacity capacity) {
    size_t num_bytes = 0;
    for (const SlotSpec& slot : slots) num_bytes += slot_bytes(slot, capacity);
    return num_bytes;
  }

  static size_t slot_bytes(const SlotSpec& slot, StepCapacity capacity) {
    const int num_rows = slot.rows == RowCount::Tokens ? capacity.num_tokens : capacity.num_rows;
    return static_cast<size_t>(round_up(slot.row_bytes * num_rows, kCacheLineBytes));
  }

  Region region_;
  std::vector<uint8_t*> data_;  // by slot
};

}  // namespace kvloom
