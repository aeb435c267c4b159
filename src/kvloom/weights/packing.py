"""Checkpoint rows in the format they are stored in, on their way to packed weights.

What a stored format becomes, by the dtype asked for:

| stored           | auto | bfloat16 | float32 |                                              |
|------------------|------|----------|---------|----------------------------------------------|
| F32              | F32  | BF16     | F32     |                                              |
| BF16             | BF16 | BF16     | F32     | exact                                        |
| F16              | BF16 | BF16     | F32     | BF16 drops 3 of 11 bits of each value        |
| Q8_0             | Q8   | BF16     | F32     | exact in auto: codes and scales are kept     |
| Q4_0, Q4_1       | Q4   | BF16     | F32     | exact in auto                                |
| Q5_0             | Q8   | BF16     | F32     | exact in auto: read as Q8_0                  |
| Q4_K             | Q4   | BF16     | F32     | read as Q4_1: scales rounded to 11 bits      |
| Q6_K, Q5_K, ...  | BF16 | BF16     | F32     | dequantised; BF16 rounds values to 8 bits    |

A parameter stacked from sources that become different formats takes the widest of them, and a
quantised one that is not made of whole blocks on this rank takes BF16.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvloom.errors import WeightsError
from kvloom.ops.base import PackedFormat, StoredRows

BLOCK_VALUES = 32
# Bytes of one block of 32 values, or of one value.
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_AS_STORED: dict[str, PackedFormat] = {"F32": "F32", "Q8_0": "Q8", "Q4_0": "Q4", "Q4_1": "Q4"}
_FORCED: dict[str, PackedFormat] = {"float32": "F32", "bfloat16": "BF16"}
# Which stored formats a packed one takes without a change beyond rounding to it.
_TAKES: dict[PackedFormat, frozenset[str]] = {
    "F32": frozenset(_VALUE_BYTES),
    "BF16": frozenset(_VALUE_BYTES),
    "Q8": frozenset({"Q8_0"}),
    "Q4": frozenset({"Q4_0", "Q4_1"}),
}
# The stored format that takes as many bytes as a packed one: Q4 has a minimum per block, like Q4_1.
_AS_LARGE_AS: dict[PackedFormat, str] = {"F32": "F32", "BF16": "BF16", "Q8": "Q8_0", "Q4": "Q4_1"}


def packed_format(stored: Iterable[str], dtype: str, *, has_whole_blocks: bool) -> PackedFormat:
    """What a parameter stacked from sources of these formats is packed as.

    Args:
        stored: formats of the sources, by their names in the file.
        dtype: "auto", "bfloat16" or "float32".
        has_whole_blocks: whether each source's columns on this rank are whole blocks of 32.
    """
    if dtype in _FORCED:
        return _FORCED[dtype]
    formats = {_AS_STORED.get(name, "BF16") for name in stored}
    if len(formats) == 1 and (has_whole_blocks or not formats & {"Q8", "Q4"}):
        return formats.pop()
    return "F32" if "F32" in formats else "BF16"


def packed_bytes(packed: PackedFormat, num_values: int) -> int:
    """Bytes of so many values of a matrix, before its sides are padded to multiples of 32."""
    num_unit_values, unit_bytes = unit_size(_AS_LARGE_AS[packed])
    return num_values // num_unit_values * unit_bytes


def can_move(stored: str, packed: PackedFormat) -> bool:
    """Whether rows can be packed as they are stored; others are dequantised first."""
    return stored in _TAKES[packed]


def unit_size(stored: str) -> tuple[int, int]:
    """Values and bytes of the smallest unit of a format that rows can be cut into."""
    if stored in _BLOCK_BYTES:
        return BLOCK_VALUES, _BLOCK_BYTES[stored]
    return 1, _VALUE_BYTES[stored]


def stored_rows(
    name: str, stored: str, shape: tuple[int, ...], raw: npt.NDArray[np.uint8]
) -> StoredRows:
    """The bytes of a matrix, or of a stack of them, as rows [..., row_bytes].

    Raises:
        WeightsError: the tensor `name` is a vector or a single value.
    """
    if len(shape) < 2:
        raise WeightsError(
            f"tensor {name} has shape {list(shape)}, the model needs a matrix; check that the "
            "configuration belongs to the checkpoint"
        )
    return StoredRows(stored, shape[-1], raw.reshape(*shape[:-1], -1))
