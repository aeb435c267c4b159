"""The vocabulary in numpy and float32: the specification that every kernel is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import AttentionSpec, FullAttentionSpec, KVCacheSpec
from kvloom.ops.base import (
    Activation,
    AttentionMetadata,
    Batch,
    Communicator,
    KVLayer,
    Ops,
    PackedFormat,
    Parameter,
    Rope,
    RunnableModel,
    StepSizes,
    StoredRows,
)

Array = npt.NDArray[np.float32]
_Stored = npt.NDArray[Any]

# Queries of one request that attend at once; bounds the memory of the scores.
_QUERY_TILE = 128

# bfloat16 is stored as the upper half of a float32's bits.
_STORED_TYPES: dict[DType, type[np.generic]] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,
}


@dataclass(frozen=True, slots=True)
class ReferenceStorage:
    """The blocks of one layer: views whose first stride is the whole block's.

    Attributes:
        dtype: the format keys and values are stored in.
        keys: [num_blocks, block_size, num_kv_heads, head_size].
        values: [num_blocks, block_size, num_kv_heads, head_size_v].
    """

    dtype: DType
    keys: _Stored
    values: _Stored


class EagerExecutable:
    """Calls a model's forward pass over the operations of each step."""

    activation_bytes = None

    def __init__(self, model: RunnableModel, make_ops: Callable[[Batch], Any]) -> None:
        self._model = model
        self._make_ops = make_ops

    def bind(self) -> None:
        """The operations find each layer's storage by themselves."""

    def forward(self, batch: Batch) -> Any:
        """The model's logits."""
        return self._model.forward(self._make_ops(batch), batch)


class ReferenceBackend:
    """Runs each operation at once, in float32, whatever format the checkpoint has."""

    name = "reference"
    packs_stored_rows = False

    def compile(
        self, model: RunnableModel, communicator: Communicator, sizes: StepSizes
    ) -> EagerExecutable:
        """The model itself, called anew at each step; any sizes will do."""
        del sizes
        return EagerExecutable(model, lambda batch: self.ops(batch, communicator))

    def pack_rows(
        self, parameter: Parameter, packed: PackedFormat, parts: Iterable[StoredRows]
    ) -> Any:
        """Never called: `packs_stored_rows` is false."""
        raise NotImplementedError

    def pack(self, parameter: Parameter, array: npt.ArrayLike) -> Array:
        """The array itself, as float32.

        Raises:
            WeightsError: the array's shape is not the parameter's.
        """
        packed = np.ascontiguousarray(array, dtype=np.float32)
        if packed.shape != parameter.shape:
            raise WeightsError(
                f"{parameter.name} should have shape {parameter.shape}, not {packed.shape}; "
                "the checkpoint does not belong to this config"
            )
        return packed

    def allocate_kv(self, size_bytes: int) -> npt.NDArray[np.int8]:
        """`size_bytes` zero bytes; the system hands out pages as they are written."""
        return np.zeros(size_bytes, np.int8)

    def view_kv(
        self, raw: npt.NDArray[np.int8], spec: KVCacheSpec, num_blocks: int
    ) -> ReferenceStorage:
        """A layer's blocks in `raw`: block i begins at byte i x (size of raw / num_blocks).

        Within a block lie the keys, then the values.

        Raises:
            ConfigError: an attention kind or format that this backend does not compute, or memory
                that does not hold `num_blocks` blocks of the spec.
        """
        spec = _check_spec(spec)
        if raw.nbytes % num_blocks or raw.nbytes // num_blocks < spec.page_size_bytes:
            raise ConfigError(
                f"{raw.nbytes} bytes do not hold {num_blocks} blocks of {spec.page_size_bytes}; "
                "allocate what the KV cache config says"
            )
        rows = raw.reshape(num_blocks, -1)[:, : spec.page_size_bytes]
        num_key_values = spec.block_size * spec.num_kv_heads * spec.head_size
        stored = rows.view(_STORED_TYPES[spec.dtype])
        shape = (num_blocks, spec.block_size, spec.num_kv_heads)
        return ReferenceStorage(
            dtype=spec.dtype,
            keys=stored[:, :num_key_values].reshape(*shape, spec.head_size),
            values=stored[:, num_key_values:].reshape(*shape, spec.value_head_size),
        )

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


def _check_spec(spec: KVCacheSpec) -> AttentionSpec:
    """The spec, if this backend computes it: full attention in a format of `_STORED_TYPES`."""
    if not isinstance(spec, FullAttentionSpec) or (
        spec.sliding_window is not None or spec.attention_chunk_size is not None
    ):
        raise ConfigError(
            f"the reference backend computes full attention, not {spec}; "
            "choose a model without attention windows or chunks"
        )
    if spec.dtype not in _STORED_TYPES:
        known = ", ".join(dtype.value for dtype in _STORED_TYPES)
        raise ConfigError(
            f"the reference backend does not store {spec.dtype.value}; set kv_cache_dtype to one "
            f"of {known}"
        )
    return spec


# NaN and infinity pass through: whoever samples the request they end in reports them.
_passes_non_finite = np.errstate(over="ignore", invalid="ignore")


class ReferenceOps:
    """One step's operations, computed as they are called."""

    def __init__(self, batch: Batch, communicator: Communicator) -> None:
        self._batch = batch
        self._communicator = communicator
        # Layers rotate by the same angles: rope -> cos, sin [num_tokens, 1, num_pairs].
        self._rotations: dict[Rope, tuple[Array, Array]] = {}

    def embedding(
        self, token_ids: npt.NDArray[np.int64], table: Parameter, first_row: int = 0
    ) -> Array:
        """[num_tokens, hidden_size]; ids outside this rank's rows [first_row, ...) give zeros."""
        rows = token_ids - first_row
        is_here = (rows >= 0) & (rows < table.shape[0])
        x: Array = table.value[np.where(is_here, rows, 0)]
        x[~is_here] = 0.0
        return x

    @_passes_non_finite
    def linear(self, x: Array, weight: Parameter, bias: Parameter | None = None) -> Array:
        """X @ weight.T + bias: [num_tokens, in] and [out, in] -> [num_tokens, out]."""
        y: Array = x @ weight.value.T
        return y if bias is None else y + bias.value

    @_passes_non_finite
    def rms_norm(self, x: Array, weight: Parameter, eps: float) -> Array:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        scaled: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight.value
        return scaled

    @_passes_non_finite
    def add(self, a: Array, b: Array) -> Array:
        """Element-wise sum."""
        return a + b

    @_passes_non_finite
    def gated_activation(self, x: Array, activation: Activation) -> Array:
        """activation(gate) * up, where x is [num_tokens, 2 x size] = gate and up side by side."""
        size = x.shape[-1] // 2
        return _activate(x[:, :size], activation) * x[:, size:]

    def split_heads(
        self, x: Array, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[Array, Array, Array]:
        """[num_tokens, (num_heads + 2 x num_kv_heads) x head_size] -> q, k, v."""
        heads = x.reshape(len(x), num_heads + 2 * num_kv_heads, head_size)
        first_v = num_heads + num_kv_heads
        return heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:]

    @_passes_non_finite
    def rope(
        self, q: Array, k: Array, positions: npt.NDArray[np.int64], rope: Rope
    ) -> tuple[Array, Array]:
        """Rotate q and k by their positions."""
        if rope not in self._rotations:
            angles = np.outer(positions, np.asarray(rope.inv_freq))[:, None, :]
            self._rotations[rope] = (
                (np.cos(angles) * rope.attention_factor).astype(np.float32),
                (np.sin(angles) * rope.attention_factor).astype(np.float32),
            )
        cos, sin = self._rotations[rope]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    @_passes_non_finite
    def attention(self, kv: KVLayer, q: Array, k: Array, v: Array, scale: float) -> Array:
        """Store k and v in this step's slots, then read the blocks, one request after another."""
        metadata = self._batch.attention[kv.group]
        storage: ReferenceStorage = kv.storage
        _store(storage.keys, metadata, k, storage.dtype)
        _store(storage.values, metadata, v, storage.dtype)
        num_tokens, num_heads, _ = q.shape
        head_size_v = storage.values.shape[-1]
        out = np.zeros((num_tokens, num_heads, head_size_v), np.float32)
        for i, seq_len in enumerate(metadata.seq_lens):
            first, end = metadata.query_start[i], metadata.query_start[i + 1]
            if first == end:
                continue
            keys = _load(storage.keys, metadata.block_table[i], seq_len, storage.dtype)
            values = _load(storage.values, metadata.block_table[i], seq_len, storage.dtype)
            num_computed = metadata.num_computed_tokens[i]
            for tile in range(first, end, _QUERY_TILE):
                tile_end = min(tile + _QUERY_TILE, end)
                num_visible = num_computed + tile_end - first  # keys up to the last query
                out[tile:tile_end] = _attend(
                    q[tile:tile_end] * np.float32(scale), keys[:num_visible], values[:num_visible]
                )
        return out.reshape(num_tokens, num_heads * head_size_v)

    def select_rows(self, x: Array, rows: npt.NDArray[np.int64]) -> Array:
        """[len(rows), ...]: the named rows of x."""
        selected: Array = x[rows]
        return selected

    def all_reduce(self, x: Array) -> Array:
        """Sum over tensor-parallel ranks."""
        total: Array = self._communicator.all_reduce(x)
        return total

    def all_gather(self, x: Array) -> Array:
        """Concatenate over tensor-parallel ranks along the last axis."""
        gathered: Array = self._communicator.all_gather(x)
        return gathered


def _activate(x: Array, activation: Activation) -> Array:
    half = np.float32(0.5)
    share: Array  # of x that passes
    if activation == "silu":
        # The sigmoid, by tanh because exp(-x) overflows for very negative x.
        share = half * (1 + np.tanh(half * x))
    elif activation == "gelu":
        erf = np.vectorize(math.erf, otypes=[np.float32])
        share = half * (1 + erf(x * np.float32(math.sqrt(0.5))))
    else:
        inner = np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        share = half * (1 + np.tanh(inner))
    return x * share


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (i, i + num_pairs) of x [num_tokens, num_heads, head_size]."""
    num_pairs = cos.shape[-1]
    a, b = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, x[..., 2 * num_pairs :]), axis=-1)


def _store(blocks: _Stored, metadata: AttentionMetadata, rows: Array, dtype: DType) -> None:
    """Write rows [num_tokens, num_kv_heads, size] to their slots; slot -1 writes nothing."""
    slots = metadata.slot_mapping
    if slots.min(initial=0) < 0:
        rows, slots = rows[slots >= 0], slots[slots >= 0]
    blocks[slots // metadata.block_size, slots % metadata.block_size] = _encode(rows, dtype)


def _load(blocks: _Stored, table: npt.NDArray[np.int32], num_tokens: int, dtype: DType) -> Array:
    """The first num_tokens rows of a request: [num_tokens, num_kv_heads, size]."""
    block_size = blocks.shape[1]
    gathered = blocks[table[: -(-num_tokens // block_size)]]
    rows = gathered.reshape(-1, *blocks.shape[2:])[:num_tokens]
    return _decode(rows, dtype)


def _attend(q: Array, keys: Array, values: Array) -> Array:
    """Softmax attention of scaled queries that are the last of the keys' tokens.

    Args:
        q: [num_queries, num_heads, head_size]; query j sees all but the last
            num_queries - 1 - j keys. Head h reads KV head h // (num_heads / num_kv_heads).
        keys: [num_keys, num_kv_heads, head_size].
        values: [num_keys, num_kv_heads, head_size_v].
    """
    num_queries, num_heads, head_size = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    heads_per_kv = num_heads // num_kv_heads
    grouped = q.reshape(num_queries, num_kv_heads, heads_per_kv, head_size).transpose(1, 2, 0, 3)
    # [num_kv_heads, heads_per_kv x num_queries, num_keys]
    scores = grouped.reshape(num_kv_heads, -1, head_size) @ keys.transpose(1, 2, 0)
    if num_queries > 1:
        last_visible = np.arange(num_keys - num_queries, num_keys)
        is_hidden = np.arange(num_keys) > last_visible[:, None]
        by_query = scores.reshape(num_kv_heads, heads_per_kv, num_queries, num_keys)
        np.copyto(by_query, -np.inf, where=is_hidden)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    out: Array = (weights @ values.transpose(1, 0, 2)).reshape(
        num_kv_heads, heads_per_kv, num_queries, -1
    )
    return out.transpose(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


def _encode(x: Array, dtype: DType) -> _Stored:
    """float32 values in the stored format, rounded to nearest, ties to even."""
    if dtype is DType.BFLOAT16:
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # Rounding could carry a NaN into infinity, so NaNs get a pattern of their own.
        rounded = np.where(np.isnan(x), np.uint32(0x7FC00000), rounded)
        return (rounded >> np.uint32(16)).astype(np.uint16)
    return x.astype(_STORED_TYPES[dtype])


def _decode(stored: _Stored, dtype: DType) -> Array:
    """Stored values as float32, exactly."""
    if dtype is DType.BFLOAT16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)
