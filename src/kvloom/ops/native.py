"""Hands a model's tape to the native library, which replays it in one call per step.

Weights are packed into panels when they are loaded, KV lies in the layout the kernels read, and
activations in an arena whose size is known before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from kvloom.ops.backend import RunnableModel, StepSizes, check_kv_memory, check_packed_shape
from kvloom.ops.base import Communicator, PackedFormat, Parameter, StoredRows
from kvloom.ops.isa import load_native
from kvloom.ops.native_program import NativeProgram
from kvloom.ops.rewrites import fuse
from kvloom.ops.tape import Tape, record

Array = npt.NDArray[np.float32]

BLOCK_MULTIPLE = 16  # tokens: as many scores as fill a vector
_KV_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.INT8)
_ROW_DTYPES = (DType.FLOAT32, DType.BFLOAT16)  # of multi-head latent attention


@dataclass(frozen=True, slots=True)
class NativeStorage:
    """The blocks of one layer.

    Attributes:
        raw: [size_bytes] of the layer's KV cache tensor; layers may share it.
        num_blocks: block i begins at byte offset_bytes + i x (size_bytes / num_blocks).
        offset_bytes: where the layer's part of a block begins.
        page_size_bytes: of that part.
    """

    raw: npt.NDArray[np.int8]
    num_blocks: int
    offset_bytes: int
    page_size_bytes: int


class NativeBackend:
    """Kernels in C++ for this machine's instruction set.

    Attributes:
        kernels: the module of that instruction set.
        team: the threads of this rank, for whoever else computes between steps.
    """

    name = "native"

    def __init__(self, num_threads: int) -> None:
        """Load the library.

        Raises:
            ConfigError: there is none in this installation.
        """
        self.kernels: ModuleType = load_native()
        self.team: Any = self.kernels.ThreadTeam(num_threads)
        self._pool = self.kernels.WeightPool()
        self._gated: frozenset[str] = frozenset()

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> NativeProgram:
        """Record and fuse the model's forward pass; called before weights are loaded."""
        tape = fuse(record(model, communicator.world_size))
        # Gate and up are packed side by side, so this must be known when they are.
        self._gated = frozenset(_gate_names(tape))
        return NativeProgram(tape, (self.kernels, self.team), communicator, sizes)

    def pack(self, parameter: Parameter, array: npt.ArrayLike) -> Any:
        """A vector as float32; a matrix packed as F32.

        Raises:
            WeightsError: the array's shape is not the parameter's.
        """
        values = np.ascontiguousarray(array, dtype=np.float32)
        check_packed_shape(parameter, values.shape)
        if not parameter.is_matrix:
            return values
        rows = values.reshape(-1, values.shape[-1])
        stored = StoredRows("F32", rows.shape[1], rows.view(np.uint8))
        return self.pack_rows(parameter, "F32", [stored])

    def pack_rows(
        self, parameter: Parameter, packed: PackedFormat, parts: Iterable[StoredRows]
    ) -> Any:
        """A matrix, or a stack of them, from its sources' rows.

        Raises:
            WeightsError: the parts are not the parameter's rows.
        """
        *stack, num_outputs, num_inputs = parameter.shape
        num_matrices = stack[0] if stack else 1
        is_gated = parameter.name in self._gated
        weight = self._pool.allocate(packed, is_gated, num_outputs, num_inputs, num_matrices)
        num_packed = 0
        for part in parts:
            num_rows = len(part.data)
            if part.num_inputs != num_inputs:
                break
            if part.first_row + num_rows > num_matrices * num_outputs:
                break
            weight.pack(part.format, part.data, part.first_row)
            num_packed += num_rows
        else:
            if num_packed == num_matrices * num_outputs:
                return weight
        raise WeightsError(
            f"the rows of {parameter.name} do not make up shape {parameter.shape}; "
            "the checkpoint does not belong to this config"
        )

    def allocate_kv(self, size_bytes: int) -> npt.NDArray[np.int8]:
        """`size_bytes` zero bytes; the system hands out (huge) pages as they are written."""
        raw: npt.NDArray[np.int8] = self.kernels.allocate_bytes(size_bytes)
        return raw

    def view_kv(
        self,
        raw: npt.NDArray[np.int8],
        spec: KVCacheSpec,
        num_blocks: int,
        offset_bytes: int = 0,
    ) -> NativeStorage:
        """A layer's blocks in `raw`.

        Raises:
            ConfigError: the kernels do not compute the spec, or `raw` does not hold the blocks.
        """
        if (problem := find_problem(spec)) is not None:
            raise ConfigError(f"the native backend {problem}; use backend reference")
        check_kv_memory(raw.nbytes, num_blocks, offset_bytes + spec.page_size_bytes)
        return NativeStorage(raw, num_blocks, offset_bytes, spec.page_size_bytes)

    def copy_blocks(self, storage: NativeStorage, copies: list[tuple[int, int]]) -> None:
        """Copy blocks in order, so that a later copy may read an earlier one's destination."""
        self.team.finish()  # a step that nobody waited for may still read them
        part = slice(storage.offset_bytes, storage.offset_bytes + storage.page_size_bytes)
        blocks = storage.raw.reshape(storage.num_blocks, -1)[:, part]
        for source, destination in copies:
            blocks[destination] = blocks[source]

    def to_host(self, value: Array) -> Array:
        """The value itself, once it is computed: a view of memory, valid until the next step."""
        self.team.finish()
        return value

    def read_device_memory(self) -> None:
        """It computes in the host's memory."""


def _gate_names(tape: Tape) -> Iterator[str]:
    """The parameters whose rows are gates, then what they let through."""
    for operation in tape.operations:
        if operation.name in ("gated_linear", "gated_pack"):
            yield operation.arguments[1].name
        elif operation.name == "gate_experts":
            yield operation.arguments[2].gate_up.name


def find_problem(spec: KVCacheSpec) -> str | None:
    """Why the kernels do not compute a layer of this spec; None if they do."""
    if spec.block_size % BLOCK_MULTIPLE:
        return f"stores KV in blocks of multiples of {BLOCK_MULTIPLE} tokens, not {spec.block_size}"
    if not isinstance(spec, AttentionSpec):
        return f"computes attention over KV, not {type(spec).__name__}"
    if isinstance(spec, MLAAttentionSpec):
        return _find_row_problem(spec)
    if spec.dtype not in _KV_DTYPES:
        return f"stores KV as one of {_names(_KV_DTYPES)}, not {spec.dtype.value}"
    step = 32 if spec.dtype is DType.INT8 else 16
    for size in (spec.head_size, spec.value_head_size):
        if size % step or not 0 < size <= 512:
            kind = f"{spec.dtype.value} KV"
            return f"computes heads of multiples of {step} up to 512 with {kind}, not {size}"
    return None


def _find_row_problem(spec: MLAAttentionSpec) -> str | None:
    if spec.dtype not in _ROW_DTYPES:
        return f"stores latent rows as one of {_names(_ROW_DTYPES)}, not {spec.dtype.value}"
    size, size_v = spec.head_size, spec.value_head_size
    if size % 16 or size_v % 16 or not 0 < size_v <= size <= 640:
        return (
            "computes latent rows of multiples of 16 up to 640, values included, "
            f"not {size} with {size_v}"
        )
    return None


def _names(dtypes: tuple[DType, ...]) -> str:
    return ", ".join(dtype.value for dtype in dtypes)
