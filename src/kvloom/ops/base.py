"""The vocabulary a model may use, and the handles it is written over. Standard library only.

A model calls these operations on opaque values and never looks inside one: the reference computes
at once, a tape records. Shapes are in brackets; tokens of all requests lie flat, one after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvloom.dtypes import DType
from kvloom.kv.spec import KVCacheSpec

Value = Any  # an activation: an array in the reference, a buffer handle on a tape
Activation = Literal["silu", "gelu", "gelu_tanh"]
# Formats of packed weights: numbers, or groups of 32 with 8- or 4-bit codes.
PackedFormat = Literal["F32", "BF16", "Q8", "Q4"]


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows (`axis` 0) or columns (`axis` 1) of a checkpoint tensor that one rank keeps."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor that makes up (a part of) a parameter.

    Attributes:
        name: the tensor's name in a Hugging Face checkpoint.
        shape: its shape there.
        slice: what this rank keeps; None keeps all of it.
    """

    name: str
    shape: tuple[int, ...]
    slice: Slice | None = None


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a matrix in the format they are stored in.

    Attributes:
        format: "F32", "F16", "BF16", "Q8_0", "Q4_0" or "Q4_1".
        num_inputs: values per row.
        data: uint8 [num_rows, row_bytes].
    """

    format: str
    num_inputs: int
    data: Any


@dataclass(slots=True)
class Parameter:
    """A weight of this rank: its sources are stacked along axis 0. The loader fills `value`.

    Attributes:
        name: ours, unique in the model.
        shape: after slicing and stacking.
        dtype: the format the checkpoint is expected to have; `plan` counts bytes with it.
        value: the backend's packed form; None until loaded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    sources: tuple[Source, ...]
    value: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes on this rank in `dtype`."""
        count = 1
        for size in self.shape:
            count *= size
        return self.dtype.num_bytes(count)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first 2 x len(inv_freq) values of each head.

    Halves are rotated against each other (value i with value i + len(inv_freq)).

    Attributes:
        inv_freq: radians per position for each pair, scaling already applied.
        attention_factor: multiplies cos and sin (yarn); 1 otherwise.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(slots=True)
class KVLayer:
    """The bound cache of one attention layer: full, window, chunk or shared makes no difference.

    Attributes:
        name: the layer's name in the KV cache config.
        spec: how its KV is stored; set when the cache is bound.
        group: index of its KV cache group; set when the cache is bound.
        storage: the backend's view of its blocks; None until bound.
    """

    name: str
    spec: KVCacheSpec | None = None
    group: int = 0
    storage: Any = None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where one KV cache group's tokens live in this step. Arrays are int32 unless said.

    Attributes:
        block_table: [num_reqs, max_num_blocks] block ids; 0 where there is no block.
        slot_mapping: int64 [num_tokens] slot that each token's KV is written to; -1 skips.
        query_start: [num_reqs + 1] first token of each request in the flat batch.
        seq_lens: [num_reqs] stored tokens of each request once this step is written.
        num_computed_tokens: [num_reqs] stored tokens before this step.
        block_size: tokens per block of the group.
    """

    block_table: Any
    slot_mapping: Any
    query_start: Any
    seq_lens: Any
    num_computed_tokens: Any
    block_size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The flat token batch a model runs on.

    Attributes:
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens].
        logits_rows: int64 [num_rows] tokens whose logits are wanted.
        attention: one entry per KV cache group.
    """

    token_ids: Value
    positions: Value
    logits_rows: Value
    attention: list[AttentionMetadata] = field(default_factory=list)


class Communicator(Protocol):
    """Collectives of one tensor-parallel rank. With one rank both are the identity."""

    rank: int
    world_size: int

    def all_reduce(self, x: Value) -> Value:
        """Sum over ranks, in rank order on every rank, so that all hold the same bits."""

    def all_gather(self, x: Value) -> Value:
        """Ranks' values side by side along the last axis, in rank order."""


class Ops(Protocol):
    """The operations a model is written over; one instance serves one step."""

    def embedding(self, token_ids: Value, table: Parameter, first_row: int = 0) -> Value:
        """[num_tokens, hidden_size]; ids outside this rank's rows [first_row, ...) give zeros."""

    def linear(self, x: Value, weight: Parameter, bias: Parameter | None = None) -> Value:
        """X @ weight.T + bias: [num_tokens, in] and [out, in] -> [num_tokens, out]."""

    def rms_norm(self, x: Value, weight: Parameter, eps: float) -> Value:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis, in float32."""

    def add(self, a: Value, b: Value) -> Value:
        """Element-wise sum of equal shapes."""

    def gated_activation(self, x: Value, activation: Activation) -> Value:
        """activation(gate) * up, where x is [num_tokens, 2 x size] = gate and up side by side."""

    def split_heads(
        self, x: Value, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[Value, Value, Value]:
        """[num_tokens, (num_heads + 2 x num_kv_heads) x head_size] -> q, k, v.

        Each is [num_tokens, its heads, head_size].
        """

    def rope(self, q: Value, k: Value, positions: Value, rope: Rope) -> tuple[Value, Value]:
        """Rotate q and k by their positions."""

    def attention(self, kv: KVLayer, q: Value, k: Value, v: Value, scale: float) -> Value:
        """Store k and v in this step's slots, then read the blocks.

        All of the step's k and v are written before any query reads: requests of one step may
        share blocks. The mask follows from positions and lengths alone.

        Returns:
            [num_tokens, num_heads x head_size].
        """

    def select_rows(self, x: Value, rows: Value) -> Value:
        """[len(rows), ...]: the named rows of x."""

    def all_reduce(self, x: Value) -> Value:
        """Sum over tensor-parallel ranks."""

    def all_gather(self, x: Value) -> Value:
        """Concatenate over tensor-parallel ranks along the last axis."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most a step may hold.

    Attributes:
        max_num_tokens: over all requests.
        max_num_reqs: requests, and rows of logits but for those that score prompts.
        max_model_len: stored tokens of one request.
        block_size: tokens per block that layers ask for; a group may choose a multiple.
    """

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    block_size: int


class RunnableModel(Protocol):
    """What a backend asks of a model."""

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size], by operations alone."""


class Executable(Protocol):
    """A model's forward pass in the form a backend runs it in.

    Attributes:
        activation_bytes: memory it needs beyond weights and KV; None if that must be measured.
    """

    @property
    def activation_bytes(self) -> int | None:
        """Known once the weights are loaded."""

    def bind(self) -> None:
        """Take the storage that the model's KV layers are bound to; before the first step."""

    def forward(self, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size] of a step; valid until the next."""


class Backend(Protocol):
    """Turns a model, its weights and KV memory into what it runs. One per worker.

    Attributes:
        name: as the user names it.
        packs_stored_rows: whether `pack_rows` takes matrices as they are stored.
    """

    name: str
    packs_stored_rows: bool

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> Executable:
        """The model's forward pass; called before weights are loaded."""

    def pack_rows(
        self, parameter: Parameter, packed: PackedFormat, parts: Iterable[StoredRows]
    ) -> Any:
        """A matrix from its sources' rows, one after another."""

    def pack(self, parameter: Parameter, array: Any) -> Any:
        """A host array of `parameter.shape` in the form this backend's operations read."""

    def allocate_kv(self, size_bytes: int) -> Any:
        """Raw zeroed memory for one KVCacheTensor."""

    def view_kv(self, raw: Any, spec: KVCacheSpec, num_blocks: int) -> Any:
        """A layer's storage over raw memory: what KVLayer.storage holds."""

    def copy_blocks(self, storage: Any, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) within one layer's storage."""

    def to_host(self, value: Value) -> Any:
        """A value as a float32 numpy array."""


class EagerBackend(Backend, Protocol):
    """A backend that computes each operation when it is called."""

    def ops(self, batch: Batch, communicator: Communicator) -> Ops:
        """The operations for one step over `batch`."""
