"""Hands a model's tape to the native library, which replays it in one call per step.

Weights are packed into panels when they are loaded, KV lies in the layout the kernels read, and
activations in an arena whose size is known before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import AttentionSpec, FullAttentionSpec, KVCacheSpec
from kvloom.ops.base import (
    Communicator,
    PackedFormat,
    Parameter,
    RunnableModel,
    StepSizes,
    StoredRows,
)
from kvloom.ops.isa import load_native
from kvloom.ops.native_program import NativeProgram
from kvloom.ops.rewrites import fuse
from kvloom.ops.tape import record

Array = npt.NDArray[np.float32]

BLOCK_MULTIPLE = 16  # tokens: as many scores as fill a vector
_KV_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.INT8)


@dataclass(frozen=True, slots=True)
class NativeStorage:
    """The blocks of one layer.

    Attributes:
        raw: [size_bytes] of the layer's KV cache tensor; layers may share it.
        num_blocks: block i begins at byte i x (size_bytes / num_blocks).
    """

    raw: npt.NDArray[np.int8]
    num_blocks: int


class NativeBackend:
    """Kernels in C++ for this machine's instruction set.

    Attributes:
        library: the module of that instruction set.
        team: the threads of this rank, for whoever else computes between steps.
    """

    name = "native"
    packs_stored_rows = True

    def __init__(self, num_threads: int) -> None:
        """Load the library.

        Raises:
            ConfigError: there is none in this installation.
        """
        self.library: ModuleType = load_native()
        self.team: Any = self.library.ThreadTeam(num_threads)
        self._pool = self.library.WeightPool()
        self._gated: frozenset[str] = frozenset()

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> NativeProgram:
        """Record and fuse the model's forward pass; called before weights are loaded."""
        tape = fuse(record(model, communicator.world_size))
        # Gate and up are packed side by side, so this must be known when they are.
        self._gated = frozenset(
            operation.arguments[1].name
            for operation in tape.operations
            if operation.name in ("gated_linear", "gated_pack")
        )
        return NativeProgram(tape, (self.library, self.team), communicator, sizes)

    def pack(self, parameter: Parameter, array: npt.ArrayLike) -> Any:
        """A vector as float32; a matrix packed as F32.

        Raises:
            WeightsError: the array's shape is not the parameter's.
        """
        values = np.ascontiguousarray(array, dtype=np.float32)
        if values.shape != parameter.shape:
            raise WeightsError(
                f"{parameter.name} should have shape {parameter.shape}, not {values.shape}; "
                "the checkpoint does not belong to this config"
            )
        if values.ndim == 1:
            return values
        rows = StoredRows("F32", values.shape[1], values.view(np.uint8).reshape(len(values), -1))
        return self.pack_rows(parameter, "F32", [rows])

    def pack_rows(
        self, parameter: Parameter, packed: PackedFormat, parts: Iterable[StoredRows]
    ) -> Any:
        """A matrix from its sources' rows, one after another.

        Raises:
            WeightsError: the parts are not the parameter's rows.
        """
        num_outputs, num_inputs = parameter.shape
        is_gated = parameter.name in self._gated
        weight = self._pool.allocate(packed, is_gated, num_outputs, num_inputs)
        first_output = 0
        for part in parts:
            num_rows = len(part.data)
            if part.num_inputs != num_inputs or first_output + num_rows > num_outputs:
                break
            weight.pack(part.format, part.data, first_output)
            first_output += num_rows
        else:
            if first_output == num_outputs:
                return weight
        raise WeightsError(
            f"the rows of {parameter.name} do not make up shape {parameter.shape}; "
            "the checkpoint does not belong to this config"
        )

    def allocate_kv(self, size_bytes: int) -> npt.NDArray[np.int8]:
        """`size_bytes` zero bytes; the system hands out (huge) pages as they are written."""
        raw: npt.NDArray[np.int8] = self.library.allocate_bytes(size_bytes)
        return raw

    def view_kv(
        self, raw: npt.NDArray[np.int8], spec: KVCacheSpec, num_blocks: int
    ) -> NativeStorage:
        """A layer's blocks in `raw`.

        Raises:
            ConfigError: the kernels do not compute the spec, or `raw` does not hold the blocks.
        """
        if (problem := find_problem(spec)) is not None:
            raise ConfigError(f"the native backend {problem}; use backend reference")
        if raw.nbytes % num_blocks or raw.nbytes // num_blocks < spec.page_size_bytes:
            raise ConfigError(
                f"{raw.nbytes} bytes do not hold {num_blocks} blocks of {spec.page_size_bytes}; "
                "allocate what the KV cache config says"
            )
        return NativeStorage(raw, num_blocks)

    def copy_blocks(self, storage: NativeStorage, copies: list[tuple[int, int]]) -> None:
        """Copy blocks in order, so that a later copy may read an earlier one's destination."""
        blocks = storage.raw.reshape(storage.num_blocks, -1)
        for source, destination in copies:
            blocks[destination] = blocks[source]

    def to_host(self, value: Array) -> Array:
        """The value itself: a view of native memory, valid until the next step."""
        return value


def find_problem(spec: KVCacheSpec) -> str | None:
    """Why the kernels do not compute a layer of this spec; None if they do."""
    if spec.block_size % BLOCK_MULTIPLE:
        return f"stores KV in blocks of multiples of {BLOCK_MULTIPLE} tokens, not {spec.block_size}"
    if not isinstance(spec, FullAttentionSpec) or (
        spec.sliding_window is not None or spec.attention_chunk_size is not None
    ):
        return "computes full attention alone, without windows or chunks"
    return _find_head_problem(spec)


def _find_head_problem(spec: AttentionSpec) -> str | None:
    if spec.dtype not in _KV_DTYPES:
        known = ", ".join(dtype.value for dtype in _KV_DTYPES)
        return f"stores KV as one of {known}, not {spec.dtype.value}"
    step = 32 if spec.dtype is DType.INT8 else 16
    for size in (spec.head_size, spec.value_head_size):
        if size % step or not 0 < size <= 512:
            kind = f"{spec.dtype.value} KV"
            return f"computes heads of multiples of {step} up to 512 with {kind}, not {size}"
    return None
