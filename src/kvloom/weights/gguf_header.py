"""Headers of GGUF files: metadata and the table of tensors.

The header is parsed here: the gguf package's reader makes several objects per string of the
vocabulary, which takes seconds where this takes a tenth of one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvloom.errors import UnsupportedModelError, WeightsError
from kvloom.weights.mapped_file import MappedFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 counted in 32 bits; no file in use has it
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Metadata value type -> numpy format of one value.
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file.

    Attributes:
        shape: in Hugging Face order: [out, in] for a matrix.
        type: its block format.
        start: of its first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block_size * block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the tensors' bytes: key/value pairs and the table of tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads the header's little-endian values one after another."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> memoryview:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self._data):
            raise EOFError
        return self._data[start : self.position]

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def string(self) -> str:
        return str(self.take(self.u64()), "utf-8")

    def value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            item_type, count = self.u32(), self.u64()
            return self._strings(count) if item_type == _STRING else self._array(item_type, count)
        return self._array(value_type, 1)[0]

    def _array(self, item_type: int, count: int) -> list[Any]:
        if item_type not in _SCALARS:
            raise ValueError(f"metadata values of type {item_type} are not known")
        dtype = np.dtype(_SCALARS[item_type])
        return list(np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist())

    def _strings(self, count: int) -> list[str]:
        # The vocabulary: hundreds of thousands of strings, so without a call per string.
        data, position, size_of, strings = self._data, self.position, _U64.unpack_from, []
        for _ in range(count):
            end = position + 8 + size_of(data, position)[0]
            strings.append(str(data[position + 8 : end], "utf-8"))
            position = end
        if position > len(data):
            raise EOFError
        self.position = position
        return strings


def read_header(path: Path) -> Header:
    """The header of a GGUF file of any architecture.

    Raises:
        UnsupportedModelError: another kind of file, a version or a tensor type we do not read.
        WeightsError: the file is cut off or damaged; names the first tensor hit.
    """
    data = MappedFile(path).data
    try:
        header = _read_header(_Cursor(data.data), path)
    except (EOFError, struct.error):
        raise WeightsError(f"{path}: the file ends within its header; fetch it again") from None
    except ValueError as error:  # wrong UTF-8 included
        raise WeightsError(f"{path}: the header is damaged ({error}); fetch it again") from None
    for info in header.tensors.values():
        _check_extent(path, info, len(data))
    return header


def _read_header(cursor: _Cursor, path: Path) -> Header:
    if cursor.take(4) != _MAGIC:
        raise UnsupportedModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read"
        )
    num_tensors, num_pairs = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    infos = [_read_tensor_info(cursor, path) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(name, shape, kind, data_start + offset)
        for name, shape, kind, offset in infos
    }
    if len(tensors) < num_tensors:
        raise ValueError("two tensors have the same name")
    return Header(metadata, tensors)


def _read_tensor_info(
    cursor: _Cursor, path: Path
) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    sizes = [cursor.u64() for _ in range(cursor.u32())]
    type_id, offset = cursor.u32(), cursor.u64()
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise UnsupportedModelError(
            f"{path}: tensor {name} is stored as type {type_id}, which is not known; "
            "a newer gguf package may read it"
        ) from None
    return name, tuple(reversed(sizes)), kind, offset


def _check_extent(path: Path, info: TensorInfo, file_bytes: int) -> None:
    block_size, _ = GGML_QUANT_SIZES[info.type]
    if not info.shape or info.shape[-1] % block_size:
        raise WeightsError(
            f"{path}: tensor {info.name} of shape {list(info.shape)} is not made of whole blocks "
            f"of {block_size} {info.type.name} values; the file is damaged"
        )
    if info.start + info.num_bytes > file_bytes:
        raise WeightsError(
            f"{path}: tensor {info.name} ends at byte {info.start + info.num_bytes}, the file at "
            f"{file_bytes}; it is cut off, fetch it again"
        )
