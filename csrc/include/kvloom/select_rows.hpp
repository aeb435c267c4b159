// Some rows of a matrix.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvloom {

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
