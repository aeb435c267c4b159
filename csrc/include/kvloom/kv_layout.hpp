// Where the keys and values of a token lie. A layer's storage is a base pointer and a block stride;
// inside a block, KV head by KV head, lie sub-blocks of 16 tokens: keys, then values, in the order
// that dot products read them (a vector holds one number of 16 tokens when scores are computed, and
// neighbouring numbers of a head when values are summed).
//
//   F32   keys [head_size][16 tokens]               values [16 tokens][head_size_v]
//   BF16  keys [head_size / 2][16 tokens][2]        values [8 token pairs][head_size_v][2]
//   INT8  keys [head_size / 4][16 tokens][4] bytes u = 128 + code, then scales [head_size / 32][16
//   tokens] bf16
//         values [4 token quads][head_size_v][4] codes, then scales [head_size_v / 32][16 tokens]
//         bf16 value = scale * code; one scale for each token and group of 32 numbers
//
// A latent layout stores one row per token, which is the key, and whose first head_size_v numbers
// are the value: keys alone, as above. Attention brings the values of what it reads into their
// order once for all rows of an item (attention_latent.hpp), so that each byte is read of the cache
// once and both products run at full speed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvloom/types.hpp"

namespace kvloom {

enum class KVFormat { F32, BF16, INT8 };

constexpr int kSubBlockTokens = 16;
constexpr int kInt8Group = 32;
constexpr int kMaxHeadSize = 512;
constexpr int kMaxRowSize = 640;  // of latent rows

struct KVLayout {
  KVFormat format;
  int block_size;    // tokens, a multiple of 16
  int num_kv_heads;  // stored on this rank
  int head_size;     // numbers per key head
  int head_size_v;   // numbers per value head
  bool is_latent = false;

  // Why the kernels do not handle this layout, or nullptr if they do.
  const char* problem() const {
    if (block_size <= 0 || block_size % kSubBlockTokens != 0) {
      return "the block size must be a multiple of 16 tokens";
    }
    if (num_kv_heads <= 0) return "there must be at least one KV head";
    if (is_latent) return latent_problem();
    const int step = format == KVFormat::INT8 ? kInt8Group : 16;
    for (const int size : {head_size, head_size_v}) {
      if (size > 0 && size <= kMaxHeadSize && size % step == 0) continue;
      return format == KVFormat::INT8 ? "int8 needs head sizes that are multiples of 32 up to 512"
                                      : "head sizes must be multiples of 16 up to 512";
    }
    return nullptr;
  }

  // Bytes of one token's `size` numbers, times 16 tokens.
  size_t bytes_of(int size) const {
    const size_t count = static_cast<size_t>(size) * kSubBlockTokens;
    if (format == KVFormat::INT8) return count / kInt8Group * (kInt8Group + sizeof(uint16_t));
    return count * (format == KVFormat::F32 ? sizeof(float) : sizeof(uint16_t));
  }
  size_t key_bytes() const { return bytes_of(head_size); }      // of a sub-block
  size_t value_bytes() const { return bytes_of(head_size_v); }  // of a sub-block
  size_t sub_block_bytes() const { return key_bytes() + (is_latent ? 0 : value_bytes()); }
  size_t head_bytes() const {  // one KV head of a block
    return sub_block_bytes() * static_cast<size_t>(block_size / kSubBlockTokens);
  }
  // Equals page_size_bytes of kv/spec.py.
  size_t block_bytes() const { return head_bytes() * static_cast<size_t>(num_kv_heads); }

 private:
  const char* latent_problem() const {
    if (format == KVFormat::INT8) return "latent rows are stored as float32 or bfloat16, not int8";
    if (num_kv_heads != 1) return "there must be one latent row per token";
    if (head_size <= 0 || head_size > kMaxRowSize || head_size % 16 != 0) {
      return "latent rows must be multiples of 16 up to 640";
    }
    const bool is_valid = head_size_v > 0 && head_size_v <= head_size && head_size_v % 16 == 0;
    return is_valid ? nullptr : "the value must be a multiple of 16 numbers of the latent row";
  }
};

// One layer's blocks: block i begins at base + i * block_stride_bytes. Zeroed when allocated.
struct KVStorage {
  char* base;
  int64_t block_stride_bytes;
};

// The sub-block that holds the keys of `token` (0 <= token < block_size); its values follow them.
KVLOOM_INLINE char* sub_block(const KVLayout& layout, const KVStorage& storage, int64_t block,
                              int kv_head, int token) {
  return storage.base + block * storage.block_stride_bytes +
         static_cast<size_t>(kv_head) * layout.head_bytes() +
         static_cast<size_t>(token / kSubBlockTokens) * layout.sub_block_bytes();
}

}  // namespace kvloom
