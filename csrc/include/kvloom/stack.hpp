// Products with the matrices of a stack, each with rows of its own: experts, or heads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvloom/gemm.hpp"

namespace kvloom {

// Weights of one shape and format, one after another; does not own their memory.
struct PackedStack {
  PackedWeight first;
  int num_matrices = 1;

  PackedWeight at(int index) const {
    PackedWeight weight = first;
    weight.panels +=
        packed_weight_bytes(first.format, first.order, first.num_outputs, first.num_inputs) *
        static_cast<size_t>(index);
    return weight;
  }
};

// Most bytes that a row packed for a weight takes, in whole cache lines: rows of one matrix begin
// at a multiple of it, whatever their number and so their format is.
constexpr size_t stack_row_bytes(Format weight, int num_inputs) {
  const size_t few = packed_row_bytes(row_format_for(weight, 1), num_inputs);
  const size_t many = packed_row_bytes(row_format_for(weight, 1 << 20), num_inputs);
  return static_cast<size_t>(
      round_up(static_cast<int64_t>(std::max(few, many)), int64_t{kCacheLineBytes}));
}

// Rows [first, first + count) of all matrices' rows, as they are packed for one of them.
struct StackRows {
  Format weight = Format::F32;  // that reads them
  int num_inputs = 0;
  uint8_t* data = nullptr;

  PackedRows at(int first, int count) const {
    return {row_format_for(weight, count), count, num_inputs,
            data + stack_row_bytes(weight, num_inputs) * static_cast<size_t>(first)};
  }
};

// Chunks of panels that each matrix is cut into, for so many rows of each.
inline int num_stack_chunks(const PackedWeight& weight, EpilogueKind kind, int num_rows,
                            int num_products, int num_threads) {
  Gemm gemm;
  gemm.weight = weight;
  gemm.epilogue.kind = kind;
  gemm.rows = {row_format_for(weight.format, num_rows), num_rows, weight.num_inputs, nullptr};
  // Each product needs only its share of the items that keep all threads busy.
  return std::max(1, plan_gemm(gemm, std::max(1, num_threads / num_products)).num_chunks);
}

// One chunk of one product, for all of its rows.
inline void run_stack_chunk(const Gemm& gemm, int chunk, int num_chunks, uint8_t* scratch) {
  GemmPlan plan = plan_gemm(gemm, 1);  // for its blocks: rows that stay in the cache
  plan.num_chunks = num_chunks;
  plan.num_items = plan.num_blocks * num_chunks;
  for (int block = 0; block < plan.num_blocks; ++block) {
    run_gemm_item(gemm, plan, block * num_chunks + chunk, scratch);
  }
}

}  // namespace kvloom
