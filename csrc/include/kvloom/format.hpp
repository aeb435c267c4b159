// Formats of weights and activations, and where each value of a packed weight lies.
//
// A weight W [num_outputs, num_inputs] is packed in panels of 32 outputs. Inputs are padded to a
// multiple of 32 and outputs to whole panels, both with zeros. One panel holds:
//   F32   [padded_inputs][32] float
//   BF16  [padded_inputs / 2][32][2] bf16: pairs of inputs, as a dot product instruction reads them
//   Q8    per group of 32 inputs: codes [8 quads][32][4] u8, then 32 f16 scales d
//         value = d * (code - 128)
//   Q4    per group of 32 inputs: codes [4][32][4] u8, then 32 f16 scales d and 32 f16 offsets m
//         value = d * code + m; the low nibbles are quads 0..3 of the group, the high ones 4..7
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvloom/types.hpp"

namespace kvloom {

enum class Format { F32, BF16, Q8, Q4 };

// What a packed activation holds; S8 is int8 with one scale per row and group of 32.
enum class RowFormat { F32, BF16, S8 };

constexpr int kPanelOutputs = 32;
constexpr int kGroupInputs = 32;
constexpr int kQuadsPerGroup = kGroupInputs / 4;
constexpr int kQ8CodeBytes = kGroupInputs * kPanelOutputs;
constexpr int kQ4CodeBytes = kQ8CodeBytes / 2;
constexpr int kScaleBytes = 2 * kPanelOutputs;  // 32 f16 values
constexpr int kQ8GroupBytes = kQ8CodeBytes + kScaleBytes;
constexpr int kQ4GroupBytes = kQ4CodeBytes + 2 * kScaleBytes;

// Which output of the matrix is lane l of panel p.
enum class OutputOrder {
  Plain,  // 32 p + l
  // Gate and up stacked, [2 x size, num_inputs]: lanes 0..15 are gate rows 16 p + l, lanes 16..31
  // the same rows of up, so that one panel holds both factors of 16 gated values.
  GateUp,
};

// A packed weight; does not own its memory. `panels` is 64-byte aligned.
struct PackedWeight {
  Format format = Format::F32;
  OutputOrder order = OutputOrder::Plain;
  int num_outputs = 0;  // with GateUp: 2 x size
  int num_inputs = 0;
  uint8_t* panels = nullptr;
};

constexpr int num_groups(int num_inputs) {
  return static_cast<int>(cdiv(num_inputs, kGroupInputs));
}
constexpr int padded_inputs(int num_inputs) { return num_groups(num_inputs) * kGroupInputs; }

// Panels of a weight. GateUp halves are padded to 16 lanes each.
constexpr int num_panels(OutputOrder order, int num_outputs) {
  return static_cast<int>(order == OutputOrder::Plain ? cdiv(num_outputs, kPanelOutputs)
                                                      : cdiv(num_outputs / 2, kPanelOutputs / 2));
}

// Bytes that 32 outputs x 32 inputs take.
constexpr size_t group_bytes(Format format) {
  switch (format) {
    case Format::F32:
      return 4 * kGroupInputs * kPanelOutputs;
    case Format::BF16:
      return 2 * kGroupInputs * kPanelOutputs;
    case Format::Q8:
      return kQ8GroupBytes;
    case Format::Q4:
      return kQ4GroupBytes;
  }
  return 0;
}

constexpr size_t panel_bytes(Format format, int num_inputs) {
  return group_bytes(format) * static_cast<size_t>(num_groups(num_inputs));
}

// Bytes of a whole packed weight; what `panels` must point at. Allocate it zeroed.
constexpr size_t packed_weight_bytes(Format format, OutputOrder order, int num_outputs,
                                     int num_inputs) {
  return panel_bytes(format, num_inputs) * static_cast<size_t>(num_panels(order, num_outputs));
}

// Where an output's values are.
struct PanelLane {
  int panel;
  int lane;
};

constexpr PanelLane panel_lane(const PackedWeight& weight, int output) {
  if (weight.order == OutputOrder::Plain) {
    return {output / kPanelOutputs, output % kPanelOutputs};
  }
  constexpr int kHalf = kPanelOutputs / 2;
  const int size = weight.num_outputs / 2;
  const bool is_up = output >= size;
  const int row = is_up ? output - size : output;
  return {row / kHalf, row % kHalf + (is_up ? kHalf : 0)};
}

// The 32 x 32 group of a panel.
inline uint8_t* group_at(const PackedWeight& weight, int panel, int group) {
  return weight.panels +
         panel_bytes(weight.format, weight.num_inputs) * static_cast<size_t>(panel) +
         group_bytes(weight.format) * static_cast<size_t>(group);
}

// Within a group: byte offsets of one value or code. `input` is 0..31 within the group.
constexpr size_t f32_offset(int input, int lane) {
  return 4 * (static_cast<size_t>(input) * kPanelOutputs + lane);
}
constexpr size_t bf16_offset(int input, int lane) {
  return 2 * ((static_cast<size_t>(input) / 2 * kPanelOutputs + lane) * 2 + input % 2);
}
constexpr size_t q8_offset(int input, int lane) {
  return (static_cast<size_t>(input) / 4 * kPanelOutputs + lane) * 4 + input % 4;
}
// The byte that holds a Q4 code; input >= 16 is its high nibble.
constexpr size_t q4_offset(int input, int lane) { return q8_offset(input % 16, lane); }

}  // namespace kvloom
