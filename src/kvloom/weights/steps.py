"""What a source's steps make of its tensor: of values, or of rows as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.ops.base import StoredRows
from kvloom.ops.source import Add, Reshape, Slice, Source, Step, SwapAxes
from kvloom.weights.packing import BLOCK_VALUES, unit_size

AnyArray = npt.NDArray[Any]


def take_steps(array: AnyArray, steps: Sequence[Step]) -> AnyArray:
    """The array after all steps, in order; a view of it where they allow."""
    for step in steps:
        match step:
            case Slice(axis, start, stop, stride):
                array = array[(slice(None),) * axis + (slice(start, stop, stride),)]
            case Reshape(shape):
                array = array.reshape(shape)
            case SwapAxes(first, second):
                array = array.swapaxes(first, second)
            case Add(constant):
                array = array + np.asarray(constant, array.dtype)
    return array


def restore_halves(shape: tuple[int, ...], num_heads: int) -> tuple[Step, ...]:
    """What undoes interleaving: per head, rows a0 b0 a1 b1 ... become a0 a1 ... b0 b1 ..."""
    pairs = (num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return Reshape(pairs), SwapAxes(1, 2), Reshape(shape)


def only_moves(source: Source) -> bool:
    """Whether the steps leave every value as it is."""
    return not any(isinstance(step, Add) for step in source.steps)


def block_steps(source: Source) -> tuple[Step, ...] | None:
    """The steps where the last axis counts blocks of 32 values; None if they cut blocks."""
    num_values, last = source.shape[-1], len(source.shape) - 1
    if num_values % BLOCK_VALUES:
        return None
    steps: list[Step] = []
    for step in source.steps:
        match step:
            case Slice(axis, start, stop, stride) if axis == last:
                if stride != 1 or (start | stop) % BLOCK_VALUES:
                    return None
                num_values = stop - start
                steps.append(Slice(axis, start // BLOCK_VALUES, stop // BLOCK_VALUES))
            case Reshape(shape):
                if shape[-1] != num_values:
                    return None
                last = len(shape) - 1
                steps.append(Reshape((*shape[:-1], num_values // BLOCK_VALUES)))
            case SwapAxes(first, second) if last in (first, second):
                return None
            case Add():
                return None
            case _:
                steps.append(step)
    return tuple(steps)


def move_rows(rows: StoredRows, source: Source) -> AnyArray:
    """Rows after the source's steps: [..., units], a unit being one value or one block as stored.

    Args:
        rows: data is [..., row_bytes].
        source: its steps only move values, and cut no blocks if the rows are made of them.
    """
    num_values, num_bytes = unit_size(rows.format)
    steps = source.steps if num_values == 1 else block_steps(source)
    assert steps is not None  # what blocks are cut by is not packed as blocks
    return take_steps(rows.data.view(f"V{num_bytes}"), steps)


def rows_of_units(units: AnyArray, stored_format: str, first_row: int) -> StoredRows:
    """[num_rows, num_units] values or blocks, as rows in the format they have."""
    data = np.ascontiguousarray(units).view(np.uint8)
    num_values, _ = unit_size(stored_format)
    return StoredRows(stored_format, units.shape[1] * num_values, data, first_row)
