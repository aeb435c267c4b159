"""The backend that computes each operation at once, in numpy and float32."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.kv.spec import KVCacheSpec, MLAAttentionSpec
from kvloom.ops.backend import (
    LateTokens,
    RunnableModel,
    StepSizes,
    check_kv_memory,
    check_kv_spec,
    check_packed_shape,
)
from kvloom.ops.base import Batch, Communicator, Ops, Parameter
from kvloom.ops.reference_attention import STORED_TYPES, Array, ReferenceStorage
from kvloom.ops.reference_ops import ReferenceOps


class EagerExecutable:
    """Calls a model's forward pass over the operations of each step."""

    activation_bytes = None
    computes_meanwhile = takes_late_tokens = keeps_best = False

    def __init__(self, model: RunnableModel, make_ops: Callable[[Batch], Any]) -> None:
        self._model = model
        self._make_ops = make_ops

    def bind(self) -> None:
        """The operations find each layer's storage by themselves."""

    def forward(self, batch: Batch, late_tokens: LateTokens | None = None) -> Any:
        """The model's logits."""
        assert late_tokens is None, "a step is over when the next one starts"
        return self._model.forward(self._make_ops(batch), batch)


class ReferenceBackend:
    """Runs each operation at once, in float32, whatever format the checkpoint has."""

    name = "reference"
    pack_rows = None
    joins_requests = False

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> EagerExecutable:
        """The model itself, called anew at each step; any sizes will do."""
        del sizes
        return EagerExecutable(model, lambda batch: self.ops(batch, communicator))

    def pack(self, parameter: Parameter, array: npt.ArrayLike) -> Array:
        """The array itself, as float32.

        Raises:
            WeightsError: the array's shape is not the parameter's.
        """
        packed = np.ascontiguousarray(array, dtype=np.float32)
        check_packed_shape(parameter, packed.shape)
        return packed

    def allocate_kv(self, size_bytes: int) -> npt.NDArray[np.int8]:
        """`size_bytes` zero bytes; the system hands out pages as they are written."""
        return np.zeros(size_bytes, np.int8)

    def view_kv(
        self,
        raw: npt.NDArray[np.int8],
        spec: KVCacheSpec,
        num_blocks: int,
        offset_bytes: int = 0,
    ) -> ReferenceStorage:
        """A layer's blocks in `raw`: block i begins `offset_bytes` after byte i x stride.

        The stride is (size of raw) / num_blocks. Within a block lie the keys, then the values; of
        multi-head latent attention only keys, whose first columns are the values.

        Raises:
            ConfigError: a spec or format that this backend does not compute, or memory that does
                not hold `num_blocks` blocks of the spec.
        """
        spec = check_kv_spec(spec, self.name, STORED_TYPES)
        end = offset_bytes + spec.page_size_bytes
        check_kv_memory(raw.nbytes, num_blocks, end)
        rows = raw.reshape(num_blocks, -1)[:, offset_bytes:end]
        num_key_values = spec.block_size * spec.num_kv_heads * spec.head_size
        stored = rows.view(STORED_TYPES[spec.dtype])
        shape = (num_blocks, spec.block_size, spec.num_kv_heads)
        keys = stored[:, :num_key_values].reshape(*shape, spec.head_size)
        if isinstance(spec, MLAAttentionSpec):
            return ReferenceStorage(spec.dtype, keys, keys[..., : spec.value_head_size])
        values = stored[:, num_key_values:].reshape(*shape, spec.value_head_size)
        return ReferenceStorage(spec.dtype, keys, values)

    def copy_blocks(self, storage: ReferenceStorage, copies: list[tuple[int, int]]) -> None:
        """Copy blocks in order, so that a later copy may read an earlier one's destination."""
        for source, destination in copies:
            storage.keys[destination] = storage.keys[source]
            storage.values[destination] = storage.values[source]

    def ops(self, batch: Batch, communicator: Communicator) -> Ops:
        """Operations for one step."""
        return ReferenceOps(batch, communicator)

    def to_host(self, value: Array) -> Array:
        """The value itself."""
        return value

    def read_device_memory(self) -> None:
        """It computes in the host's memory."""

    @contextmanager
    def meter(self) -> Iterator[ArrayMeter]:
        """Trace allocations; a tracer that is already running is left running."""
        was_tracing = tracemalloc.is_tracing()
        if not was_tracing:
            tracemalloc.start()
        try:
            yield ArrayMeter()
        finally:
            if not was_tracing:
                tracemalloc.stop()


class ArrayMeter:
    """What Python's tracer says of numpy's allocations."""

    @property
    def held_bytes(self) -> int:
        """Traced now."""
        return tracemalloc.get_traced_memory()[0]

    @property
    def peak_bytes(self) -> int:
        """The most that was traced at once."""
        return tracemalloc.get_traced_memory()[1]

    def reset_peak(self) -> None:
        """Begin again with what is traced now."""
        tracemalloc.reset_peak()

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """A float32 array."""
        return np.zeros(shape, np.float32)

    def is_view(self, value: Array, argument: Any) -> bool:
        """Whether `argument` is an array in the same memory."""
        return isinstance(argument, np.ndarray) and np.may_share_memory(value, argument)
