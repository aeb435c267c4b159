// What an instruction will read of memory that no cache holds by then. Instructions before it that
// compute more than they read bring it near meanwhile, as far as the last cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvloom/types.hpp"

namespace kvloom {

// Blocks of equal size in equal distances, in the order in which they will be read; cut into
// pieces, each for one tile of rows times one panel of weights to bring near.
class FarReads {
 public:
  FarReads(const char* base, int64_t stride, size_t block_bytes, const std::vector<int32_t>& blocks)
      : base_(base),
        stride_(stride),
        block_bytes_(block_bytes),
        pieces_per_block_(cdiv(static_cast<int64_t>(block_bytes), kMostPieceBytes)),
        blocks_(blocks) {}

  int64_t num_pieces() const { return pieces_per_block_ * static_cast<int64_t>(blocks_.size()); }
  size_t piece_bytes() const { return block_bytes_ / static_cast<size_t>(pieces_per_block_); }

  uintptr_t piece(int64_t index) const {
    const int64_t block = blocks_[static_cast<size_t>(index / pieces_per_block_)];
    return reinterpret_cast<uintptr_t>(base_ + block * stride_) +
           static_cast<size_t>(index % pieces_per_block_) * piece_bytes();
  }

 private:
  static constexpr int64_t kMostPieceBytes = 16 << 10;

  const char* base_;
  int64_t stride_;
  size_t block_bytes_;
  int64_t pieces_per_block_;
  const std::vector<int32_t>& blocks_;
};

// Pieces [next, end) of some reads.
struct FarPieces {
  const FarReads* reads = nullptr;
  int64_t next = 0;
  int64_t end = 0;

  // The address of the next piece; 0 if none is left.
  uintptr_t take() { return next < end ? reads->piece(next++) : 0; }
};

// What one instruction brings near: of each thread's pieces a part, [first, end) of `total`.
struct FarShare {
  const FarReads* reads = nullptr;
  int num_threads = 1;
  int64_t first = 0;
  int64_t end = 0;
  int64_t total = 1;

  // The pieces for item `item` of `num_items`: of those that the item's thread will read itself, as
  // threads share items and as they share pieces.
  FarPieces of_item(int64_t item, int64_t num_items) const {
    if (reads == nullptr) return {};
    const int64_t thread = ((item + 1) * num_threads - 1) / num_items;
    const auto start_of = [&](int64_t count, int64_t i) { return count * i / num_threads; };
    const int64_t first_item = start_of(num_items, thread);
    const int64_t own_items = start_of(num_items, thread + 1) - first_item;
    const int64_t first_piece = start_of(reads->num_pieces(), thread);
    const int64_t own_pieces = start_of(reads->num_pieces(), thread + 1) - first_piece;
    const int64_t part = own_pieces * first / total;
    const int64_t size = own_pieces * end / total - part;
    const auto at = [&](int64_t index) { return first_piece + part + size * index / own_items; };
    return {reads, at(item - first_item), at(item - first_item + 1)};
  }
};

}  // namespace kvloom
