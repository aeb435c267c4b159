// Builds a program instruction by instruction, refusing what does not fit together, and runs it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/program_instructions.hpp"
#include "kvloom/program_screen.hpp"
#include "program_heads.hpp"
#include "program_step.hpp"
#include "program_weights.hpp"

namespace kvloom {

constexpr std::pair<const char*, Activation> kActivations[] = {
    {"silu", Activation::Silu},
    {"gelu", Activation::Gelu},
    {"gelu_tanh", Activation::GeluTanh},
    {"swiglu_clamped", Activation::SwigluClamped}};

// The sizes that a program is made for, as Python gives them.
struct ProgramSizes {
  int max_num_tokens = 0;
  int max_num_rows = 0;
  int max_num_requests = 0;
  int max_model_len = 0;
};

class ProgramBuilder {
 public:
  ProgramBuilder(ThreadTeam& team, const ProgramSizes& sizes, const std::vector<SlotSpec>& slots)
      : sizes_(sizes), slots_(slots), num_threads_(team.num_threads()) {
    const int most = 1 << 20;
    for (const int size : {sizes.max_num_tokens, sizes.max_num_rows, sizes.max_num_requests}) {
      check(size >= 1 && size <= most, "a size of the program is out of range");
    }
    check(sizes.max_model_len >= 1 && sizes.max_model_len <= 1 << 24,
          "max_model_len is out of range");
    program_ = std::make_unique<Program>(team, slots,
                                         StepCapacity{sizes.max_num_tokens, sizes.max_num_rows});
  }

  // While the steps are still there that it may have to finish.
  ~ProgramBuilder() { program_.reset(); }
  ProgramBuilder(const ProgramBuilder&) = delete;
  ProgramBuilder& operator=(const ProgramBuilder&) = delete;

  void embedding(const Weight& table, int64_t first_row, const Operand& out) {
    check_result(out);
    check(table.packed().num_inputs == out.width, "embedding: width is not the table's");
    check(table.packed().order == OutputOrder::Plain, "embedding: rows must lie in order");
    check(first_row >= 0 && first_row <= INT32_MAX, "embedding: first_row is out of range");
    add<EmbeddingInstruction>(table.packed(), static_cast<int>(first_row), out);
  }

  void pack(const Operand& x, const std::optional<FloatArray>& norm, float eps,
            const Weight& weight, int out_slot) {
    check_floats(x);
    const PackedWeight& packed = weight.packed();
    check(packed.num_inputs == x.width, "pack: width is not the weight's");
    check_packed(packed.format, x, out_slot);
    if (!norm) {
      add<PackInstruction>(x, packed.format, out_slot);
      return;
    }
    const NormWeight norm_weight{norm->data(), static_cast<int>(norm->shape(0)), eps};
    check(norm_weight.size == x.width, "pack: the norm does not fit");
    add<PackInstruction>(x, norm_weight, packed.format, out_slot);
  }

  // `kind` is store, add, gated, or logits: the program's result, which a step may want the best
  // of.
  void linear(int x_slot, const Weight& weight, const std::optional<FloatArray>& bias,
              const std::string& kind, const std::string& activation, const Operand& out) {
    constexpr std::pair<const char*, EpilogueKind> kinds[] = {{"store", EpilogueKind::Store},
                                                              {"add", EpilogueKind::Add},
                                                              {"gated", EpilogueKind::GatedStore},
                                                              {"logits", EpilogueKind::Store}};
    check_result(out);
    ProductResult result;
    result.kind = named(kinds, kind);
    result.are_logits = kind == "logits";
    check(!result.are_logits || out.width > 1, "linear: the best of one logit is no choice");
    result.out = out;
    check_product(weight.packed(), x_slot, result, bias);
    if (result.kind == EpilogueKind::GatedStore)
      result.activation = named(kActivations, activation);
    add<GemmInstruction>(weight.packed(), x_slot, result);
  }

  // The program's result, which a step may want the best of: found by a screen of the weight's
  // then.
  void screened_logits(int x_slot, const Weight& weight, const Screen& screen, const Operand& out) {
    check(out.rows == RowCount::Logits, "logits: a row for each row of logits");
    check_result(out);
    check(screen.exact().panels == weight.packed().panels,
          "logits: the screen is another weight's");
    check(out.width > 1, "logits: the best of one is no choice");
    ProductResult result;
    result.are_logits = result.are_screened = true;
    result.out = out;
    check_product(weight.packed(), x_slot, result, std::nullopt);
    auto head = std::make_shared<ScreenedHead>(screen, x_slot, out, sizes_.max_num_rows);
    add<CoarseRowsInstruction>(head);
    add<EstimateInstruction>(head);
    add<CountCandidatesInstruction>(head);
    add<CandidatesInstruction>(head);
    add<WholeHeadInstruction>(head);
    add<GemmInstruction>(weight.packed(), x_slot, result);
  }

  // gated_linear whose result is packed for the next weight. `out.slot` holds packed rows.
  void gated_pack(int x_slot, const Weight& weight, const std::optional<FloatArray>& bias,
                  const std::string& activation, const Weight& next, const Operand& out) {
    ProductResult result;
    result.kind = EpilogueKind::GatedPack;
    result.activation = named(kActivations, activation);
    result.out = out;
    result.packed_for = next.packed().format;
    check_slot(out.slot, out.rows);
    check(next.packed().num_inputs == out.width, "gated_pack: width is not the next weight's");
    check_packed(result.packed_for, out, out.slot);
    check_product(weight.packed(), x_slot, result, bias);
    add<GemmInstruction>(weight.packed(), x_slot, result);
  }

  void select_rows(const Operand& x, int out_slot) {
    check_floats(x);
    check(x.rows == RowCount::Tokens, "select_rows: x must have a row per token");
    check_floats({out_slot, RowCount::Logits, x.width});
    add<SelectRowsInstruction>(x, out_slot);
  }

  // Returns the index that layers name it by. `group` is that of the KV cache.
  int attention_group(int group, const GroupShape& shape, int64_t num_blocks) {
    check_open();
    const AttentionShape heads = checked_heads(shape);
    check(num_blocks >= 1 && num_blocks <= INT32_MAX, "attention: num_blocks is out of range");
    check(group >= 0 && group <= static_cast<int>(groups_.size()), "attention: groups in order");
    if (group == static_cast<int>(groups_.size()))
      groups_.push_back({shape.block_size, num_blocks, heads.mask});
    check(groups_[group].block_size == shape.block_size, "attention: one block size per group");
    check(groups_[group].mask == heads.mask, "attention: one mask per group");
    groups_[group].num_blocks = std::min(groups_[group].num_blocks, num_blocks);
    const AttentionLimits limits = checked_limits(num_threads_, sizes_.max_model_len);
    auto planner = std::make_unique<AttentionGroup>(group, heads, limits);
    attention_groups_.push_back(planner.get());
    program_->add(std::unique_ptr<StepPlanner>(std::move(planner)));
    return static_cast<int>(attention_groups_.size()) - 1;
  }

  // Without k and v nothing is stored; latent layouts have no v.
  void store_qkv(int group_index, const LayerMemory& memory, const QueryKeyArrays& arrays,
                 const Columns& q, const std::optional<Columns>& k, const std::optional<Columns>& v,
                 int q_slot) {
    const AttentionGroup& group = attention_group_at(group_index);
    const AttentionShape& shape = group.plan().shape();
    const KVLayout& layout = shape.layout;
    check(v.has_value() == (k.has_value() && !layout.is_latent), "store_qkv: k and v, or neither");
    check_columns(q, shape.num_heads * layout.head_size);
    if (k) check_columns(*k, layout.num_kv_heads * layout.head_size);
    if (v) check_columns(*v, layout.num_kv_heads * layout.head_size_v);
    check_queries(shape, q_slot);
    const QueryKeyForm form = checked_form(arrays, layout, &num_positions_);
    const QueryKeyValue heads = {q, k.value_or(Columns{}), v.value_or(Columns{})};
    add<StoreQkvInstruction>(group, storage_of(memory, group), form, heads, q_slot);
  }

  void attend(int group_index, const LayerMemory& memory, int q_slot, const Operand& out,
              float soft_cap, const std::optional<FloatArray>& sinks) {
    const AttentionGroup& group = attention_group_at(group_index);
    const AttentionShape& shape = group.plan().shape();
    check_queries(shape, q_slot);
    check_floats(out);
    check(out.rows == RowCount::Tokens && out.width == shape.num_heads * shape.layout.head_size_v,
          "attend: width is not that of all heads");
    const AttentionScoring scoring = checked_scoring(soft_cap, sinks, shape.num_heads);
    add<AttendInstruction>(group, storage_of(memory, group), scoring, q_slot, out.slot);
  }

  void end_segment() {
    check_open();
    program_->end_segment();
  }

  // After the last instruction.
  void finish() {
    check_open();
    program_->finish();
    const StepLimits limits{sizes_.max_num_tokens, sizes_.max_num_rows, sizes_.max_num_requests,
                            max_position()};
    for (StartedStep& one : steps_) one.checked = std::make_unique<CheckedStep>(limits, groups_);
  }

  int begin(const BatchArrays& batch, const std::vector<GroupArrays>& groups) {
    StartedStep& next = next_step();
    next.checked->set(batch, groups);
    // With the interpreter's lock: a plan is short, and whoever took the lock meanwhile would keep
    // it longer.
    program_->begin(next.checked->step());
    return publish(next);
  }

  void run_segment(int segment) {
    check(step_ != nullptr, "begin a step first");
    check(segment >= 0 && segment < program_->num_segments(), "there is no such segment");
    check(!is_busy_, "another thread is running this program");
    const Busy busy(is_busy_);
    nb::gil_scoped_release unlocked;
    program_->run_segment(segment);
  }

  // begin() and all segments, behind what the team has begun; returns at once. The team's finish()
  // waits for it.
  int start(const BatchArrays& batch, const std::vector<GroupArrays>& groups,
            const std::optional<LateArrays>& late) {
    StartedStep& next = next_step();
    next.checked->set(batch, groups, late ? &*late : nullptr);
    next.ticket = program_->start(next.checked->step(), next.run);
    return publish(next);
  }

  // The f32 rows of this step in a slot: valid until the next step begins.
  nb::ndarray<nb::numpy, float, nb::ndim<2>> view(const Operand& operand, nb::handle owner) {
    check(step_ != nullptr, "begin a step first");
    check_result(operand);
    const size_t num_rows = static_cast<size_t>(num_rows_of(*step_, operand.rows));
    return {program_->arena().floats(operand.slot),
            {num_rows, static_cast<size_t>(operand.width)},
            owner};
  }

  int num_segments() const { return program_->num_segments(); }

  // ---- For the builders of other instructions: build_rowwise.hpp, build_stacks.hpp ----

  template <class T, class... Arguments>
  void add(Arguments&&... arguments) {
    check_open();
    program_->add(
        std::unique_ptr<Instruction>(std::make_unique<T>(std::forward<Arguments>(arguments)...)));
  }

  const SlotSpec& check_slot(int slot, RowCount rows) const {
    check(slot >= 0 && slot < static_cast<int>(slots_.size()), "there is no such slot");
    check(slots_[slot].rows == rows, "the slot has other rows");
    return slots_[slot];
  }

  void check_floats(const Operand& operand) const {
    const SlotSpec& slot = check_slot(operand.slot, operand.rows);
    check(operand.width >= 1 && operand.first >= 0 && operand.stride >= 0 &&
              int64_t{operand.first} + operand.width <= operand.row_stride(),
          "the columns are not within their rows");
    check(slot.row_bytes >= static_cast<size_t>(operand.row_stride()) * sizeof(float),
          "the slot's rows are too short");
  }

  // Rows that an instruction writes.
  void check_result(const Operand& out) const {
    check_floats(out);
    check(out.row_stride() == out.width, "results must be whole rows");
  }

  // Rows packed for a weight, in whichever form the number of rows asks for.
  void check_packed(Format weight, const Operand& rows, int slot) const {
    const size_t most = std::max(packed_rows_bytes(row_format_for(weight, 1), 1, rows.width),
                                 packed_rows_bytes(row_format_for(weight, 1 << 20), 1, rows.width));
    check(check_slot(slot, rows.rows).row_bytes >= most, "the slot is too small for packed rows");
  }

  const ProgramSizes& sizes() const { return sizes_; }

 private:
  // Set and reset while the GIL is held, so that a second Python thread finds it set.
  class Busy {
   public:
    explicit Busy(bool& flag) : flag_(flag) { flag_ = true; }
    ~Busy() { flag_ = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    bool& flag_;
  };

  struct StartedStep {
    std::unique_ptr<CheckedStep> checked;
    Program::Run run;
    uint32_t ticket = 0;
  };

  // Once there are steps, nothing is added that they know nothing of.
  void check_open() const { check(steps_[0].checked == nullptr, "the program is finished"); }

  // Where the next step is put: the one before the last, which nobody may read any more.
  StartedStep& next_step() {
    StartedStep& next = steps_[num_steps_ % std::size(steps_)];
    check(next.checked != nullptr, "finish the program first");
    check(!is_busy_, "another thread is running this program");
    step_ = nullptr;
    program_->wait(next.ticket);
    return next;
  }

  int publish(const StartedStep& next) {
    ++num_steps_;
    step_ = &next.checked->step();
    return step_->num_rows;
  }

  void check_product(const PackedWeight& weight, int x_slot, ProductResult& result,
                     const std::optional<FloatArray>& bias) const {
    const bool is_gated =
        result.kind == EpilogueKind::GatedStore || result.kind == EpilogueKind::GatedPack;
    check(is_gated == (weight.order == OutputOrder::GateUp), "linear: gate and up, or neither");
    check(result.out.width == weight.num_outputs / (is_gated ? 2 : 1),
          "linear: width is not the weight's");
    check_packed(weight.format, {x_slot, result.out.rows, weight.num_inputs}, x_slot);
    if (!bias) return;
    check(bias->shape(0) == static_cast<size_t>(weight.num_outputs), "linear: the bias differs");
    result.bias = bias->data();
  }

  void check_queries(const AttentionShape& shape, int q_slot) const {
    const size_t size = has_bf16_queries(shape.layout.format) ? 2 : sizeof(float);
    check(check_slot(q_slot, RowCount::Tokens).row_bytes >=
              size * static_cast<size_t>(shape.num_heads * shape.layout.head_size),
          "the slot is too small for queries");
  }

  const AttentionGroup& attention_group_at(int index) const {
    check(index >= 0 && index < static_cast<int>(attention_groups_.size()),
          "there is no such attention group");
    return *attention_groups_[index];
  }

  void check_columns(const Columns& columns, int width) const {
    check(columns.first >= 0 && columns.first <= columns.stride - width,
          "the heads lie outside of their rows");
    check_floats({columns.slot, RowCount::Tokens, columns.stride});
  }

  KVStorage storage_of(const LayerMemory& memory, const AttentionGroup& group) const {
    check(memory.num_blocks >= groups_[group.group()].num_blocks,
          "attention: the layer has fewer blocks than its group");
    return checked_storage(memory, group.plan().shape().layout);
  }

  int max_position() const { return std::min(sizes_.max_model_len, num_positions_); }

  ProgramSizes sizes_;
  std::vector<SlotSpec> slots_;
  int num_threads_;
  std::vector<GroupLimits> groups_;
  std::vector<const AttentionGroup*> attention_groups_;
  int num_positions_ = 1 << 28;  // that every table of positions has
  bool is_busy_ = false;         // a thread is inside run_segment
  std::unique_ptr<Program> program_;
  StartedStep steps_[2];        // the last one, and the one before it, which may still run
  size_t num_steps_ = 0;        // begun
  const Step* step_ = nullptr;  // the last one
};

}  // namespace kvloom
