"""Fusions: rewrites of a tape into operations that the native library runs as one.

Each rewrite takes a tape and returns one with the same result. What the new operations mean, but
for those of attention, which rewrites_attention.py tells:

gated_linear(x, weight, bias, activation)    gated_activation(linear(x, weight, bias), activation)
add_linear(residual, x, weight, bias)        add(residual, linear(x, weight, bias))
add_norm(residual, x, norm, eps)             add(residual, rms_norm(x, norm, eps))
pack(x, weight)                              x in the form that linear operations with `weight` read
norm_pack(x, norm, eps, weight)              pack(rms_norm(x, norm, eps), weight)
gated_pack(x, weight, bias, activation, next_weight)
    pack(gated_linear(x, weight, bias, activation), next_weight)
pack_heads(x, weight)                        x in the form that head_linear with `weight` reads
pack_experts(x, routes, experts) -> rows     x for each of its experts, in the experts' order
gate_experts(rows, routes, experts) -> inner their gated activations
down_experts(inner, routes, experts) -> y    what experts make of their rows
sum_experts(y, routes, experts)              experts(x, routes, experts)

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvloom.ops.rewrites_attention import fuse_attention
from kvloom.ops.tape import Operation, Rows, Tape, TapeInput, TapeValue

# Operations that compute a row of their output from the same row of their inputs alone.
_ROW_WISE = frozenset(
    {
        *("linear", "head_linear", "rms_norm", "layer_norm", "add", "multiply"),
        *("multiply_columns", "scale", "soft_cap", "activation", "gated_activation"),
        *("gaussian_top", "match_rms", "split", "concat", "split_heads", "heads", "merge_heads"),
        *("route", "experts", "all_reduce", "all_gather"),
    }
)
# Position of x, and of the weight, in the arguments of operations that multiply by a weight.
_LINEAR_ARGUMENTS = {"linear": (0, 1), "gated_linear": (0, 1), "add_linear": (1, 2)}


def fuse(tape: Tape) -> Tape:
    """All rewrites, in an order in which none hides another."""
    for rewrite in (
        hoist_row_selection,
        fuse_attention,
        fuse_gate,
        fuse_residual,
        fuse_residual_norm,
        pack_rows,
        fuse_gate_pack,
        pack_stacks,
    ):
        tape = rewrite(tape)
    return tape


def hoist_row_selection(tape: Tape) -> Tape:
    """Select the rows of the logits as early as possible: nothing is computed for other rows.

    Operations that work row by row, and whose results only selections need, move behind them:
    below the last attention, that is.
    """
    selections = {operation for operation in tape.operations if operation.name == "select_rows"}
    if not selections:
        return tape
    late = _only_needed_by(selections, tape)
    (rows,) = {operation.arguments[1] for operation in selections}
    hoisting = _Hoisting(rows, tape.next_index)
    operations = [new for op in tape.operations for new in hoisting.rewrite(op, op in late)]
    return Tape(tuple(operations), hoisting.selected(tape.result))


def _only_needed_by(selections: set[Operation], tape: Tape) -> set[Operation]:
    """The row-wise operations whose results nothing but `selections` need, even indirectly."""
    readers, found = tape.readers(), set(selections)
    for operation in reversed(tape.operations):
        if operation.name not in _ROW_WISE or operation.outputs[0].rows is Rows.LOGITS:
            continue
        if all(set(readers.get(value.index, ())) <= found for value in operation.outputs):
            found.add(operation)
    return found - selections


class _Hoisting:
    """Moves selections up, operation by operation."""

    def __init__(self, rows: TapeInput, next_index: int) -> None:
        self._rows = rows
        self._next_index = next_index
        self._selected: dict[int, TapeValue] = {}  # by the index of what was selected from

    def selected(self, value: TapeValue) -> TapeValue:
        """What stands for the value behind the selections."""
        return self._selected.get(value.index, value)

    def rewrite(self, operation: Operation, is_late: bool) -> list[Operation]:
        """What stands in the operation's place."""
        if is_late:
            return self._rewrite_late(operation)
        if operation.outputs[0].rows is Rows.TOKENS:
            return [operation]
        if operation.name != "select_rows":
            return [operation.with_inputs(self._selected)]
        x, _ = operation.arguments
        if x.index not in self._selected:
            return [operation]
        self._selected[operation.output.index] = self._selected[x.index]
        return []

    def _rewrite_late(self, operation: Operation) -> list[Operation]:
        new: list[Operation] = []
        for value in operation.inputs:
            if value.index not in self._selected:
                selected = TapeValue(self._next_index, Rows.LOGITS, value.shape, self._next_index)
                self._next_index += 1
                self._selected[value.index] = selected
                new.append(Operation("select_rows", (value, self._rows), (selected,)))
        outputs = tuple(self._select_output(operation, value) for value in operation.outputs)
        self._selected |= {value.index: value for value in outputs}
        return [*new, replace(operation.with_inputs(self._selected), outputs=outputs)]

    def _select_output(self, operation: Operation, value: TapeValue) -> TapeValue:
        """The output as it is once the operation's inputs are selected rows."""
        if value.base == value.index:
            return replace(value, rows=Rows.LOGITS)
        (viewed,) = operation.inputs
        selected = self._selected[viewed.index]
        first_column = selected.first_column + value.first_column - viewed.first_column
        return replace(value, rows=Rows.LOGITS, base=selected.base, first_column=first_column)


def fuse_gate(tape: Tape) -> Tape:
    """gated_activation(linear(...)) becomes gated_linear."""

    def fuse_pair(linear: Operation, gate: Operation) -> Operation:
        _, activation = gate.arguments
        return replace(gate, name="gated_linear", arguments=(*linear.arguments, activation))

    return _fuse_pairs(tape, ("linear", "gated_activation", 0), fuse_pair)


def fuse_residual(tape: Tape) -> Tape:
    """add(residual, linear(...)) becomes add_linear, if the residual ends there.

    The product is then added where the residual lies.
    """
    last_reads = tape.last_reads()
    position = {operation: i for i, operation in enumerate(tape.operations)}

    def fuse_pair(linear: Operation, add: Operation) -> Operation | None:
        residual, _ = add.arguments
        if last_reads[residual.base] != position[add] or residual.base != residual.index:
            return None
        return replace(add, name="add_linear", arguments=(residual, *linear.arguments))

    return _fuse_pairs(tape, ("linear", "add", 1), fuse_pair)


def fuse_residual_norm(tape: Tape) -> Tape:
    """add(residual, rms_norm(...)) becomes add_norm."""

    def fuse_pair(norm: Operation, add: Operation) -> Operation:
        return replace(add, name="add_norm", arguments=(add.arguments[0], *norm.arguments))

    return _fuse_pairs(tape, ("rms_norm", "add", 1), fuse_pair)


def pack_rows(tape: Tape) -> Tape:
    """Linear operations read packed rows: a norm writes them, or else an operation of its own."""
    writers, readers = tape.writers(), tape.readers()
    index = tape.next_index
    changes: dict[Operation, tuple[Operation, ...]] = {}
    for operation in tape.operations:
        if operation.name not in _LINEAR_ARGUMENTS:
            continue
        at, weight_at = _LINEAR_ARGUMENTS[operation.name]
        x, weight = operation.arguments[at], operation.arguments[weight_at]
        packed = TapeValue(index, x.rows, x.shape, base=index)
        index += 1
        pack = Operation("pack", (x, weight), (packed,))
        writer = writers[x.index]
        if writer.name == "rms_norm" and readers[x.index] == [operation]:
            pack = Operation("norm_pack", (*writer.arguments, weight), (packed,))
            changes[writer] = ()
        arguments = (*operation.arguments[:at], packed, *operation.arguments[at + 1 :])
        changes[operation] = (pack, replace(operation, arguments=arguments))
    return tape.exchange(changes)


def fuse_gate_pack(tape: Tape) -> Tape:
    """pack(gated_linear(...)) becomes gated_pack, which packs rows as it computes them."""

    def fuse_pair(gated: Operation, pack: Operation) -> Operation:
        _, next_weight = pack.arguments
        return replace(pack, name="gated_pack", arguments=(*gated.arguments, next_weight))

    return _fuse_pairs(tape, ("gated_linear", "pack", 0), fuse_pair)


def pack_stacks(tape: Tape) -> Tape:
    """Products with stacks of matrices read rows that are packed for each of their matrices."""
    index = tape.next_index
    changes: dict[Operation, tuple[Operation, ...]] = {}
    for operation in tape.operations:
        if operation.name == "head_linear":
            changes[operation] = _pack_heads(operation, index)
        elif operation.name == "experts":
            changes[operation] = _run_experts(operation, index)
        index += 3
    return tape.exchange(changes)


def _pack_heads(operation: Operation, index: int) -> tuple[Operation, ...]:
    x, weight = operation.arguments
    packed = TapeValue(index, x.rows, x.shape, base=index)
    return (
        Operation("pack_heads", (x, weight), (packed,)),
        replace(operation, arguments=(packed, weight)),
    )


def _run_experts(operation: Operation, index: int) -> tuple[Operation, ...]:
    x, routes, experts = operation.arguments
    num_choices, (_, size, inner_size) = routes.width // 2, experts.down.shape
    widths = (x.width, inner_size, size)
    rows, inner, y = (
        TapeValue(index + i, x.rows, (num_choices, width), base=index + i)
        for i, width in enumerate(widths)
    )
    return (
        Operation("pack_experts", (x, routes, experts), (rows,)),
        Operation("gate_experts", (rows, routes, experts), (inner,)),
        Operation("down_experts", (inner, routes, experts), (y,)),
        replace(operation, name="sum_experts", arguments=(y, routes, experts)),
    )


def _fuse_pairs(
    tape: Tape,
    pattern: tuple[str, str, int],
    fuse_pair: Callable[[Operation, Operation], Operation | None],
) -> Tape:
    """Replace an operation and the only reader of its result by what `fuse_pair` makes of them.

    `pattern` has the names of the first and of the second, and which argument of the second the
    first one's result is. A pair that `fuse_pair` returns None for stays as it is.
    """
    first_name, second_name, at = pattern
    readers, writers = tape.readers(), tape.writers()
    changes: dict[Operation, tuple[Operation, ...]] = {}
    for second in tape.operations:
        if second.name != second_name:
            continue
        value = second.arguments[at]
        first = writers[value.index]
        if first.name != first_name or readers[value.index] != [second]:
            continue
        if (fused := fuse_pair(first, second)) is not None:
            changes |= {first: (), second: (fused,)}
    return tape.exchange(changes)
