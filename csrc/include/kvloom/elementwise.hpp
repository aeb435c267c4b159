// Element-wise operations on f32 rows: what GEMM epilogues do where operations are fused, apart.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kvloom/gemm_activation.hpp"
#include "kvloom/simd.hpp"

namespace kvloom {

// out = a + b over `size` values; out may be a or b.
struct AddArgs {
  const float* a;
  const float* b;
  float* out;
  int64_t size;
};

constexpr int64_t kAddValuesPerItem = 8192;

inline int64_t add_num_items(const AddArgs& args) { return cdiv(args.size, kAddValuesPerItem); }

inline void add_run_item(const AddArgs& args, int64_t item) {
  const int64_t end = std::min((item + 1) * kAddValuesPerItem, args.size);
  int64_t i = item * kAddValuesPerItem;
  for (; i + kLanes <= end; i += kLanes) store(args.out + i, load(args.a + i) + load(args.b + i));
  for (; i < end; ++i) args.out[i] = args.a[i] + args.b[i];
}

// out = activation(gate) * up, where a row of x is gate [size] and up [size] side by side.
struct GatedArgs {
  const float* x;  // [num_rows, x_stride]
  int64_t x_stride;
  int64_t num_rows;
  int64_t size;
  Activation activation;
  float* out;  // [num_rows, out_stride]
  int64_t out_stride;
};

inline int64_t gated_num_items(const GatedArgs& args) { return args.num_rows; }

inline void gated_run_item(const GatedArgs& args, int64_t item) {
  const float* gate = args.x + item * args.x_stride;
  const float* up = gate + args.size;
  float* out = args.out + item * args.out_stride;
  int64_t i = 0;
  for (; i + kLanes <= args.size; i += kLanes) {
    store(out + i, activate(args.activation, load(gate + i)) * load(up + i));
  }
  if (const int rest = static_cast<int>(args.size - i); rest > 0) {
    const vf32 last = activate(args.activation, load_partial(gate + i, rest));
    store_partial(out + i, last * load_partial(up + i, rest), rest);
  }
}

// out row i = x row rows[i].
struct SelectRowsArgs {
  const float* x;  // [*, x_stride]
  int64_t x_stride;
  const int32_t* rows;  // [num_rows]
  int64_t num_rows;
  int64_t size;
  float* out;  // [num_rows, out_stride]
  int64_t out_stride;
};

inline int64_t select_rows_num_items(const SelectRowsArgs& args) { return args.num_rows; }

inline void select_rows_run_item(const SelectRowsArgs& args, int64_t item) {
  const float* from = args.x + int64_t{args.rows[item]} * args.x_stride;
  std::copy(from, from + args.size, args.out + item * args.out_stride);
}

}  // namespace kvloom
