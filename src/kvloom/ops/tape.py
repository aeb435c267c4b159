"""Records a model's forward pass once, as a flat list of operations. Standard library only.

A tape knows widths and parameters but not how many tokens a step has: it is recorded when the model
is loaded and replayed for every step, by the native library or over any other Ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any, Protocol, cast

from kvloom.ops.base import Activation, Batch, KVLayer, Ops, Parameter, Rope, Value

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
        arguments: as the method takes them, with tape values in place of arrays.
        outputs: what it returns.
    """

    name: str
    arguments: tuple[Any, ...]
    outputs: tuple[TapeValue, ...]

    @property
    def inputs(self) -> Iterator[TapeValue]:
        """The tape values it reads."""
        return (argument for argument in self.arguments if isinstance(argument, TapeValue))

    def with_inputs(self, others: Mapping[int, TapeValue]) -> Operation:
        """The same operation reading other values, named by the index of those they replace."""
        arguments = tuple(
            others.get(a.index, a) if isinstance(a, TapeValue) else a for a in self.arguments
        )
        return replace(self, arguments=arguments)

    @property
    def output(self) -> TapeValue:
        """Its only output."""
        (value,) = self.outputs
        return value


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
    """An Ops that writes down what it is asked, and answers with the shapes alone."""

    world_size: int
    operations: list[Operation] = field(default_factory=list)
    _num_values: int = 0

    def embedding(self, token_ids: TapeInput, table: Parameter, first_row: int = 0) -> TapeValue:
        shape = (table.shape[1],)
        return self._add("embedding", (token_ids, table, first_row), token_ids.rows, shape)

    def linear(self, x: TapeValue, weight: Parameter, bias: Parameter | None = None) -> TapeValue:
        return self._add("linear", (x, weight, bias), x.rows, (weight.shape[0],))

    def rms_norm(self, x: TapeValue, weight: Parameter, eps: float) -> TapeValue:
        return self._add("rms_norm", (x, weight, eps), x.rows, x.shape)

    def add(self, a: TapeValue, b: TapeValue) -> TapeValue:
        return self._add("add", (a, b), a.rows, a.shape)

    def gated_activation(self, x: TapeValue, activation: Activation) -> TapeValue:
        return self._add("gated_activation", (x, activation), x.rows, (x.width // 2,))

    def split_heads(
        self, x: TapeValue, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[TapeValue, ...]:
        outputs, first_column = [], x.first_column
        for count in (num_heads, num_kv_heads, num_kv_heads):
            view = replace(self._new(x.rows, (count, head_size)), base=x.base)
            outputs.append(replace(view, first_column=first_column))
            first_column += view.width
        arguments = (x, num_heads, num_kv_heads, head_size)
        self.operations.append(Operation("split_heads", arguments, tuple(outputs)))
        return tuple(outputs)

    def rope(
        self, q: TapeValue, k: TapeValue, positions: TapeInput, rope: Rope
    ) -> tuple[TapeValue, ...]:
        outputs = (self._new(q.rows, q.shape), self._new(k.rows, k.shape))
        self.operations.append(Operation("rope", (q, k, positions, rope), outputs))
        return outputs

    def attention(
        self, kv: KVLayer, q: TapeValue, k: TapeValue, v: TapeValue, scale: float
    ) -> TapeValue:
        shape = (q.shape[0] * v.shape[1],)
        return self._add("attention", (kv, q, k, v, scale), q.rows, shape)

    def select_rows(self, x: TapeValue, rows: TapeInput) -> TapeValue:
        return self._add("select_rows", (x, rows), rows.rows, x.shape)

    def all_reduce(self, x: TapeValue) -> TapeValue:
        if self.world_size == 1:
            return x
        return self._add("all_reduce", (x,), x.rows, x.shape)

    def all_gather(self, x: TapeValue) -> TapeValue:
        if self.world_size == 1:
            return x
        return self._add("all_gather", (x,), x.rows, (x.width * self.world_size,))

    def _add(
        self, name: str, arguments: tuple[Any, ...], rows: Rows, shape: tuple[int, ...]
    ) -> TapeValue:
        output = self._new(rows, shape)
        self.operations.append(Operation(name, arguments, (output,)))
        return output

    def _new(self, rows: Rows, shape: tuple[int, ...]) -> TapeValue:
        index = self._num_values
        self._num_values += 1
        return TapeValue(index, rows, shape, base=index)


def replay(tape: Tape, ops: Any, batch: Batch) -> Value:
    """Run a tape over `ops`, which has a method for each of its operations; the logits."""
    values: dict[int, Value] = {}

    def resolve(argument: Any) -> Any:
        if isinstance(argument, TapeValue):
            return values[argument.index]
        return getattr(batch, argument.name) if isinstance(argument, TapeInput) else argument

    for operation in tape.operations:
        run: Callable[..., Any] = getattr(ops, operation.name)
        returned = run(*map(resolve, operation.arguments))
        results = (returned,) if len(operation.outputs) == 1 else returned
        values |= {v.index: r for v, r in zip(operation.outputs, results, strict=True)}
    return values[tape.result.index]
