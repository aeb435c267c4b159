// From a projection's rows to the cache: norm and rotation of heads, q written for attention, k and
// v stored.
#pragma once

#include <algorithm>
#include <cstring>

#include "kvloom/kv_layout.hpp"
#include "kvloom/rope.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// Attention reads q in this form: bf16 where keys are bf16, else f32.
constexpr bool has_bf16_queries(KVFormat format) { return format == KVFormat::BF16; }

// f32 heads of a step's tokens, wherever they lie.
struct HeadRows {
  const float* first = nullptr;  // of the first token: [num_heads, size]; nullptr: there are none
  int64_t stride = 0;            // floats from token to token

  const float* of(int token) const { return first + token * stride; }
};

// How heads are normalised and rotated, and q scaled, before they are stored.
struct QueryKeyForm {
  const float* rotations = nullptr;  // [max_positions, 2 * num_pairs] cos, then sin
  int num_pairs = 0;                 // 0: no rotation
  bool is_interleaved = false;  // numbers 2 i and 2 i + 1 rotate against each other, not i and i +
                                // num_pairs
  const float* q_norm = nullptr;  // [head_size], or none
  const float* k_norm = nullptr;  // [head_size], or none
  const float* v_norm = nullptr;  // [head_size_v], or none
  float norm_eps = 0.0f;
  bool norms_follow_rope = false;
  float q_scale = 1.0f;  // softmax scale * log2(e): attention exponentiates to base 2
  const float* position_scales = nullptr;  // [max_positions] more factors of q, or none
};

struct KVWriteArgs {
  KVLayout layout;
  KVStorage storage;  // unused without k
  int num_heads;      // query heads
  int num_tokens;     // of this step
  HeadRows q;
  HeadRows k;  // none: nothing is stored, the layer reads another one's keys and values
  HeadRows v;  // none: latent rows, whose values are in k
  const int64_t* positions;  // [num_tokens], each below the rows of the form's tables
  const int64_t* slots;      // [num_tokens] block * block_size + offset; -1 stores nothing
  QueryKeyForm form;
  void* q_out;  // [num_tokens, num_heads, head_size] bf16 or f32, see has_bf16_queries
};

// Tokens of a work item. Items write different bytes, whichever tokens they hold.
constexpr int kKVWriteTokens = 4;

inline int kv_write_num_items(const KVWriteArgs& args) {
  return static_cast<int>(cdiv(args.num_tokens, kKVWriteTokens));
}

// ---- One head of one token into its place of a sub-block ----
// Nothing but the token's own numbers is written: two tokens may share a unit, and other threads
// may be writing theirs.

inline void store_keys_f32(const float* k, int size, char* keys, int token) {
  for (int i = 0; i < size; ++i) {
    std::memcpy(keys + (i * kSubBlockTokens + token) * 4, k + i, sizeof(float));
  }
}
inline void store_values_f32(const float* v, int size, char* values, int token) {
  std::memcpy(values + token * size * 4, v, static_cast<size_t>(size) * sizeof(float));
}

inline void store_keys_bf16(const float* k, int size, char* keys, int token) {
  uint16_t rounded[kMaxRowSize];
  for (int i = 0; i < size; i += kLanes) store_bf16(rounded + i, load(k + i));
  for (int i = 0; i < size; i += 2) {
    std::memcpy(keys + (i / 2 * kSubBlockTokens + token) * 4, rounded + i, 4);
  }
}
inline void store_values_bf16(const float* v, int size, char* values, int token) {
  uint16_t rounded[kMaxHeadSize];
  for (int i = 0; i < size; i += kLanes) store_bf16(rounded + i, load(v + i));
  char* pairs = values + token / 2 * size * 4;
  for (int i = 0; i < size; i += kLanes) store_halves(pairs + i * 4, rounded + i, token % 2);
}

// 32 numbers -> codes, and a scale that bf16 holds. A NaN or an infinity makes the scale NaN.
inline uint16_t quantise_kv_group(const float* x, int8_t* codes) {
  constexpr float kTiny = 1e-30f;  // below it a group is 0, and 1 / scale stays finite
  vf32 max = {}, poison = {};
  for (int i = 0; i < kInt8Group; i += kLanes) {
    max = vmax(max, vabs(load(x + i)));
    poison = poison + (load(x + i) - load(x + i));
  }
  const float largest = reduce_max(max);
  const uint16_t scale = largest > kTiny ? f32_to_bf16(largest / 127.0f) : uint16_t{0};
  const vf32 inverse = broadcast(scale > 0 ? 1.0f / bf16_to_f32(scale) : 0.0f);
  for (int i = 0; i < kInt8Group; i += kLanes) {
    // bf16 may have rounded the scale down; for a NaN vmin takes its second.
    const vf32 code = vmin(load(x + i) * inverse, broadcast(127.0f));
    store_i8(codes + i, round_to_i32(vmax(code, broadcast(-127.0f))));
  }
  const float poisoned = reduce_add(poison);
  return poisoned == 0.0f ? scale : f32_to_bf16(poisoned);
}

inline void store_keys_int8(const float* k, int size, char* keys, int token) {
  char* scales = keys + size * kSubBlockTokens + token * 2;
  for (int group = 0; group < size / kInt8Group; ++group) {
    int8_t codes[kInt8Group];
    const uint16_t scale = quantise_kv_group(k + group * kInt8Group, codes);
    std::memcpy(scales + group * kSubBlockTokens * 2, &scale, 2);
    for (int i = 0; i < kInt8Group; i += 4) {
      uint32_t quad;
      std::memcpy(&quad, codes + i, 4);
      quad ^= 0x80808080u;  // u = code + 128
      std::memcpy(keys + ((group * kInt8Group + i) / 4 * kSubBlockTokens + token) * 4, &quad, 4);
    }
  }
}
inline void store_values_int8(const float* v, int size, char* values, int token) {
  char* scales = values + size * kSubBlockTokens + token * 2;
  char* to = values + token / 4 * size * 4 + token % 4;
  for (int group = 0; group < size / kInt8Group; ++group) {
    int8_t codes[kInt8Group];
    const uint16_t scale = quantise_kv_group(v + group * kInt8Group, codes);
    std::memcpy(scales + group * kSubBlockTokens * 2, &scale, 2);
    for (int i = 0; i < kInt8Group; ++i) {
      std::memcpy(to + (group * kInt8Group + i) * 4, codes + i, 1);
    }
  }
}

// One token's k [head_size] and v [head_size_v] of a KV head; v is unused in a latent layout.
inline void store_kv(const KVLayout& layout, char* keys, int token, const float* k,
                     const float* v) {
  char* values = keys + layout.key_bytes();
  switch (layout.format) {
    case KVFormat::F32:
      store_keys_f32(k, layout.head_size, keys, token);
      if (!layout.is_latent) store_values_f32(v, layout.head_size_v, values, token);
      break;
    case KVFormat::BF16:
      store_keys_bf16(k, layout.head_size, keys, token);
      if (!layout.is_latent) store_values_bf16(v, layout.head_size_v, values, token);
      break;
    case KVFormat::INT8:
      store_keys_int8(k, layout.head_size, keys, token);
      store_values_int8(v, layout.head_size_v, values, token);
      break;
  }
}

// ---- One token ----

// Norm and rotation of a head of q or k: x [head_size] -> head [head_size].
inline void turn_head(const KVWriteArgs& args, const float* x, const float* norm, int64_t position,
                      float* head) {
  const QueryKeyForm& form = args.form;
  const int size = args.layout.head_size, num_rotated = 2 * form.num_pairs;
  if (norm != nullptr && !form.norms_follow_rope) {
    norm_head(x, norm, form.norm_eps, size, head);
    x = head;
  }
  const float* rotation = form.rotations + position * num_rotated;
  if (form.is_interleaved) {
    rotate_neighbours(x, rotation, form.num_pairs, head);
  } else {
    rotate_head(x, rotation, form.num_pairs, head);
  }
  if (x != head) std::copy(x + num_rotated, x + size, head + num_rotated);
  if (norm != nullptr && form.norms_follow_rope) norm_head(head, norm, form.norm_eps, size, head);
}

// Queries times `factor` in the form of the keys.
inline void store_query(const KVWriteArgs& args, const float* head, float factor, int64_t row) {
  const int size = args.layout.head_size;
  const vf32 scale = broadcast(factor);
  if (has_bf16_queries(args.layout.format)) {
    uint16_t* q = static_cast<uint16_t*>(args.q_out) + row * size;
    for (int i = 0; i < size; i += kLanes) store_bf16(q + i, load(head + i) * scale);
  } else {
    float* q = static_cast<float*>(args.q_out) + row * size;
    for (int i = 0; i < size; i += kLanes) store(q + i, load(head + i) * scale);
  }
}

inline void write_queries(const KVWriteArgs& args, int token) {
  const int64_t position = args.positions[token];
  const float* scales = args.form.position_scales;
  const float factor = scales == nullptr ? args.form.q_scale : args.form.q_scale * scales[position];
  float head[kMaxRowSize];
  for (int h = 0; h < args.num_heads; ++h) {
    const float* q = args.q.of(token) + h * args.layout.head_size;
    turn_head(args, q, args.form.q_norm, position, head);
    store_query(args, head, factor, int64_t{token} * args.num_heads + h);
  }
}

inline void write_keys_and_values(const KVWriteArgs& args, int token) {
  const KVLayout& layout = args.layout;
  const int64_t block = args.slots[token] / layout.block_size;
  const int offset = static_cast<int>(args.slots[token] % layout.block_size);
  float key[kMaxRowSize], value[kMaxHeadSize];
  for (int h = 0; h < layout.num_kv_heads; ++h) {
    const float* k = args.k.of(token) + h * layout.head_size;
    turn_head(args, k, args.form.k_norm, args.positions[token], key);
    const float* v = layout.is_latent ? nullptr : args.v.of(token) + h * layout.head_size_v;
    if (v != nullptr && args.form.v_norm != nullptr) {
      norm_head(v, args.form.v_norm, args.form.norm_eps, layout.head_size_v, value);
      v = value;
    }
    char* keys = sub_block(layout, args.storage, block, h, offset);
    store_kv(layout, keys, offset % kSubBlockTokens, key, v);
  }
}

inline void kv_write_token(const KVWriteArgs& args, int token) {
  write_queries(args, token);
  if (args.k.first != nullptr && args.slots[token] >= 0) write_keys_and_values(args, token);
}

// Brings the lines near that a token's keys go to: each number, or dot product's worth of them, has
// a line of its own, and they were last touched a step ago.
// Inlined by force: see look_ahead_to_outputs in gemm_epilogue.hpp.
KVLOOM_INLINE void look_ahead_to_keys(const KVWriteArgs& args, int token) {
  if (args.k.first == nullptr || args.slots[token] < 0) return;
  const KVLayout& layout = args.layout;
  const int64_t block = args.slots[token] / layout.block_size;
  const int offset = static_cast<int>(args.slots[token] % layout.block_size);
  for (int h = 0; h < layout.num_kv_heads; ++h) {
    const char* keys = sub_block(layout, args.storage, block, h, offset);
    for (size_t at = 0; at < layout.key_bytes(); at += kCacheLineBytes) prefetch_l2(keys + at);
  }
}

inline void kv_write_run_item(const KVWriteArgs& args, int item) {
  const int first = item * kKVWriteTokens;
  const int end = std::min(first + kKVWriteTokens, args.num_tokens);
  for (int token = first; token < end; ++token) look_ahead_to_keys(args, token);
  for (int token = first; token < end; ++token) kv_write_token(args, token);
}

}  // namespace kvloom
