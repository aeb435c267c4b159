// What instructions bring near for later ones: each piece once, of blocks that attention reads.
#include "kvloom/far_reads.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "check.hpp"
#include "kvloom/attention_ahead.hpp"
#include "kvloom/program.hpp"

namespace kvloom {
namespace {

constexpr int64_t kStride = 1 << 20;

KVLOOM_TEST(pieces_cover_blocks) {
  alignas(kCacheLineBytes) static const char base[1] = {};
  const std::vector<int32_t> blocks = {4, 1, 7};
  for (const size_t block_bytes : {size_t{1024}, size_t{16384}, size_t{5} << 14}) {
    const FarReads reads(base, kStride, block_bytes, blocks);
    const int64_t per_block = reads.num_pieces() / 3;
    CHECK(static_cast<size_t>(per_block) * reads.piece_bytes() == block_bytes);
    for (int64_t i = 0; i < reads.num_pieces(); ++i) {
      const auto block = blocks[static_cast<size_t>(i / per_block)];
      CHECK(reads.piece(i) == reinterpret_cast<uintptr_t>(base) +
                                  static_cast<uintptr_t>(block * kStride) +
                                  static_cast<size_t>(i % per_block) * reads.piece_bytes());
    }
  }
}

// Brings near, and notes what.
class FetchingInstruction final : public Instruction {
 public:
  FetchingInstruction(int num_items, int num_spare)
      : num_items_(num_items), num_spare_(num_spare) {}

  int prepare(const StepContext&) override { return num_items_; }
  void run_item(int, const ThreadContext&) override {}
  int64_t num_spare_fetches() const override { return num_spare_; }
  void bring_near(const FarShare& share) override { share_ = share; }

  int num_items() const { return num_items_; }
  const FarShare& share() const { return share_; }

 private:
  int num_items_, num_spare_;
  FarShare share_;
};

class ReadingInstruction final : public Instruction {
 public:
  explicit ReadingInstruction(const std::vector<int32_t>& blocks)
      : reads_(nullptr, kStride, 1 << 15, blocks) {}

  int prepare(const StepContext&) override { return 1; }
  void run_item(int, const ThreadContext&) override {}
  const FarReads* far_reads() const override { return &reads_; }

 private:
  FarReads reads_;
};

KVLOOM_TEST(instructions_share_what_the_next_reader_reads) {
  for (const int num_threads : {1, 2, 3}) {
    std::vector<int32_t> blocks(50);
    ThreadTeam team(num_threads);
    Program program(team, {}, {1, 1});
    std::vector<FetchingInstruction*> all;
    for (const int reader : {0, 1, 2}) {
      for (const int num_items : {3, 8, 29}) {
        all.push_back(new FetchingInstruction(num_items, reader == 2 ? 0 : 5 + num_items));
        program.add(std::unique_ptr<Instruction>(all.back()));
      }
      program.add(std::unique_ptr<Instruction>(new ReadingInstruction(blocks)));
    }
    program.finish();
    for (const size_t num_blocks : {size_t{50}, size_t{1}, size_t{0}}) {
      blocks.resize(num_blocks);
      for (size_t reader = 0; reader < 2; ++reader) {
        std::vector<int> visits(2 * num_blocks);
        for (size_t i = 3 * reader; i < 3 * reader + 3; ++i) {
          for (int item = 0; item < all[i]->num_items(); ++item) {
            FarPieces pieces = all[i]->share().of_item(item, all[i]->num_items());
            CHECK(pieces.reads == all[3 * reader]->share().reads);
            for (int64_t at = pieces.next; at < pieces.end; ++at) ++visits[static_cast<size_t>(at)];
          }
        }
        CHECK(std::all_of(visits.begin(), visits.end(), [](int count) { return count == 1; }));
      }
      FarPieces none = all[8]->share().of_item(0, 29);
      CHECK(none.take() == 0);
    }
  }
}

KVLOOM_TEST(attention_tells_the_blocks_it_reads) {
  constexpr int kRequests = 5, kColumns = 40, kWindow = 108;
  std::vector<int32_t> table(kRequests * kColumns);
  std::iota(table.begin(), table.end(), 0);
  // Texts of 16 to 600 tokens, of which the last one or the last few are new.
  const int32_t seq_lens[kRequests] = {16, 17, 600, 300, 64};
  const int32_t query_start[kRequests + 1] = {0, 1, 2, 3, 63, 64};
  for (const int window : {0, kWindow}) {
    AttentionShape shape;
    shape.layout = {KVFormat::BF16, 16, 2, 64, 64};
    shape.num_heads = 6;
    shape.mask.window = window;
    AttentionPlan plan(shape, {2, 1000});
    plan.build({kRequests, query_start, seq_lens, table.data(), kColumns});
    std::vector<int32_t> blocks, expected;
    add_far_blocks(plan, 2, &blocks);
    for (int request = 0; request < kRequests; ++request) {
      // Of many queries the last ones' keys are enough: those before see nearly the same.
      const int num_queries = query_start[request + 1] - query_start[request];
      const int num_last = num_queries == 1 ? 1 : 12;  // of the last item
      const int first = window == 0 ? 0 : std::max(0, seq_lens[request] - num_last - window + 1);
      for (int i = first / 16; i * 16 < seq_lens[request]; ++i) {
        expected.push_back(request * kColumns + i);
      }
    }
    std::sort(blocks.begin(), blocks.end());
    CHECK(blocks == expected);
  }
}

KVLOOM_TEST(attention_tells_no_more_blocks_than_the_cache_holds) {
  constexpr int kRequests = 64, kColumns = 50;
  std::vector<int32_t> table(kRequests * kColumns, 3);
  std::vector<int32_t> seq_lens(kRequests, 16 * kColumns), query_start(kRequests + 1);
  std::iota(query_start.begin(), query_start.end(), 0);
  AttentionShape shape;
  shape.layout = {KVFormat::BF16, 16, 2, 64, 64};  // 8 KiB to a block
  shape.num_heads = 2;
  AttentionPlan plan(shape, {3, 1000});
  plan.build({kRequests, query_start.data(), seq_lens.data(), table.data(), kColumns});
  std::vector<int32_t> blocks;
  add_far_blocks(plan, 3, &blocks);
  CHECK(blocks.size() == 3 * (4 << 20) / 8192);
}

}  // namespace
}  // namespace kvloom
