"""What turns a model over the vocabulary into something that runs. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import AttentionSpec, KVCacheSpec
from kvloom.ops.base import Batch, Communicator, Ops, PackedFormat, Parameter, StoredRows, Value


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most a step may hold.

    Attributes:
        max_num_tokens: over all requests.
        max_num_reqs: requests.
        max_num_rows: rows of logits.
        max_model_len: stored tokens of one request.
        block_size: tokens per block that layers ask for; a group may choose a multiple.
    """

    max_num_tokens: int
    max_num_reqs: int
    max_num_rows: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device that has its own, over all processes."""

    total_bytes: int
    free_bytes: int


# Makes a matrix of its sources' rows, one after another, as they are stored.
PackRows = Callable[[Parameter, PackedFormat, Iterable[StoredRows]], Any]


class RunnableModel(Protocol):
    """What a backend asks of a model."""

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size], by operations alone."""


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a batch that are sampled from the step before, which still runs.

    Attributes:
        places: int64 [num_late] in the batch.
        rows: int64 [num_late] of `sampled_ids`.
        sampled_ids: int32 [num_rows], once that step has been sampled.
    """

    places: Any
    rows: Any
    sampled_ids: Any


class Executable(Protocol):
    """A model's forward pass in the form a backend runs it in.

    Attributes:
        activation_bytes: memory it needs beyond weights and KV; None if that must be measured.
        computes_meanwhile: whether `forward` returns before it has computed.
        takes_late_tokens: whether `forward` may be called while the step before still runs.
        keeps_best: whether it heeds `Batch.wants_best_only`: what it returns then is for the
            sampler that belongs to it alone.
    """

    computes_meanwhile: bool
    takes_late_tokens: bool
    keeps_best: bool

    @property
    def activation_bytes(self) -> int | None:
        """Known once the weights are loaded."""

    def bind(self) -> None:
        """Take the storage that the model's KV layers are bound to; before the first step."""

    def forward(self, batch: Batch, late_tokens: LateTokens | None = None) -> Value:
        """Start a step: its logits [num_rows, vocab_size], valid until the next one runs.

        Where it keeps the best only, a batch that wants no more gets rows of that shape which only
        its sampler can read.
        """


class Backend(Protocol):
    """Turns a model, its weights and KV memory into what it runs. One per worker.

    Attributes:
        name: as the user names it.
    """

    name: str

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> Executable:
        """The model's forward pass; called before weights are loaded."""

    @property
    def pack_rows(self) -> PackRows | None:
        """Packs matrices as they are stored; None if it takes them as host arrays alone."""

    def pack(self, parameter: Parameter, array: Any) -> Any:
        """A host array of `parameter.shape` in the form this backend's operations read."""

    def allocate_kv(self, size_bytes: int) -> Any:
        """Raw zeroed memory for one KVCacheTensor."""

    def view_kv(self, raw: Any, spec: KVCacheSpec, num_blocks: int, offset_bytes: int = 0) -> Any:
        """A layer's storage over raw memory: what KVLayer.storage holds.

        Block i begins at byte offset_bytes + i x (bytes of raw / num_blocks).
        """

    def copy_blocks(self, storage: Any, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) within one layer's storage."""

    def to_host(self, value: Value) -> Any:
        """A value as a float32 numpy array."""

    def read_device_memory(self) -> DeviceMemory | None:
        """What the device has now; None if it is the host's, or if the device does not tell."""


class MemoryMeter(Protocol):
    """What values take while a backend computes."""

    @property
    def held_bytes(self) -> int:
        """Taken now, by what was allocated since the meter runs."""

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at once since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin again with what is taken now."""

    def zeros(self, shape: tuple[int, ...]) -> Value:
        """A value of that shape."""

    def is_view(self, value: Value, argument: Any) -> bool:
        """Whether `argument` is a value, too, and both lie in the same memory."""


class EagerBackend(Backend, Protocol):
    """A backend that computes each operation when it is called.

    Attributes:
        joins_requests: whether attention of many requests takes memory for all of them at once.
    """

    joins_requests: bool

    def meter(self) -> AbstractContextManager[MemoryMeter]:
        """Measure memory from here on."""

    def ops(self, batch: Batch, communicator: Communicator) -> Ops:
        """The operations for one step over `batch`."""


def check_packed_shape(parameter: Parameter, shape: tuple[int, ...]) -> None:
    """Refuse an array that is not the parameter's.

    Raises:
        WeightsError: names the parameter and both shapes.
    """
    if shape != parameter.shape:
        raise WeightsError(
            f"{parameter.name} should have shape {parameter.shape}, not {shape}; "
            "the checkpoint does not belong to this config"
        )


def check_kv_spec(spec: KVCacheSpec, name: str, dtypes: Collection[DType]) -> AttentionSpec:
    """The spec, if it is of attention that stores one of `dtypes`; `name` is the backend's.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"the {name} backend binds layers that store KV, not {spec}; bind a layer that shares "
            "KV to the spec of the layer it shares with"
        )
    if spec.dtype not in dtypes:
        known = ", ".join(dtype.value for dtype in dtypes)
        raise ConfigError(
            f"the {name} backend does not store {spec.dtype.value}; set kv_cache_dtype to one of "
            f"{known}"
        )
    return spec


def check_kv_memory(raw_bytes: int, num_blocks: int, end_bytes: int) -> None:
    """Refuse memory that is no `num_blocks` equal blocks, or too small for a layer's part of them.

    Args:
        raw_bytes: of a KVCacheTensor.
        num_blocks: that it is cut into.
        end_bytes: where the layer's part of a block ends.

    Raises:
        ConfigError: with the numbers.
    """
    if raw_bytes % num_blocks or raw_bytes // num_blocks < end_bytes:
        raise ConfigError(
            f"{raw_bytes} bytes do not hold {num_blocks} blocks of {end_bytes}; "
            "allocate what the KV cache config says"
        )
