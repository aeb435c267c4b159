"""The backend that computes each operation at once, on a device that torch has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.kv.spec import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from kvloom.ops.backend import (
    DeviceMemory,
    LateTokens,
    MemoryMeter,
    RunnableModel,
    StepSizes,
    check_kv_memory,
    check_kv_spec,
    check_packed_shape,
)
from kvloom.ops.base import Batch, Communicator, Ops, Parameter
from kvloom.ops.reference import EagerExecutable
from kvloom.ops.torch_attention import INT8_GROUP, STORED_TYPES, BlockRows, TorchStorage
from kvloom.ops.torch_memory import measure, read_device_memory
from kvloom.ops.torch_ops import TorchOps


class TorchExecutable(EagerExecutable):
    """Calls a model's forward pass over the operations of each step, without gradients."""

    def __init__(
        self, model: RunnableModel, backend: TorchBackend, communicator: Communicator
    ) -> None:
        super().__init__(model, lambda batch: backend.ops(batch, communicator))
        self._device = backend.device
        self.computes_meanwhile = torch.device(backend.device).type != "cpu"

    def forward(self, batch: Batch, late_tokens: LateTokens | None = None) -> Any:
        """The model's logits."""
        assert late_tokens is None, "a step is over when the next one starts"
        with torch.inference_mode():
            moved = replace(
                batch,
                token_ids=torch.as_tensor(batch.token_ids, device=self._device),
                positions=torch.as_tensor(batch.positions, device=self._device),
                logits_rows=torch.as_tensor(batch.logits_rows, device=self._device),
            )
            return super().forward(moved)


class TorchBackend:
    """Runs each operation at once on one device.

    Attributes:
        device: where weights, KV and values are.
        dtype: of matrices, and what they and attention are computed in; all else is float32.
    """

    name = "torch"
    pack_rows = None
    joins_requests = True

    def __init__(
        self, device: str = "cpu", dtype: DType = DType.FLOAT32, num_threads: int | None = None
    ) -> None:
        """Find the device: "cpu", "cuda", "neuron", or what else this torch has.

        `num_threads` are those of torch on the CPU, in this process; None leaves them as they are.

        Raises:
            ConfigError: this torch has no such device.
        """
        self.device = _find_device(device)
        self.dtype: torch.dtype = STORED_TYPES[dtype]
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> TorchExecutable:
        """The model itself, called anew at each step; any sizes will do."""
        del sizes
        return TorchExecutable(model, self, communicator)

    def pack(self, parameter: Parameter, array: npt.ArrayLike) -> Tensor:
        """A copy on the device: matrices in the backend's format, vectors in float32.

        Raises:
            WeightsError: the array's shape is not the parameter's.
        """
        values = np.asarray(array, np.float32)
        check_packed_shape(parameter, values.shape)
        dtype = self.dtype if parameter.is_matrix else torch.float32
        return torch.tensor(values, dtype=dtype, device=self.device)

    def allocate_kv(self, size_bytes: int) -> Tensor:
        """`size_bytes` zero bytes on the device."""
        if self.device.type == "cpu":  # numpy's pages are handed out as they are written
            return torch.from_numpy(np.zeros(size_bytes, np.int8))
        return torch.zeros(size_bytes, dtype=torch.int8, device=self.device)

    def view_kv(
        self, raw: Tensor, spec: KVCacheSpec, num_blocks: int, offset_bytes: int = 0
    ) -> TorchStorage:
        """A layer's blocks in `raw`: block i begins `offset_bytes` after byte i x stride.

        The stride is (size of raw) / num_blocks. Within a block lie the keys, then the values, each
        followed by its scales; of multi-head latent attention only keys.

        Raises:
            ConfigError: a spec or format that this backend does not compute, or memory that does
                not hold `num_blocks` blocks of the spec.
        """
        spec = check_spec(spec)
        end = offset_bytes + spec.page_size_bytes
        check_kv_memory(raw.nbytes, num_blocks, end)
        page = raw.view(num_blocks, -1)[:, offset_bytes:end]
        keys = _view_rows(page, spec, spec.head_size)
        if isinstance(spec, MLAAttentionSpec):
            return TorchStorage(keys, None, spec.value_head_size)
        key_bytes = spec.dtype.num_bytes(spec.block_size * spec.num_kv_heads * spec.head_size)
        values = _view_rows(page[:, key_bytes:], spec, spec.value_head_size)
        return TorchStorage(keys, values, spec.value_head_size)

    def copy_blocks(self, storage: TorchStorage, copies: list[tuple[int, int]]) -> None:
        """Copy blocks in order, so that a later copy may read an earlier one's destination."""
        for source, destination in copies:
            storage.keys.copy_block(source, destination)
            if storage.values is not None:
                storage.values.copy_block(source, destination)

    def ops(self, batch: Batch, communicator: Communicator) -> Ops:
        """Operations for one step."""
        return TorchOps(batch, communicator, self.device, self.dtype)

    def to_host(self, value: Tensor) -> npt.NDArray[np.float32]:
        """A value as an array; waits for the device."""
        array: npt.NDArray[np.float32] = value.cpu().numpy()
        return array

    def read_device_memory(self) -> DeviceMemory | None:
        """What a CUDA device has; None for others."""
        return read_device_memory(self.device)

    def meter(self) -> AbstractContextManager[MemoryMeter]:
        """Measure memory from here on."""
        return measure(self.device)


def _find_device(name: str) -> torch.device:
    """The device, once it has been seen to hold a value."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"torch {torch.__version__} has no device {name!r} here ({reason}); install a build of "
            "torch for it, or use device cpu"
        ) from None
    return device


def _view_rows(page: Tensor, spec: AttentionSpec, size: int) -> BlockRows:
    """The keys or the values at the beginning of `page` [num_blocks, num_bytes]."""
    shape = (spec.block_size, spec.num_kv_heads)
    num_values = spec.block_size * spec.num_kv_heads * size
    if spec.dtype is not DType.INT8:
        numbers = page[:, : spec.dtype.num_bytes(num_values)].view(STORED_TYPES[spec.dtype])
        return BlockRows(numbers.unflatten(1, (*shape, size)))
    codes, scales = page[:, :num_values], page[:, num_values : spec.dtype.num_bytes(num_values)]
    return BlockRows(
        codes.unflatten(1, (*shape, size)),
        scales.view(torch.bfloat16).unflatten(1, (*shape, size // INT8_GROUP)),
    )


def check_spec(spec: KVCacheSpec) -> AttentionSpec:
    """The spec, if this backend computes it: attention in a format of `STORED_TYPES`.

    Raises:
        ConfigError: it does not.
    """
    spec = check_kv_spec(spec, TorchBackend.name, STORED_TYPES)
    if spec.dtype is DType.INT8 and (
        spec.head_size % INT8_GROUP or spec.value_head_size % INT8_GROUP
    ):
        raise ConfigError(
            f"int8 needs head sizes that are multiples of {INT8_GROUP}, not {spec.head_size} and "
            f"{spec.value_head_size}; set kv_cache_dtype to bfloat16"
        )
    return spec
