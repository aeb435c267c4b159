"""Operations of a fused tape as instructions of the native library."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

from kvloom.ops.backend import StepSizes
from kvloom.ops.base import (
    Activation,
    Attention,
    Experts,
    KVLayer,
    Parameter,
    PositionScale,
    Rope,
    Routing,
)
from kvloom.ops.native_attention import AttentionLowering
from kvloom.ops.native_tables import PositionTables, weight_or_ones
from kvloom.ops.slots import SlotPlan
from kvloom.ops.tape import Operation, Rows, Tape, TapeInput, TapeValue

MIN_SCREENED_SIZE = 1 << 22  # numbers of a weight


class Lowering:
    """Adds operations to a program: `_lower_X` adds operation X."""

    def __init__(
        self,
        library_and_team: tuple[ModuleType, Any],
        program: Any,
        tape: Tape,
        plan: SlotPlan,
        sizes: StepSizes,
    ) -> None:
        library, self._team = library_and_team
        self._library = library
        self._program = program
        self._plan = plan
        self._sizes = sizes
        self._values = {value.index: value for op in tape.operations for value in op.outputs}
        self._tape = tape
        self._tables = PositionTables(sizes.max_model_len)
        self._attention = AttentionLowering(library, program, tape, self._tables)
        self._orders: dict[tuple[int, int], Any] = {}  # by the numbers of experts and of choices

    @staticmethod
    def knows(operation: Operation) -> bool:
        """Whether there are instructions for it, or none needed."""
        return _is_view(operation) or hasattr(Lowering, f"_lower_{operation.name}")

    def add(self, operation: Operation) -> None:
        """Add one operation."""
        if _is_view(operation):
            return
        if makes_logits(self._tape, operation):
            self._lower_logits(operation.output, *operation.arguments)
            return
        out = operation.outputs if len(operation.outputs) > 1 else operation.output
        getattr(self, f"_lower_{operation.name}")(out, *operation.arguments)

    def operand(self, value: TapeValue) -> Any:
        """The rows of a value as the library names them."""
        base, is_logits = self._values[value.base], value.rows is Rows.LOGITS
        return self._library.Operand(
            self._slot(value), is_logits, value.width, value.first_column, base.width
        )

    def _slot(self, value: TapeValue) -> int:
        return self._plan.slot_of[value.base]

    # --- linear maps ------------------------------------------------------------------------

    def _lower_embedding(
        self, out: TapeValue, _ids: TapeInput, table: Parameter, first_row: int
    ) -> None:
        self._program.embedding(table.value, first_row, self.operand(out))

    def _lower_pack(self, out: TapeValue, x: TapeValue, weight: Parameter) -> None:
        self._program.pack(self.operand(x), None, 0.0, weight.value, self._slot(out))

    def _lower_norm_pack(
        self, out: TapeValue, x: TapeValue, norm: Parameter | None, eps: float, weight: Parameter
    ) -> None:
        values = weight_or_ones(norm, x.shape[-1])
        self._program.pack(self.operand(x), values, eps, weight.value, self._slot(out))

    def _lower_linear(
        self, out: TapeValue, x: TapeValue, weight: Parameter, bias: Parameter | None
    ) -> None:
        self._multiply(out, x, weight, bias, ("store", "silu"))

    def _lower_logits(
        self, out: TapeValue, x: TapeValue, weight: Parameter, bias: Parameter | None
    ) -> None:
        if is_screened(weight.value, bias):
            screen = self._library.make_screen(self._team, weight.value)
            if screen.is_usable:
                values = weight.value, screen, self.operand(out)
                self._program.screened_logits(self._slot(x), *values)
                return
        self._multiply(out, x, weight, bias, ("logits", "silu"))

    def _lower_add_linear(
        self,
        out: TapeValue,
        _residual: TapeValue,
        x: TapeValue,
        weight: Parameter,
        bias: Parameter | None,
    ) -> None:
        # The slot plan put the output where the residual lies.
        self._multiply(out, x, weight, bias, ("add", "silu"))

    def _lower_gated_linear(
        self,
        out: TapeValue,
        x: TapeValue,
        weight: Parameter,
        bias: Parameter | None,
        activation: Activation,
    ) -> None:
        self._multiply(out, x, weight, bias, ("gated", activation))

    def _multiply(
        self,
        out: TapeValue,
        x: TapeValue,
        weight: Parameter,
        bias: Parameter | None,
        kind_and_activation: tuple[str, str],
    ) -> None:
        values = _value(bias), *kind_and_activation, self.operand(out)
        self._program.linear(self._slot(x), weight.value, *values)

    def _lower_gated_pack(
        self, out: TapeValue, x: TapeValue, weight: Parameter, *rest: Any
    ) -> None:
        bias, activation, next_weight = rest
        values = _value(bias), activation, next_weight.value, self.operand(out)
        self._program.gated_pack(self._slot(x), weight.value, *values)

    def _lower_pack_heads(self, out: TapeValue, x: TapeValue, weight: Parameter) -> None:
        self._program.pack_heads(self.operand(x), weight.value, self._slot(out))

    def _lower_head_linear(self, out: TapeValue, x: TapeValue, weight: Parameter) -> None:
        self._program.head_linear(self._slot(x), weight.value, self.operand(out))

    # --- norms and element-wise -------------------------------------------------------------

    def _lower_rms_norm(
        self, out: TapeValue, x: TapeValue, weight: Parameter | None, eps: float
    ) -> None:
        size = x.shape[-1]
        values = self.operand(x), None, weight_or_ones(weight, size), size, eps
        self._program.run("rms_norm", *values, self.operand(out))

    def _lower_layer_norm(
        self, out: TapeValue, x: TapeValue, weight: Parameter, eps: float
    ) -> None:
        values = self.operand(x), None, weight.value, x.shape[-1], eps
        self._program.run("layer_norm", *values, self.operand(out))

    def _lower_add_norm(
        self,
        out: TapeValue,
        residual: TapeValue,
        x: TapeValue,
        weight: Parameter | None,
        eps: float,
    ) -> None:
        size = x.shape[-1]
        values = self.operand(x), self.operand(residual), weight_or_ones(weight, size), size, eps
        self._program.run("add_norm", *values, self.operand(out))

    def _lower_gaussian_top(self, out: TapeValue, x: TapeValue, num_deviations: float) -> None:
        values = self.operand(x), None, None, x.shape[-1], num_deviations
        self._program.run("gaussian_top", *values, self.operand(out))

    def _lower_match_rms(
        self, out: TapeValue, x: TapeValue, target: TapeValue, floor: float
    ) -> None:
        values = self.operand(x), self.operand(target), None, x.shape[-1], floor
        self._program.run("match_rms", *values, self.operand(out))

    def _lower_add(self, out: TapeValue, a: TapeValue, b: TapeValue) -> None:
        values = self.operand(a), self.operand(b), a.width
        self._program.map("add", *values, self.operand(out))

    def _lower_multiply(self, out: TapeValue, a: TapeValue, b: TapeValue) -> None:
        size = a.width if a.width == b.width else a.shape[-1]
        values = self.operand(a), self.operand(b), size
        self._program.map("multiply", *values, self.operand(out))

    def _lower_multiply_columns(self, out: TapeValue, x: TapeValue, weight: Parameter) -> None:
        self._program.map_weight("multiply", self.operand(x), weight.value, self.operand(out))

    def _lower_scale(self, out: TapeValue, x: TapeValue, factor: float) -> None:
        self._program.map_number("multiply", self.operand(x), factor, self.operand(out))

    def _lower_soft_cap(self, out: TapeValue, x: TapeValue, cap: float) -> None:
        self._program.map_number("soft_cap", self.operand(x), cap, self.operand(out))

    def _lower_activation(
        self, out: TapeValue, x: TapeValue, activation: Activation | Literal["tanh"]
    ) -> None:
        self._program.map_number(activation, self.operand(x), 0.0, self.operand(out))

    def _lower_gated_activation(self, out: TapeValue, x: TapeValue, activation: Activation) -> None:
        self._program.gated(self.operand(x), activation, self.operand(out))

    # --- shapes -----------------------------------------------------------------------------

    def _lower_split(
        self, out: TapeValue | tuple[TapeValue, ...], x: TapeValue, _sizes: tuple[int, ...]
    ) -> None:
        parts = out if isinstance(out, tuple) else (out,)
        num_runs = x.width // x.shape[-1]
        self._program.copy([self.operand(p) for p in parts], self.operand(x), num_runs, True)

    def _lower_concat(self, out: TapeValue, values: tuple[TapeValue, ...]) -> None:
        num_runs = out.width // out.shape[-1]
        self._program.copy([self.operand(v) for v in values], self.operand(out), num_runs, False)

    def _lower_select_rows(self, out: TapeValue, x: TapeValue, _rows: TapeInput) -> None:
        self._program.select_rows(self.operand(x), self._slot(out))

    # --- positions and attention ------------------------------------------------------------

    def _lower_rope(
        self,
        out: tuple[TapeValue, TapeValue],
        q: TapeValue,
        k: TapeValue,
        positions: TapeInput,
        rope: Rope,
    ) -> None:
        for result, x in zip(out, (q, k), strict=True):
            self._lower_rotate(result, x, positions, rope)

    def _lower_rotate(
        self, out: TapeValue, x: TapeValue, _positions: TapeInput, rope: Rope
    ) -> None:
        table, head_size = self._tables.rotations(rope), x.shape[-1]
        values = rope.is_interleaved, self.operand(x), head_size, self.operand(out)
        self._program.rotate(table, *values)

    def _lower_scale_by_position(
        self, out: TapeValue, x: TapeValue, _positions: TapeInput, scale: PositionScale
    ) -> None:
        table = self._tables.scales(scale)
        self._program.scale_by_position(table, self.operand(x), self.operand(out))

    def _lower_store_qkv(self, out: TapeValue, kv: KVLayer, *rest: Any) -> None:
        q, k, v, _positions, forms = rest
        self._attention.store((kv, self._slot(out)), (q, k, v), forms, self._columns)

    def _columns(self, value: TapeValue) -> Any:
        base = self._values[value.base]
        return self._library.Columns(self._slot(value), value.first_column, base.width)

    def _lower_attend(
        self, out: TapeValue, kv: KVLayer, q: TapeValue, scoring: Attention, _size: int
    ) -> None:
        self._attention.attend(kv, q, scoring, (self._slot(q), self.operand(out)))

    # --- experts ----------------------------------------------------------------------------

    def _lower_route(
        self, out: TapeValue, logits: TapeValue, routing: Routing, bias: Parameter | None
    ) -> None:
        made = self._library.Routing(
            num_experts=logits.width,
            num_choices=routing.num_experts_per_token,
            score=routing.score,
            is_normalised=routing.is_normalised,
            factor=routing.factor,
            num_groups=routing.num_groups,
            num_chosen_groups=routing.num_chosen_groups,
            group_score=routing.group_score,
        )
        self._program.route(made, _value(bias), self.operand(logits), self.operand(out))

    def _lower_pack_experts(
        self, out: TapeValue, x: TapeValue, routes: TapeValue, experts: Experts
    ) -> None:
        layer, weight = self._expert_layer(routes, experts), experts.gate_up.value
        self._program.pack_experts(layer, self.operand(x), weight, self._slot(out))

    def _lower_gate_experts(
        self, out: TapeValue, rows: TapeValue, routes: TapeValue, experts: Experts
    ) -> None:
        self._program.gate_experts(
            self._expert_layer(routes, experts),
            self._slot(rows),
            experts.gate_up.value,
            _flat_value(experts.gate_up_bias),
            experts.activation,
            experts.down.value,
            self._slot(out),
        )

    def _lower_down_experts(
        self, out: TapeValue, inner: TapeValue, routes: TapeValue, experts: Experts
    ) -> None:
        layer, bias = self._expert_layer(routes, experts), _flat_value(experts.down_bias)
        values = experts.down.value, bias, self.operand(out)
        self._program.down_experts(layer, self._slot(inner), *values)

    def _lower_sum_experts(
        self, out: TapeValue, y: TapeValue, routes: TapeValue, experts: Experts
    ) -> None:
        layer = self._expert_layer(routes, experts)
        self._program.sum_experts(layer, self.operand(y), self.operand(out))

    def _expert_layer(self, routes: TapeValue, experts: Experts) -> Any:
        """Layers with as many experts and choices share the order of rows, one after another."""
        key = (experts.gate_up.shape[0], routes.width // 2)
        if key not in self._orders:
            max_num_rows = max(self._sizes.max_num_tokens, self._sizes.max_num_rows)
            self._orders[key] = self._library.ExpertOrder(*key, max_num_rows)
        return self._library.ExpertLayer(
            order=self._orders[key],
            routes=self.operand(routes),
            scales=_value(experts.scales),
            weighs_input=experts.weighs_input,
        )


def makes_logits(tape: Tape, operation: Operation) -> bool:
    """Whether it is a product that nothing is done to: then a step may keep its best only."""
    if operation.name != "linear" or operation.output.index != tape.result.index:
        return False
    return operation.output.width > 1  # or there is no choice


def is_screened(weight: Any, bias: Parameter | None) -> bool:
    """Whether the best of a product by a packed weight is found by a `Screen`.

    Estimates and what follows them take some steps more: they must have something to save.
    """
    size = weight.num_outputs * weight.num_inputs
    return bias is None and weight.format == "BF16" and size >= MIN_SCREENED_SIZE


def _is_view(operation: Operation) -> bool:
    """Whether its outputs are columns of its input, with no memory of their own."""
    return all(value.base != value.index for value in operation.outputs)


def _value(parameter: Parameter | None) -> Any:
    return None if parameter is None else parameter.value


def _flat_value(parameter: Parameter | None) -> Any:
    return None if parameter is None else parameter.value.reshape(-1)
