// Attention under sanitizers and on emulated machines, against sums in double precision.
// tests/kernels/test_attention.py does more where Python runs.
#include "kvloom/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.hpp"
#include "kvloom/kv_write.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr int kNumBlocks = 24;

// One layer whose pool is full of NaNs before it is written.
struct Layer {
  explicit Layer(const AttentionShape& layer_shape)
      : shape(layer_shape),
        // Exactly as many bytes as needed, so that the address sanitizer sees a step beyond.
        memory(kNumBlocks * shape.layout.block_bytes(), static_cast<char>(0xff)),
        storage{memory.data(), static_cast<int64_t>(shape.layout.block_bytes())} {
    for (int i = 0; i < kNumBlocks; ++i) table[static_cast<size_t>(i)] = (i * 7 + 3) % kNumBlocks;
  }

  AttentionShape shape;
  std::vector<char> memory;
  KVStorage storage;
  int32_t table[kNumBlocks];  // of the one request
};

float as_float(const void* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}
float as_bf16(const char* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return bf16_to_f32(x);
}

// Number `i` of a token's key in a sub-block, by the layout's description.
float read_key(const KVLayout& layout, const char* sub, int token, int i) {
  if (layout.format == KVFormat::F32) return as_float(sub + (i * 16 + token) * 4);
  if (layout.format == KVFormat::BF16) return as_bf16(sub + (i / 2 * 16 + token) * 4 + i % 2 * 2);
  const int code = static_cast<uint8_t>(sub[(i / 4 * 16 + token) * 4 + i % 4]) - 128;
  return static_cast<float>(code) *
         as_bf16(sub + 16 * layout.head_size + (i / 32 * 16 + token) * 2);
}
float read_value(const KVLayout& layout, const char* sub, int token, int i) {
  const int size = layout.head_size_v;
  if (layout.is_latent) return read_key(layout, sub, token, i);
  const char* values = sub + layout.key_bytes();
  if (layout.format == KVFormat::F32) return as_float(values + (token * size + i) * 4);
  if (layout.format == KVFormat::BF16) {
    return as_bf16(values + (token / 2 * size + i) * 4 + token % 2 * 2);
  }
  const int code = static_cast<int8_t>(values[(token / 4 * size + i) * 4 + token % 4]);
  return static_cast<float>(code) * as_bf16(values + 16 * size + (i / 32 * 16 + token) * 2);
}

struct Queries {
  std::vector<uint16_t> bf16;
  std::vector<float> f32;

  explicit Queries(size_t count) : bf16(count), f32(count) {}
  void* data(KVFormat format) {
    return has_bf16_queries(format) ? static_cast<void*>(bf16.data()) : f32.data();
  }
  float at(KVFormat format, size_t i) const {
    return has_bf16_queries(format) ? bf16_to_f32(bf16[i]) : f32[i];
  }
};

// Writes the tokens of positions 0 .. num_tokens - 1; returns their queries.
Queries write_tokens(Layer& layer, int num_tokens, Random& random) {
  const AttentionShape& shape = layer.shape;
  const KVLayout& layout = shape.layout;
  const int num_keys = (shape.num_heads + layout.num_kv_heads) * layout.head_size;
  const int width = num_keys + (layout.is_latent ? 0 : layout.num_kv_heads * layout.head_size_v);
  const std::vector<float> qkv = random.reals(int64_t{num_tokens} * width);
  const int num_pairs = layout.head_size / 2 - 3;
  const std::vector<float> rotations = random.reals(int64_t{num_tokens} * 2 * num_pairs);
  std::vector<int64_t> positions, slots;
  for (int i = 0; i < num_tokens; ++i) {
    positions.push_back(i);
    slots.push_back(int64_t{layer.table[i / layout.block_size]} * layout.block_size +
                    i % layout.block_size);
  }
  Queries q(static_cast<size_t>(num_tokens * shape.num_heads * layout.head_size));
  KVWriteArgs args = {};
  args.layout = layout;
  args.storage = layer.storage;
  args.num_heads = shape.num_heads;
  args.num_tokens = num_tokens;
  args.q = {qkv.data(), width};
  args.k = {qkv.data() + shape.num_heads * layout.head_size, width};
  if (!layout.is_latent) args.v = {qkv.data() + num_keys, width};
  args.positions = positions.data();
  args.slots = slots.data();
  args.form.rotations = rotations.data();
  args.form.num_pairs = num_pairs;
  args.form.is_interleaved = num_tokens % 2 == 1;
  args.form.q_scale = 1.5f;
  args.q_out = q.data(layout.format);
  for (int i = 0; i < kv_write_num_items(args); ++i) kv_write_run_item(args, i);
  return q;
}

// A score of each query head that has no value, in some of the tests.
constexpr float kSinks[] = {2.0f, -3.0f, 0.5f, 7.0f, 1.0f, -1.0f, 0.0f,
                            4.0f, 3.0f,  2.5f, 6.0f, 0.1f, 5.0f,  -2.0f};
constexpr float kSoftCap = 3.0f;

// Queries [first, end) of the one request. Columns of the block table that no query sees name a
// block that is nowhere, or are not there: a cut table begins with the first column that is seen.
std::vector<float> attend(const Layer& layer, const AttentionScoring& scoring, Queries& q,
                          int first, int end, bool is_cut) {
  const AttentionShape& shape = layer.shape;
  const KVLayout& layout = shape.layout;
  AttentionPlan plan(shape, {2, 512});
  std::vector<int32_t> table(layer.table, layer.table + kNumBlocks);
  const int32_t first_column = shape.mask.first_visible(first) / layout.block_size;
  std::fill_n(table.begin(), first_column, 1 << 30);
  if (is_cut) table.erase(table.begin(), table.begin() + first_column);
  const int32_t query_start[2] = {0, end - first};
  const int32_t seq_len = end;
  plan.build({1, query_start, &seq_len, table.data(), static_cast<int64_t>(table.size()),
              is_cut ? &first_column : nullptr});
  const int width = shape.num_heads * layout.head_size_v;
  std::vector<float> out(static_cast<size_t>((end - first) * width));
  std::vector<float> states(attention_states_floats(plan));
  std::vector<char> scratch(2 * attention_scratch_bytes(shape));
  const size_t number = has_bf16_queries(layout.format) ? 2 : 4;
  const size_t skipped = static_cast<size_t>(first * shape.num_heads * layout.head_size) * number;
  const AttentionArgs args = {&plan,
                              layer.storage,
                              static_cast<char*>(q.data(layout.format)) + skipped,
                              {out.data(), width, false},
                              states.data(),
                              scratch.data(),
                              scoring};
  for (int i = plan.num_items() - 1; i >= 0; --i) attention_run_item(args, i, i - 1, i % 2);
  return out;
}

// The greatest error of one query head's result.
double error_of(const Layer& layer, const AttentionScoring& scoring, const Queries& q, int position,
                int head, const float* out) {
  const KVLayout& layout = layer.shape.layout;
  const size_t at =
      static_cast<size_t>((position * layer.shape.num_heads + head) * layout.head_size);
  std::vector<double> scores, sums(static_cast<size_t>(layout.head_size_v));
  const auto sub = [&](int key) {
    return sub_block(layout, layer.storage, layer.table[key / layout.block_size],
                     head / layer.shape.heads_per_kv(), key % layout.block_size);
  };
  const int first_key = layer.shape.mask.first_visible(position);
  for (int key = first_key; key <= position; ++key) {
    double score = 0;
    for (int i = 0; i < layout.head_size; ++i) {
      score += double{q.at(layout.format, at + static_cast<size_t>(i))} *
               read_key(layout, sub(key), key % 16, i);
    }
    const double cap = scoring.soft_cap;
    scores.push_back(cap > 0 ? cap * std::tanh(score / cap) : score);
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  double total = scoring.sinks == nullptr ? 0 : std::exp2(scoring.sinks[head] - max), error = 0;
  for (int key = first_key; key <= position; ++key) {
    const double weight = std::exp2(scores[static_cast<size_t>(key - first_key)] - max);
    total += weight;
    for (int i = 0; i < layout.head_size_v; ++i) {
      sums[static_cast<size_t>(i)] += weight * read_value(layout, sub(key), key % 16, i);
    }
  }
  for (int i = 0; i < layout.head_size_v; ++i) {
    const double difference = std::abs(out[i] - sums[static_cast<size_t>(i)] / total);
    error = difference <= error ? error : difference;  // a NaN is an error as well
  }
  return error;
}

void check_shape(const AttentionShape& shape, double tolerance,
                 const AttentionScoring& scoring = {}) {
  constexpr int kSteps[][2] = {{0, 1}, {0, 19}, {30, 31}, {256, 257}, {250, 290}};
  Random random(5);
  for (const auto& step : kSteps) {
    Layer layer(shape);
    const int first = step[0], end = step[1];
    Queries q = write_tokens(layer, end, random);
    const std::vector<float> out = attend(layer, scoring, q, first, end, false);
    CHECK(attend(layer, scoring, q, first, end, true) == out);
    const int size = shape.layout.head_size_v;
    for (int position = first; position < end; position += 5) {
      for (int head = 0; head < shape.num_heads; ++head) {
        const int row = (position - first) * shape.num_heads + head;
        CHECK(error_of(layer, scoring, q, position, head, out.data() + row * size) <= tolerance);
      }
    }
  }
}

}  // namespace

KVLOOM_TEST(attention_equals_its_definition) {
  const AttentionShape shapes[] = {
      {{KVFormat::F32, 16, 2, 32, 32}, 6},
      {{KVFormat::F32, 32, 1, 64, 32}, 7},
      {{KVFormat::F32, 48, 1, 32, 96}, 1},
      {{KVFormat::F32, 64, 1, 96, 64}, 14},
  };
  for (AttentionShape shape : shapes) {
    check_shape(shape, 4e-6);
    shape.layout.format = KVFormat::BF16;
    check_shape(shape, 6e-3);
    shape.layout.format = KVFormat::INT8;
    check_shape(shape, 2e-2);  // the queries are int8 here and exact in the twin
  }
  check_shape({{KVFormat::F32, 16, 1, 80, 112}, 2}, 4e-6);
  check_shape({{KVFormat::BF16, 16, 1, 80, 112}, 2}, 6e-3);
}

KVLOOM_TEST(masked_attention_equals_its_definition) {
  constexpr AttentionMask kMasks[] = {{1, 0}, {40, 0}, {256, 0}, {0, 16}, {0, 100}};
  for (const AttentionMask& mask : kMasks) {
    AttentionShape shape = {{KVFormat::F32, 16, 2, 32, 64}, 6, mask};
    check_shape(shape, 4e-6);
    check_shape(shape, 4e-6, {kSoftCap, kSinks});
    shape = {{KVFormat::BF16, 32, 1, 64, 32}, 13, mask};
    check_shape(shape, 6e-3, {0.0f, kSinks});
    shape = {{KVFormat::INT8, 48, 1, 32, 64}, 2, mask};
    check_shape(shape, 2e-2, {kSoftCap, nullptr});
  }
}

KVLOOM_TEST(latent_attention_equals_its_definition) {
  check_shape({{KVFormat::F32, 16, 1, 80, 64, true}, 5}, 4e-6);
  check_shape({{KVFormat::BF16, 32, 1, 80, 64, true}, 14}, 6e-3);
  check_shape({{KVFormat::BF16, 16, 1, 48, 48, true}, 1, {20, 0}}, 6e-3, {0.0f, kSinks});
}

KVLOOM_TEST(merging_a_state_that_saw_nothing_changes_nothing) {
  Random random(9);
  constexpr int kSize = 32, kRows = 3;
  std::vector<float> a = random.reals(kRows * (kSize + kStateExtraFloats));
  std::vector<float> b = a, nothing(a.size());
  clear_states(states_at(nothing.data(), kRows, kSize), kRows, kSize);
  merge_states(states_at(a.data(), kRows, kSize), states_at(nothing.data(), kRows, kSize), kRows,
               kSize);
  CHECK(a == b);
  merge_states(states_at(nothing.data(), kRows, kSize), states_at(b.data(), kRows, kSize), kRows,
               kSize);
  const size_t used = kRows * (kSize + 2);
  CHECK(std::equal(b.begin(), b.begin() + used, nothing.begin()));
}

KVLOOM_TEST(rough_exp2_is_exact_at_its_ends) {
  CHECK(rough_exp2(broadcast(0.0f))[0] == 1.0f);
  CHECK(rough_exp2(broadcast(-std::numeric_limits<float>::infinity()))[0] == 0.0f);
  CHECK(std::isnan(rough_exp2(broadcast(std::numeric_limits<float>::quiet_NaN()))[0]));
  for (float x = 0.0f; x > -125.0f; x -= 0.037f) {
    CHECK_NEAR(rough_exp2(broadcast(x))[0] / std::exp2(x), 1.0, 1.1e-4);
  }
}

}  // namespace kvloom
