// Weights and raw memory as Python holds them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvloom/arena.hpp"
#include "kvloom/format.hpp"
#include "kvloom/pack_weights.hpp"
#include "kvloom/stack.hpp"

namespace kvloom {

namespace nb = nanobind;

// Name tables refuse what they do not hold: names come from Python.
template <class T, size_t N>
T named(const std::pair<const char*, T> (&table)[N], const std::string& name) {
  for (const auto& [known, value] : table) {
    if (name == known) return value;
  }
  throw nb::value_error(("unknown name " + name).c_str());
}

constexpr std::pair<const char*, Format> kFormats[] = {
    {"F32", Format::F32}, {"BF16", Format::BF16}, {"Q8", Format::Q8}, {"Q4", Format::Q4}};
constexpr std::pair<const char*, SourceFormat> kSourceFormats[] = {
    {"F32", SourceFormat::F32},   {"BF16", SourceFormat::BF16}, {"F16", SourceFormat::F16},
    {"Q8_0", SourceFormat::Q8_0}, {"Q4_0", SourceFormat::Q4_0}, {"Q4_1", SourceFormat::Q4_1}};

constexpr int kMaxSize = 1 << 24;  // of one side of a weight: products with small numbers fit int

inline int checked_size(int64_t size, const char* what) {
  if (size < 1 || size > kMaxSize) throw nb::value_error(what);
  return static_cast<int>(size);
}

// What a weight is, before it has memory: a matrix, or a stack of them.
struct WeightShape {
  Format format;
  OutputOrder order;
  int num_outputs;
  int num_inputs;
  int num_matrices;

  size_t num_bytes() const {
    return packed_weight_bytes(format, order, num_outputs, num_inputs) *
           static_cast<size_t>(num_matrices);
  }
};

// A packed weight that owns (a share of) its memory.
class Weight {
 public:
  Weight(const WeightShape& shape, RegionPiece memory)
      : stack_{{shape.format, shape.order, shape.num_outputs, shape.num_inputs, memory.data},
               shape.num_matrices},
        memory_(std::move(memory)) {}

  // Pack rows of a checkpoint: bytes [num_rows, row_bytes], to outputs first_row and on, those of
  // one matrix after those of another.
  void pack(const std::string& source_format,
            const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows,
            int64_t first_row) {
    const SourceFormat format = named(kSourceFormats, source_format);
    const PackedWeight& packed = stack_.first;
    if (!can_pack(format, packed.format)) {
      throw nb::value_error("rows of this format cannot be packed without a change of values");
    }
    if (is_block_format(format) && packed.num_inputs % kGroupInputs != 0) {
      throw nb::value_error("blocks of 32 values need a row of whole blocks");
    }
    if (rows.shape(1) != source_row_bytes(format, packed.num_inputs)) {
      throw nb::value_error("rows do not have the bytes of num_inputs values");
    }
    const auto num_rows = static_cast<int64_t>(rows.shape(0));
    const int64_t most = int64_t{packed.num_outputs} * stack_.num_matrices;
    if (first_row < 0 || num_rows > most - first_row) {
      throw nb::value_error("there are more rows than outputs");
    }
    nb::gil_scoped_release unlocked;
    pack_stack(format, rows.data(), {first_row, num_rows});
  }

  // The only matrix.
  const PackedWeight& packed() const {
    if (stack_.num_matrices != 1) throw nb::value_error("a stack of matrices is no matrix");
    return stack_.first;
  }
  const PackedStack& stack() const { return stack_; }
  size_t num_bytes() const { return memory_.num_bytes; }
  const char* format_name() const {
    for (const auto& [name, format] : kFormats) {
      if (format == stack_.first.format) return name;
    }
    return "";
  }

 private:
  struct RowRange {
    int64_t first;
    int64_t count;
  };

  void pack_stack(SourceFormat format, const uint8_t* data, RowRange rows) {
    const int64_t num_outputs = stack_.first.num_outputs;
    const size_t row_bytes = source_row_bytes(format, stack_.first.num_inputs);
    while (rows.count > 0) {
      const int64_t first_output = rows.first % num_outputs;
      const int64_t count = std::min(rows.count, num_outputs - first_output);
      pack_outputs(stack_.at(static_cast<int>(rows.first / num_outputs)),
                   {format, data, static_cast<int>(first_output), static_cast<int>(count)});
      data += row_bytes * static_cast<size_t>(count);
      rows = {rows.first + count, rows.count - count};
    }
  }

  PackedStack stack_;
  RegionPiece memory_;
};

class WeightPool {
 public:
  Weight allocate(const std::string& format, bool is_gated, int64_t num_outputs, int64_t num_inputs,
                  int64_t num_matrices) {
    const WeightShape shape{named(kFormats, format),
                            is_gated ? OutputOrder::GateUp : OutputOrder::Plain,
                            checked_size(num_outputs, "num_outputs is out of range"),
                            checked_size(num_inputs, "num_inputs is out of range"),
                            checked_size(num_matrices, "num_matrices is out of range")};
    if (is_gated && num_outputs % 2 != 0) {
      throw nb::value_error("gate and up must have the same number of outputs");
    }
    return Weight(shape, pool_.allocate(shape.num_bytes()));
  }

 private:
  RegionPool pool_;
};

// Zeroed bytes with huge pages, as a numpy array that owns them.
inline nb::ndarray<nb::numpy, int8_t, nb::ndim<1>> allocate_bytes(int64_t num_bytes) {
  if (num_bytes < 1) throw nb::value_error("num_bytes must be positive");
  auto* region = new Region(static_cast<size_t>(num_bytes));
  nb::capsule owner(region, [](void* p) noexcept { delete static_cast<Region*>(p); });
  return {reinterpret_cast<int8_t*>(region->data()), {region->num_bytes()}, owner};
}

}  // namespace kvloom
