"""Records a model's forward pass once, as a flat list of operations. Standard library only.

A tape knows widths and parameters but not how many tokens a step has: it is recorded when the model
is loaded and replayed for every step, by the native library or over any other Ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any, Literal, Protocol, cast

from kvloom.ops.base import (
    Activation,
    Attention,
    Batch,
    Experts,
    KVLayer,
    Ops,
    Parameter,
    PositionScale,
    Rope,
    Routing,
    Value,
)

_UNLIMITED = 1 << 62  # index of an operation after the last


class Rows(Enum):
    """What the rows of a value stand for; a step says how many there are of each."""

    TOKENS = "num_tokens"
    LOGITS = "num_rows"


@dataclass(frozen=True, slots=True)
class TapeInput:
    """An array of the step's batch, by its name in `Batch`."""

    name: str
    rows: Rows


TOKEN_IDS = TapeInput("token_ids", Rows.TOKENS)
POSITIONS = TapeInput("positions", Rows.TOKENS)
LOGITS_ROWS = TapeInput("logits_rows", Rows.LOGITS)


@dataclass(frozen=True, slots=True)
class TapeValue:
    """What an operation writes, or a view of some columns of it.

    Attributes:
        index: unique on its tape.
        shape: of one row: (width,) or (num_heads, head_size).
        base: index of the value whose columns this one views; its own index if it has memory.
        first_column: where its columns begin in the base.
    """

    index: int
    rows: Rows
    shape: tuple[int, ...]
    base: int
    first_column: int = 0

    @property
    def width(self) -> int:
        """Columns of one row."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call of the vocabulary.

    Attributes:
        name: of the method of `Ops`, or of a fused operation.
        arguments: as the method takes them, with tape values in place of arrays, alone or in a
            tuple.
        outputs: what it returns.
    """

    name: str
    arguments: tuple[Any, ...]
    outputs: tuple[TapeValue, ...]

    @property
    def inputs(self) -> Iterator[TapeValue]:
        """The tape values it reads."""
        for argument in self.arguments:
            parts = argument if isinstance(argument, tuple) else (argument,)
            yield from (part for part in parts if isinstance(part, TapeValue))

    def with_inputs(self, others: Mapping[int, TapeValue]) -> Operation:
        """The same operation reading other values, named by the index of those they replace."""

        def exchange(argument: Any) -> Any:
            return others.get(argument.index, argument)

        arguments = tuple(_map_values(exchange, argument) for argument in self.arguments)
        return replace(self, arguments=arguments)

    @property
    def output(self) -> TapeValue:
        """Its only output."""
        (value,) = self.outputs
        return value


def _map_values(change: Callable[[TapeValue], Any], argument: Any) -> Any:
    """The argument with its tape values changed: itself, or those in a plain tuple."""
    if type(argument) is tuple:
        return tuple(_map_values(change, part) for part in argument)
    return change(argument) if isinstance(argument, TapeValue) else argument


@dataclass(frozen=True, slots=True)
class Tape:
    """A forward pass: operations in order, and the logits they end in."""

    operations: tuple[Operation, ...]
    result: TapeValue

    @property
    def next_index(self) -> int:
        """An index that no value has."""
        return max(value.index for op in self.operations for value in op.outputs) + 1

    def readers(self) -> dict[int, list[Operation]]:
        """The operations that read each value, by its index; a view is a value of its own."""
        found: dict[int, list[Operation]] = {}
        for operation in self.operations:
            for value in operation.inputs:
                found.setdefault(value.index, []).append(operation)
        return found

    def writers(self) -> dict[int, Operation]:
        """The operation that writes each value, by its index."""
        return {value.index: op for op in self.operations for value in op.outputs}

    def last_reads(self) -> dict[int, int]:
        """Per value that has memory: position of the last operation that reads it or a view."""
        last: dict[int, int] = {}
        for position, operation in enumerate(self.operations):
            for value in (*operation.outputs, *operation.inputs):
                last[value.base] = position
        last[self.result.base] = _UNLIMITED
        return last

    def exchange(self, changes: Mapping[Operation, tuple[Operation, ...]]) -> Tape:
        """The tape with other operations in the places of some; the others stay."""
        operations = [new for op in self.operations for new in changes.get(op, (op,))]
        return replace(self, operations=tuple(operations))


class Recordable(Protocol):
    """What a tape needs of a model."""

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits, by operations alone."""


def record(model: Recordable, world_size: int = 1) -> Tape:
    """The model's forward pass as rank of `world_size`; one rank records no collectives."""
    recorder = _Recorder(world_size)
    result = model.forward(cast(Ops, recorder), Batch(TOKEN_IDS, POSITIONS, LOGITS_ROWS))
    return Tape(tuple(recorder.operations), result)


@dataclass(slots=True)
class _Recorder:
    """An Ops that writes down what it is asked, and answers with the shapes alone.

    Columns that lie side by side in a row are answered with a view, which has no memory.
    """

    world_size: int
    operations: list[Operation] = field(default_factory=list)
    _num_values: int = 0

    # --- linear maps ------------------------------------------------------------------------

    def embedding(self, token_ids: TapeInput, table: Parameter, first_row: int = 0) -> TapeValue:
        shape = (table.shape[1],)
        return self._add("embedding", (token_ids, table, first_row), token_ids.rows, shape)

    def linear(self, x: TapeValue, weight: Parameter, bias: Parameter | None = None) -> TapeValue:
        return self._add("linear", (x, weight, bias), x.rows, (weight.shape[0],))

    def head_linear(self, x: TapeValue, weight: Parameter) -> TapeValue:
        return self._add("head_linear", (x, weight), x.rows, weight.shape[:2])

    # --- norms and element-wise -------------------------------------------------------------

    def rms_norm(self, x: TapeValue, weight: Parameter | None, eps: float) -> TapeValue:
        return self._add_like(x, "rms_norm", x, weight, eps)

    def layer_norm(self, x: TapeValue, weight: Parameter, eps: float) -> TapeValue:
        return self._add_like(x, "layer_norm", x, weight, eps)

    def add(self, a: TapeValue, b: TapeValue) -> TapeValue:
        return self._add_like(a, "add", a, b)

    def multiply(self, a: TapeValue, b: TapeValue) -> TapeValue:
        return self._add_like(a, "multiply", a, b)

    def multiply_columns(self, x: TapeValue, weight: Parameter) -> TapeValue:
        return self._add_like(x, "multiply_columns", x, weight)

    def scale(self, x: TapeValue, factor: float) -> TapeValue:
        return self._add_like(x, "scale", x, factor)

    def soft_cap(self, x: TapeValue, cap: float) -> TapeValue:
        return self._add_like(x, "soft_cap", x, cap)

    def activation(self, x: TapeValue, activation: Activation | Literal["tanh"]) -> TapeValue:
        return self._add_like(x, "activation", x, activation)

    def gated_activation(self, x: TapeValue, activation: Activation) -> TapeValue:
        return self._add("gated_activation", (x, activation), x.rows, (x.width // 2,))

    def gaussian_top(self, x: TapeValue, num_deviations: float) -> TapeValue:
        return self._add_like(x, "gaussian_top", x, num_deviations)

    def match_rms(self, x: TapeValue, target: TapeValue, floor: float) -> TapeValue:
        return self._add_like(x, "match_rms", x, target, floor)

    # --- shapes -----------------------------------------------------------------------------

    def split(self, x: TapeValue, sizes: tuple[int, ...]) -> tuple[TapeValue, ...]:
        *heads, _ = x.shape
        shapes = [(*heads, size) for size in sizes]
        if prod(heads) == 1:
            return self._add_views("split", (x, sizes), shapes)
        outputs = tuple(self._new(x.rows, shape) for shape in shapes)
        self.operations.append(Operation("split", (x, sizes), outputs))
        return outputs

    def concat(self, values: Sequence[TapeValue]) -> TapeValue:
        *heads, _ = values[0].shape
        shape = (*heads, sum(value.shape[-1] for value in values))
        return self._add("concat", (tuple(values),), values[0].rows, shape)

    def split_heads(
        self, x: TapeValue, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[TapeValue, ...]:
        shapes = [(count, head_size) for count in (num_heads, num_kv_heads, num_kv_heads)]
        return self._add_views("split_heads", (x, num_heads, num_kv_heads, head_size), shapes)

    def heads(self, x: TapeValue, num_heads: int) -> TapeValue:
        shape = (num_heads, x.width // num_heads)
        return self._add_views("heads", (x, num_heads), [shape])[0]

    def merge_heads(self, x: TapeValue) -> TapeValue:
        return self._add_views("merge_heads", (x,), [(x.width,)])[0]

    def select_rows(self, x: TapeValue, rows: TapeInput) -> TapeValue:
        return self._add("select_rows", (x, rows), rows.rows, x.shape)

    # --- positions and attention ------------------------------------------------------------

    def rope(
        self, q: TapeValue, k: TapeValue, positions: TapeInput, rope: Rope
    ) -> tuple[TapeValue, ...]:
        outputs = (self._new(q.rows, q.shape), self._new(k.rows, k.shape))
        self.operations.append(Operation("rope", (q, k, positions, rope), outputs))
        return outputs

    def rotate(self, x: TapeValue, positions: TapeInput, rope: Rope) -> TapeValue:
        return self._add_like(x, "rotate", x, positions, rope)

    def scale_by_position(
        self, x: TapeValue, positions: TapeInput, scale: PositionScale
    ) -> TapeValue:
        return self._add_like(x, "scale_by_position", x, positions, scale)

    def attention(
        self, kv: KVLayer, q: TapeValue, k: TapeValue, v: TapeValue, attention: Attention
    ) -> TapeValue:
        shape = (q.shape[0] * v.shape[1],)
        return self._add("attention", (kv, q, k, v, attention), q.rows, shape)

    def shared_attention(self, kv: KVLayer, q: TapeValue, attention: Attention) -> TapeValue:
        return self._add("shared_attention", (kv, q, attention), q.rows, (q.width,))

    def latent_attention(
        self, kv: KVLayer, q: TapeValue, row: TapeValue, attention: Attention, head_size_v: int
    ) -> TapeValue:
        arguments = (kv, q, row, attention, head_size_v)
        return self._add("latent_attention", arguments, q.rows, (q.shape[0], head_size_v))

    # --- experts ----------------------------------------------------------------------------

    def route(
        self, logits: TapeValue, routing: Routing, bias: Parameter | None = None
    ) -> TapeValue:
        shape = (2 * routing.num_experts_per_token,)
        return self._add("route", (logits, routing, bias), logits.rows, shape)

    def experts(self, x: TapeValue, routes: TapeValue, experts: Experts) -> TapeValue:
        return self._add("experts", (x, routes, experts), x.rows, (experts.down.shape[1],))

    # --- ranks ------------------------------------------------------------------------------

    def all_reduce(self, x: TapeValue) -> TapeValue:
        return x if self.world_size == 1 else self._add_like(x, "all_reduce", x)

    def all_gather(self, x: TapeValue) -> TapeValue:
        if self.world_size == 1:
            return x
        return self._add("all_gather", (x,), x.rows, (x.width * self.world_size,))

    # --- writing down -----------------------------------------------------------------------

    def _add(
        self, name: str, arguments: tuple[Any, ...], rows: Rows, shape: tuple[int, ...]
    ) -> TapeValue:
        output = self._new(rows, shape)
        self.operations.append(Operation(name, arguments, (output,)))
        return output

    def _add_like(self, x: TapeValue, name: str, *arguments: Any) -> TapeValue:
        """An operation whose output has the shape of x."""
        return self._add(name, arguments, x.rows, x.shape)

    def _add_views(
        self, name: str, arguments: tuple[Any, ...], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[TapeValue, ...]:
        """An operation whose outputs are the columns of its first argument, one after another."""
        x: TapeValue = arguments[0]
        outputs, first_column = [], x.first_column
        for shape in shapes:
            view = replace(self._new(x.rows, shape), base=x.base, first_column=first_column)
            outputs.append(view)
            first_column += view.width
        self.operations.append(Operation(name, arguments, tuple(outputs)))
        return tuple(outputs)

    def _new(self, rows: Rows, shape: tuple[int, ...]) -> TapeValue:
        index = self._num_values
        self._num_values += 1
        return TapeValue(index, rows, shape, base=index)


def replay(tape: Tape, ops: Any, batch: Batch) -> Value:
    """Run a tape over `ops`, which has a method for each of its operations; the logits."""
    values: dict[int, Value] = {}

    def resolve(argument: Any) -> Any:
        if isinstance(argument, TapeInput):
            return getattr(batch, argument.name)
        return _map_values(lambda value: values[value.index], argument)

    for operation in tape.operations:
        run: Callable[..., Any] = getattr(ops, operation.name)
        returned = run(*map(resolve, operation.arguments))
        results = returned if isinstance(returned, tuple) else (returned,)
        values |= {v.index: r for v, r in zip(operation.outputs, results, strict=True)}
    return values[tape.result.index]
