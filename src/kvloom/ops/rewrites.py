"""Fusions: rewrites of a tape into operations that the native library runs as one.

Each rewrite takes a tape and returns one with the same result. What the new operations mean:

store_qkv(kv, x, heads, norms, positions, rope, scale) -> q
    split_heads(x, *heads); rms_norm of q and of k by `norms`, unless it is None; rope; k and v are
    stored in their slots. q is an opaque value that only `attend` reads.
attend(kv, q)                                attention of q over the stored blocks
gated_linear(x, weight, bias, activation)    gated_activation(linear(x, weight, bias), activation)
add_linear(residual, x, weight, bias)        add(residual, linear(x, weight, bias))
pack(x, weight)                              x in the form that linear operations with `weight` read
norm_pack(x, norm, eps, weight)              pack(rms_norm(x, norm, eps), weight)
gated_pack(x, weight, bias, activation, next_weight)
    pack(gated_linear(x, weight, bias, activation), next_weight)

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvloom.ops.base import Parameter
from kvloom.ops.tape import Operation, Rows, Tape, TapeValue

# Operations that compute a row of their output from the same row of their inputs alone.
_ROW_WISE = frozenset({"linear", "rms_norm", "add", "gated_activation", "all_reduce"})
# Position of x, and of the weight, in the arguments of operations that multiply by a weight.
_LINEAR_ARGUMENTS = {"linear": (0, 1), "gated_linear": (0, 1), "add_linear": (1, 2)}


class HeadCounts(NamedTuple):
    """How the columns of a qkv value are cut, as `split_heads` takes it."""

    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms over each head of q and of k."""

    q: Parameter
    k: Parameter
    eps: float


def fuse(tape: Tape) -> Tape:
    """All rewrites, in an order in which none hides another."""
    for rewrite in (
        hoist_row_selection,
        fuse_attention,
        fuse_gate,
        fuse_residual,
        pack_rows,
        fuse_gate_pack,
    ):
        tape = rewrite(tape)
    return tape


def hoist_row_selection(tape: Tape) -> Tape:
    """Select the rows of the logits as early as possible: nothing is computed for other rows.

    Operations that work row by row, and whose results only the selection needs, move behind it:
    below the last attention, that is.
    """
    selections = [operation for operation in tape.operations if operation.name == "select_rows"]
    if len(selections) != 1:
        return tape
    late = _only_needed_by(selections[0], tape)
    hoisting = _Hoisting(selections[0], tape.next_index)
    operations = [new for op in tape.operations for new in hoisting.rewrite(op, op in late)]
    return replace(tape, operations=tuple(operations))


def _only_needed_by(select: Operation, tape: Tape) -> set[Operation]:
    """The row-wise operations whose results nothing but `select` needs, even indirectly."""
    readers, found = tape.readers(), {select}
    for operation in reversed(tape.operations):
        if operation.name not in _ROW_WISE or operation.output.rows is Rows.LOGITS:
            continue
        if set(readers[operation.output.index]) <= found:
            found.add(operation)
    return found - {select}


class _Hoisting:
    """Moves one selection up, operation by operation."""

    def __init__(self, select: Operation, next_index: int) -> None:
        self._select = select
        self._rows = select.arguments[1]
        self._next_index = next_index
        self._selected: dict[int, TapeValue] = {}  # by the index of what was selected from

    def rewrite(self, operation: Operation, is_late: bool) -> list[Operation]:
        """What stands in the operation's place."""
        if is_late:
            return self._rewrite_late(operation)
        if operation is not self._select:
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
        output = replace(operation.output, rows=Rows.LOGITS)
        late = replace(operation.with_inputs(self._selected), outputs=(output,))
        self._selected[output.index] = output
        return [*new, late]


def fuse_attention(tape: Tape) -> Tape:
    """split_heads, the heads' norms, rope and attention become store_qkv and attend."""
    readers, writers = tape.readers(), tape.writers()
    changes: dict[Operation, tuple[Operation, ...]] = {}
    for attention in tape.operations:
        if attention.name != "attention":
            continue
        kv, q, k, _v, scale = attention.arguments
        rope = writers[q.index]
        if rope.name != "rope" or rope.outputs != (q, k):
            continue
        q_in, k_in, positions, angles = rope.arguments
        q_norm, k_norm = writers[q_in.index], writers[k_in.index]
        norms = _head_norms(q_norm, k_norm)
        split = writers[q_norm.arguments[0].index] if norms else q_norm
        between = [rope, *([q_norm, k_norm] if norms else [])]
        if split.name != "split_heads" or not _are_private([split, *between], attention, readers):
            continue
        x, *heads = split.arguments
        stored = replace(q, shape=(heads[0], heads[2]))
        changes |= dict.fromkeys([split, *between], ())
        arguments = (kv, x, HeadCounts(*heads), norms, positions, angles, scale)
        changes[attention] = (
            Operation("store_qkv", arguments, (stored,)),
            replace(attention, name="attend", arguments=(kv, stored)),
        )
    return _replace(tape, changes)


def _head_norms(q_norm: Operation, k_norm: Operation) -> HeadNorms | None:
    if q_norm.name != "rms_norm" or k_norm.name != "rms_norm":
        return None
    (_, q, eps), (_, k, k_eps) = q_norm.arguments, k_norm.arguments
    return HeadNorms(q, k, eps) if eps == k_eps else None


def _are_private(
    operations: Sequence[Operation], last: Operation, readers: dict[int, list[Operation]]
) -> bool:
    """Whether nothing but `operations` and `last` reads what `operations` write."""
    allowed = {*operations, last}
    values = (value for operation in operations for value in operation.outputs)
    return all(set(readers.get(value.index, ())) <= allowed for value in values)


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
    return _replace(tape, changes)


def fuse_gate_pack(tape: Tape) -> Tape:
    """pack(gated_linear(...)) becomes gated_pack, which packs rows as it computes them."""

    def fuse_pair(gated: Operation, pack: Operation) -> Operation:
        _, next_weight = pack.arguments
        return replace(pack, name="gated_pack", arguments=(*gated.arguments, next_weight))

    return _fuse_pairs(tape, ("gated_linear", "pack", 0), fuse_pair)


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
    return _replace(tape, changes)


def _replace(tape: Tape, changes: dict[Operation, tuple[Operation, ...]]) -> Tape:
    """The tape with other operations in the places of some; the others stay."""
    operations = [new for op in tape.operations for new in changes.get(op, (op,))]
    return replace(tape, operations=tuple(operations))
