"""Fuses what is done to queries, keys and values with storing them. Standard library only.

store_qkv(kv, q, k, v, positions, forms) -> stored
    q in the form that `attend` reads; k and v go to their slots. Both are None where KV is shared,
    and v alone where the row of latent attention is all there is.
attend(kv, stored, scoring, head_size_v)
    attention of stored queries over the stored blocks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvloom.ops.base import Parameter, PositionScale, Rope
from kvloom.ops.tape import POSITIONS, Operation, Tape, TapeValue

# Attention operations -> how many operands follow the layer: of queries, keys and values.
_NUM_OPERANDS = {"attention": 3, "shared_attention": 1, "latent_attention": 2}


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm over each head; a weight of None weighs by 1."""

    weight: Parameter | None
    eps: float


@dataclass(frozen=True, slots=True)
class HeadForms:
    """What is done to heads before queries attend and keys and values are stored.

    Norms come first, then the rotation of queries and keys, then what multiplies queries.

    Attributes:
        scale: of queries.
        position_scale: of queries besides, or None.
        rope: None leaves heads as they are.
        norms_follow_rope: those of queries and keys come after it.
        q_norm: of queries, or None; all norms have the same eps.
        k_norm: of keys, or None.
        v_norm: of values, or None.
    """

    scale: float
    position_scale: PositionScale | None = None
    rope: Rope | None = None
    norms_follow_rope: bool = False
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None


def fuse_attention(tape: Tape) -> Tape:
    """Every attention becomes store_qkv and attend, which take over what only they read."""
    index, readers, writers = tape.next_index, tape.readers(), tape.writers()
    changes: dict[Operation, tuple[Operation, ...]] = {}
    for operation in tape.operations:
        if operation.name in _NUM_OPERANDS:
            walk = _Walk(operation, readers, writers)
            new = _store_and_attend(walk, index)
            changes |= {**dict.fromkeys(walk.taken, ()), operation: new}
            index += 1
    return tape.exchange(changes)


def _store_and_attend(walk: _Walk, index: int) -> tuple[Operation, Operation]:
    attention = walk.attention
    kv, scoring = attention.arguments[0], attention.arguments[1 + walk.num_operands]
    forms = walk.take_forms(scoring.scale)
    stored = TapeValue(index, walk.q.rows, walk.q.shape, base=index)
    head_size_v = attention.output.width // walk.q.shape[0]
    return (
        Operation("store_qkv", (kv, walk.q, walk.k, walk.v, POSITIONS, forms), (stored,)),
        replace(attention, name="attend", arguments=(kv, stored, scoring, head_size_v)),
    )


class _Walk:
    """Goes back from an attention's operands, past what they alone go through.

    Attributes:
        taken: the operations that it has gone past.
        q: what is left of queries; k and v likewise.
    """

    k: TapeValue | None
    v: TapeValue | None

    def __init__(
        self,
        attention: Operation,
        readers: Mapping[int, Sequence[Operation]],
        writers: Mapping[int, Operation],
    ) -> None:
        self.attention = attention
        self.num_operands = _NUM_OPERANDS[attention.name]
        self.taken: list[Operation] = []
        self._readers, self._writers = readers, writers
        operands = attention.arguments[1 : 1 + self.num_operands]
        self.q, self.k, self.v = (*operands, None, None)[:3]

    def take_forms(self, scale: float) -> HeadForms:
        """All that store_qkv can do by itself."""
        position_scale = self._take_position_scale()
        rope = self._take_rope()
        q_norm, k_norm = self._take_norms()
        norms_follow_rope = False
        if q_norm is not None and rope is None:
            rope = self._take_rope()
            norms_follow_rope = rope is not None
        v_norm = self._take_v_norm(q_norm)
        return HeadForms(scale, position_scale, rope, norms_follow_rope, q_norm, k_norm, v_norm)

    def _take_position_scale(self) -> PositionScale | None:
        operation = self._find("scale_by_position", self.q)
        if operation is None:
            return None
        self.taken.append(operation)
        scale: PositionScale
        self.q, _, scale = operation.arguments
        return scale

    def _take_rope(self) -> Rope | None:
        if self.k is None:
            operation = self._find("rotate", self.q)
        else:
            operation = self._find("rope", self.q, self.k)
        if operation is None:
            return None
        self.taken.append(operation)
        rope: Rope
        *heads, _, rope = operation.arguments
        self.q, self.k = (*heads, None)[:2]
        return rope

    def _take_norms(self) -> tuple[HeadNorm | None, HeadNorm | None]:
        """Of queries and, if there are keys, of keys: both or none."""
        q_norm = self._find("rms_norm", self.q)
        k_norm = None if self.k is None else self._find("rms_norm", self.k)
        if q_norm is None or (self.k is not None and k_norm is None):
            return None, None
        if k_norm is not None and k_norm.arguments[2] != q_norm.arguments[2]:
            return None, None
        self.taken.append(q_norm)
        self.q = q_norm.arguments[0]
        if k_norm is None:
            return HeadNorm(*q_norm.arguments[1:]), None
        self.taken.append(k_norm)
        self.k = k_norm.arguments[0]
        return HeadNorm(*q_norm.arguments[1:]), HeadNorm(*k_norm.arguments[1:])

    def _take_v_norm(self, q_norm: HeadNorm | None) -> HeadNorm | None:
        operation = None if self.v is None else self._find("rms_norm", self.v)
        if operation is None or (q_norm is not None and q_norm.eps != operation.arguments[2]):
            return None
        self.taken.append(operation)
        self.v = operation.arguments[0]
        return HeadNorm(*operation.arguments[1:])

    def _find(self, name: str, *values: TapeValue) -> Operation | None:
        """The operation `name` that writes just these values, if nobody else reads them."""
        operation = self._writers[values[0].index]
        if operation.name != name or operation.outputs != values:
            return None
        allowed = {self.attention, *self.taken}
        is_private = all(set(self._readers[value.index]) <= allowed for value in values)
        return operation if is_private else None
