// Builds the instructions on f32 rows (program_rowwise.hpp of the kernels), checking what comes in.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/program_rowwise.hpp"
#include "program_builder.hpp"

namespace kvloom {

constexpr std::pair<const char*, MapKind> kMapKinds[] = {
    {"add", MapKind::Add},   {"multiply", MapKind::Multiply}, {"soft_cap", MapKind::SoftCap},
    {"silu", MapKind::Silu}, {"gelu", MapKind::Gelu},         {"gelu_tanh", MapKind::GeluTanh},
    {"tanh", MapKind::Tanh}};
constexpr std::pair<const char*, RunKind> kRunKinds[] = {{"rms_norm", RunKind::RmsNorm},
                                                         {"layer_norm", RunKind::LayerNorm},
                                                         {"add_norm", RunKind::AddNorm},
                                                         {"gaussian_top", RunKind::GaussianTop},
                                                         {"match_rms", RunKind::MatchRms}};

inline void check_alike(const ProgramBuilder& program, const Operand& x, const Operand& out) {
  program.check_floats(x);
  program.check_result(out);
  check(x.width == out.width && x.rows == out.rows, "the shapes of operand and result differ");
}

// b has the shape of a, or one value for each run of `size` values of a.
inline void add_map(ProgramBuilder& program, const std::string& kind, const Operand& a,
                    const Operand& b, int size, const Operand& out) {
  check_alike(program, a, out);
  program.check_floats(b);
  check(a.rows == b.rows && size >= 1 && a.width % size == 0, "map: runs do not fill a row");
  MapSecond second;
  second.operand = b;
  second.is_one = b.width != a.width;
  check(!second.is_one || b.width == a.width / size, "map: one value per value or run");
  const int run = second.is_one ? size : a.width;
  program.add<MapInstruction>(named(kMapKinds, kind), a, second, run, out.slot);
}

// Each run of a with the same weight, or with a single number.
inline void add_map_weight(ProgramBuilder& program, const std::string& kind, const Operand& a,
                           const FloatArray& weight, const Operand& out) {
  check_alike(program, a, out);
  const auto size = static_cast<int>(std::min<size_t>(weight.shape(0), 1u << 30));
  check(size >= 1 && a.width % size == 0, "map: the weight does not fit");
  MapSecond second;
  second.shared = weight.data();
  second.is_one = size == 1;
  program.add<MapInstruction>(named(kMapKinds, kind), a, second, size == 1 ? a.width : size,
                              out.slot);
}

inline void add_map_number(ProgramBuilder& program, const std::string& kind, const Operand& a,
                           float number, const Operand& out) {
  check_alike(program, a, out);
  program.add<MapInstruction>(named(kMapKinds, kind), a, number, out.slot);
}

// `y` is the second operand of those that have one, `weight` of norms, `size` of a run.
inline void add_run(ProgramBuilder& program, const std::string& kind, const Operand& x,
                    const std::optional<Operand>& y, const std::optional<FloatArray>& weight,
                    int size, float number, const Operand& out) {
  check_alike(program, x, out);
  RunOperation operation;
  operation.kind = named(kRunKinds, kind);
  operation.size = size;
  operation.number = number;
  check(size >= 1 && x.width % size == 0, "runs do not fill a row");
  const bool has_second = operation.kind == RunKind::AddNorm || operation.kind == RunKind::MatchRms;
  const bool has_weight =
      operation.kind != RunKind::GaussianTop && operation.kind != RunKind::MatchRms;
  check(has_second == y.has_value() && has_weight == weight.has_value(),
        "an operand is missing, or there is one too many");
  if (y) {
    program.check_floats(*y);
    check(y->width == x.width && y->rows == x.rows, "the shapes of the operands differ");
  }
  if (weight) {
    check(weight->shape(0) == static_cast<size_t>(size), "the weight does not fit");
    operation.weight = weight->data();
  }
  program.add<RunInstruction>(operation, x, y.value_or(x), out.slot);
}

// Gate and up side by side in each row of x.
inline void add_gated(ProgramBuilder& program, const Operand& x, const std::string& activation,
                      const Operand& out) {
  program.check_floats(x);
  program.check_result(out);
  check(x.rows == out.rows && x.width == 2 * int64_t{out.width}, "gated: x is gate and up");
  RunOperation operation;
  operation.kind = RunKind::Gated;
  operation.size = x.width;
  operation.activation = named(kActivations, activation);
  program.add<RunInstruction>(operation, x, x, out.slot);
}

// Each of `parts` has num_runs runs: side by side in those of `whole`, one part after another, they
// are put together there or, with `takes_apart`, taken from there.
inline void add_copy(ProgramBuilder& program, const std::vector<Operand>& parts,
                     const Operand& whole, int num_runs, bool takes_apart) {
  program.check_floats(whole);
  if (!takes_apart) program.check_result(whole);
  check(!parts.empty() && num_runs >= 1 && whole.width % num_runs == 0, "copy: no such runs");
  std::vector<ColumnCopy> copies;
  const int whole_run = whole.width / num_runs;
  int column = 0;
  for (const Operand& part : parts) {
    program.check_floats(part);
    if (takes_apart) program.check_result(part);
    check(part.rows == whole.rows && part.width % num_runs == 0 &&
              part.width / num_runs <= whole_run - column,
          "copy: the parts do not make up the whole");
    const int size = part.width / num_runs;
    Operand columns = whole;
    columns.stride = static_cast<int>(whole.row_stride());
    columns.first += column;
    copies.push_back(takes_apart ? ColumnCopy{columns, whole_run, part, size, size}
                                 : ColumnCopy{part, size, columns, whole_run, size});
    column += size;
  }
  check(column == whole_run, "copy: the parts do not make up the whole");
  program.add<CopyInstruction>(std::move(copies), num_runs);
}

// Rotates heads by a table of cosines and sines by position.
inline void add_rotate(ProgramBuilder& program, const FloatTable& table, bool is_interleaved,
                       const Operand& x, int head_size, const Operand& out) {
  check_alike(program, x, out);
  check(x.rows == RowCount::Tokens, "rotate: only tokens have positions");
  check(table.shape(0) >= static_cast<size_t>(program.sizes().max_model_len),
        "rotate: the table is too short");
  check(head_size >= 1 && x.width % head_size == 0, "rotate: heads do not fill a row");
  const size_t columns = table.shape(1);
  check(columns % 2 == 0 && columns >= 2 && columns <= static_cast<size_t>(head_size),
        "rotate: more pairs than a head has");
  const PositionTable positions{table.data(), static_cast<int>(columns), is_interleaved};
  program.add<RotateInstruction>(positions, x, head_size, out.slot);
}

// Multiplies rows by a table of factors by position.
inline void add_scale_by_position(ProgramBuilder& program, const FloatArray& table,
                                  const Operand& x, const Operand& out) {
  check_alike(program, x, out);
  check(x.rows == RowCount::Tokens, "scale_by_position: only tokens have positions");
  check(table.shape(0) >= static_cast<size_t>(program.sizes().max_model_len),
        "scale_by_position: the table is too short");
  program.add<RotateInstruction>(PositionTable{table.data(), 1, false}, x, x.width, out.slot);
}

inline void bind_rowwise(nb::class_<ProgramBuilder>& program) {
  program
      .def("map", &add_map, nb::arg("kind"), nb::arg("a"), nb::arg("b"), nb::arg("size"),
           nb::arg("out"))
      .def("map_weight", &add_map_weight, nb::arg("kind"), nb::arg("a"),
           nb::arg("weight").noconvert(), nb::arg("out"), nb::keep_alive<1, 4>())
      .def("map_number", &add_map_number, nb::arg("kind"), nb::arg("a"), nb::arg("number"),
           nb::arg("out"))
      .def("run", &add_run, nb::arg("kind"), nb::arg("x"), nb::arg("y").none(),
           nb::arg("weight").noconvert().none(), nb::arg("size"), nb::arg("number"), nb::arg("out"),
           nb::keep_alive<1, 5>())
      .def("gated", &add_gated, nb::arg("x"), nb::arg("activation"), nb::arg("out"))
      .def("copy", &add_copy, nb::arg("parts"), nb::arg("whole"), nb::arg("num_runs"),
           nb::arg("takes_apart"))
      .def("rotate", &add_rotate, nb::arg("table").noconvert(), nb::arg("is_interleaved"),
           nb::arg("x"), nb::arg("head_size"), nb::arg("out"), nb::keep_alive<1, 2>())
      .def("scale_by_position", &add_scale_by_position, nb::arg("table").noconvert(), nb::arg("x"),
           nb::arg("out"), nb::keep_alive<1, 2>());
}

}  // namespace kvloom
