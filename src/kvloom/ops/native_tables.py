"""What native instructions look up by position, and vectors they read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvloom.ops.base import Parameter, PositionScale, Rope
from kvloom.ops.rewrites_attention import HeadForms
from kvloom.ops.tape import Tape

Array = npt.NDArray[np.float32]

_FLOAT_BYTES = 4


class PositionTables:
    """Tables by position, made once for all layers that use them."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._rotations: dict[Rope, Array] = {}
        self._scales: dict[PositionScale, Array] = {}

    def rotations(self, rope: Rope) -> Array:
        """[num_positions, 2 x num_pairs]: cosines, then sines, of each position's angles."""
        if rope not in self._rotations:
            angles = np.outer(np.arange(self._num_positions), np.asarray(rope.inv_freq))
            table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
            self._rotations[rope] = (table * rope.attention_factor).astype(np.float32)
        return self._rotations[rope]

    def scales(self, scale: PositionScale) -> Array:
        """[num_positions]: the factor of each position."""
        if scale not in self._scales:
            steps = np.floor((np.arange(self._num_positions) + 1) / scale.floor_scale)
            self._scales[scale] = (1 + scale.scale * np.log1p(steps)).astype(np.float32)
        return self._scales[scale]


def table_bytes(tape: Tape, num_positions: int) -> int:
    """Bytes of all tables that a tape's operations use."""
    widths: dict[Rope | PositionScale, int] = {}
    for form in _position_forms(tape):
        widths[form] = 2 * len(form.inv_freq) if isinstance(form, Rope) else 1
    return _FLOAT_BYTES * num_positions * sum(widths.values())


def _position_forms(tape: Tape) -> Iterable[Rope | PositionScale]:
    for operation in tape.operations:
        for argument in operation.arguments:
            forms: tuple[object, ...] = (argument,)
            if isinstance(argument, HeadForms):
                forms = (argument.rope, argument.position_scale)
            yield from (form for form in forms if isinstance(form, Rope | PositionScale))


def weight_or_ones(weight: Parameter | None, size: int) -> Array:
    """The values of a norm's weight [size]; ones where it has none."""
    values: Array = np.ones(size, np.float32) if weight is None else weight.value
    return values
