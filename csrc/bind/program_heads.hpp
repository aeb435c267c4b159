// What an attention layer of a program is given, checked: heads, memory, norms and tables.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kvloom/program_attention.hpp"
#include "program_weights.hpp"

namespace kvloom {

using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::pair<const char*, KVFormat> kKVFormats[] = {
    {"float32", KVFormat::F32}, {"bfloat16", KVFormat::BF16}, {"int8", KVFormat::INT8}};

inline void check(bool is_valid, const char* message) {
  if (!is_valid) throw nb::value_error(message);
}

// Heads, blocks and mask of layers of one KV cache group.
struct GroupShape {
  std::string kv_format;
  int block_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_size = 0;
  int head_size_v = 0;
  int window = 0;  // 0: none
  int chunk = 0;   // 0: none
  bool is_latent = false;
};

inline AttentionShape checked_heads(const GroupShape& shape) {
  check(shape.block_size <= 1 << 16 && shape.num_kv_heads <= 1 << 12,
        "attention: sizes are out of range");
  AttentionShape heads;
  heads.layout = {named(kKVFormats, shape.kv_format),
                  shape.block_size,
                  shape.num_kv_heads,
                  shape.head_size,
                  shape.head_size_v,
                  shape.is_latent};
  heads.num_heads = shape.num_heads;
  heads.mask = {shape.window, shape.chunk};
  if (const char* problem = heads.layout.problem()) throw nb::value_error(problem);
  check(shape.num_heads >= 1 && shape.num_heads <= 1 << 12 &&
            shape.num_heads % shape.num_kv_heads == 0,
        "attention: heads do not share KV heads evenly");
  check(shape.window >= 0 && shape.chunk >= 0 && (shape.window == 0 || shape.chunk == 0),
        "attention: a window or chunks, of positive sizes");
  return heads;
}

inline AttentionLimits checked_limits(int num_threads, int max_model_len) {
  check(num_threads >= 1 && num_threads <= 1 << 12, "num_threads is out of range");
  check(max_model_len >= 1 && max_model_len <= 1 << 24, "max_model_len is out of range");
  return {num_threads, max_model_len};
}

// QueryKeyForm as arrays.
struct QueryKeyArrays {
  std::optional<FloatTable> rotations;
  bool is_interleaved = false;
  std::optional<FloatArray> q_norm, k_norm, v_norm;
  float norm_eps = 0.0f;
  bool norms_follow_rope = false;
  float q_scale = 0.0f;
  std::optional<FloatArray> position_scales;
};

inline const float* checked_norm(const std::optional<FloatArray>& norm, int size) {
  if (!norm) return nullptr;
  check(norm->shape(0) == static_cast<size_t>(size), "the heads' norm does not fit");
  return norm->data();
}

// Lowers *num_positions to what the tables have rows for.
inline QueryKeyForm checked_form(const QueryKeyArrays& arrays, const KVLayout& layout,
                                 int* num_positions) {
  const auto count_positions = [&](size_t rows) {
    check(rows >= 1, "rope: the table is empty");
    *num_positions = static_cast<int>(std::min(rows, static_cast<size_t>(*num_positions)));
  };
  QueryKeyForm form;
  if (arrays.rotations) {
    const size_t columns = arrays.rotations->shape(1);
    check(columns % 2 == 0 && columns <= static_cast<size_t>(layout.head_size),
          "rope: more pairs than a head has");
    count_positions(arrays.rotations->shape(0));
    form.rotations = arrays.rotations->data();
    form.num_pairs = static_cast<int>(columns / 2);
  }
  if (arrays.position_scales) {
    count_positions(arrays.position_scales->shape(0));
    form.position_scales = arrays.position_scales->data();
  }
  form.is_interleaved = arrays.is_interleaved;
  form.q_norm = checked_norm(arrays.q_norm, layout.head_size);
  form.k_norm = checked_norm(arrays.k_norm, layout.head_size);
  form.v_norm = checked_norm(arrays.v_norm, layout.head_size_v);
  form.norm_eps = arrays.norm_eps;
  form.norms_follow_rope = arrays.norms_follow_rope;
  form.q_scale = arrays.q_scale;
  return form;
}

inline AttentionScoring checked_scoring(float soft_cap, const std::optional<FloatArray>& sinks,
                                        int num_heads) {
  check(soft_cap >= 0.0f, "attend: the soft cap must not be negative");
  if (!sinks) return {soft_cap, nullptr};
  check(sinks->shape(0) == static_cast<size_t>(num_heads), "attend: one sink per query head");
  return {soft_cap, sinks->data()};
}

// Block i of a layer begins at byte offset_bytes + i * (bytes of raw / num_blocks).
struct LayerMemory {
  Bytes raw;
  int64_t num_blocks = 0;
  int64_t offset_bytes = 0;
};

inline KVStorage checked_storage(const LayerMemory& memory, const KVLayout& layout) {
  const int64_t stride = static_cast<int64_t>(memory.raw.shape(0)) / memory.num_blocks;
  const int64_t block_bytes = static_cast<int64_t>(layout.block_bytes());
  check(block_bytes <= stride && memory.offset_bytes <= stride - block_bytes,
        "attention: the layer's memory is too small");
  return {reinterpret_cast<char*>(memory.raw.data()) + memory.offset_bytes, stride};
}

}  // namespace kvloom
