"""Attention of the reference: keys and values in blocks, and the softmax over what is visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.dtypes import DType
from kvloom.kv.spec import KVCacheSpec
from kvloom.ops.base import Attention, AttentionMetadata, KVLayer

Array = npt.NDArray[np.float32]
_Stored = npt.NDArray[Any]

# Queries of one request that attend at once; bounds the memory of the scores.
_QUERY_TILE = 128

# bfloat16 is stored as the upper half of a float32's bits.
STORED_TYPES: dict[DType, type[np.generic]] = {
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
        values: [num_blocks, block_size, num_kv_heads, head_size_v]; columns of the keys in
            multi-head latent attention.
    """

    dtype: DType
    keys: _Stored
    values: _Stored


def store(blocks: _Stored, metadata: AttentionMetadata, rows: Array, dtype: DType) -> None:
    """Write rows [num_tokens, num_kv_heads, size] to their slots; slot -1 writes nothing."""
    slots = metadata.slot_mapping
    if slots.min(initial=0) < 0:
        rows, slots = rows[slots >= 0], slots[slots >= 0]
    blocks[slots // metadata.block_size, slots % metadata.block_size] = _encode(rows, dtype)


def attend(kv: KVLayer, metadata: AttentionMetadata, q: Array, attention: Attention) -> Array:
    """Attention of q [num_tokens, num_heads, head_size], one request after another.

    Returns:
        [num_tokens, num_heads, head_size_v].
    """
    storage: ReferenceStorage = kv.storage
    assert kv.spec is not None  # set when the storage is
    q = q * np.float32(attention.scale)
    out = np.zeros((*q.shape[:2], storage.values.shape[-1]), np.float32)
    for i, num_computed in enumerate(metadata.num_computed_tokens):
        first, end = metadata.query_start[i], metadata.query_start[i + 1]
        if first == end:
            continue
        # Blocks that no query sees may be stale or freed, so they are not even read.
        first_key = _first_visible(kv.spec, num_computed)
        visible = (first_key, num_computed + end - first)
        table = metadata.block_table[i]
        first_column = 0 if metadata.first_columns is None else metadata.first_columns[i]
        columns = slice(
            first_key // metadata.block_size - first_column,
            -(-visible[1] // metadata.block_size) - first_column,
        )
        keys, values = (
            _load(blocks[table[columns]], visible, storage.dtype)
            for blocks in (storage.keys, storage.values)
        )
        for tile in range(first, end, _QUERY_TILE):
            tile_end = min(tile + _QUERY_TILE, end)
            positions = num_computed + np.arange(tile, tile_end) - first
            tile_first = _first_visible(kv.spec, positions)
            seen = slice(tile_first[0] - first_key, positions[-1] + 1 - first_key)
            key_positions = np.arange(tile_first[0], positions[-1] + 1)
            is_hidden = (key_positions > positions[:, None]) | (key_positions < tile_first[:, None])
            out[tile:tile_end] = _attend_tile(
                q[tile:tile_end], keys[seen], values[seen], is_hidden, attention
            )
    return out


def _first_visible(spec: KVCacheSpec, position: Any) -> Any:
    """The first key that queries at these positions see; positions ascend, and so does this."""
    window = getattr(spec, "sliding_window", None)
    chunk = getattr(spec, "attention_chunk_size", None)
    if window is not None:
        return np.maximum(position - window + 1, 0)
    return position // chunk * chunk if chunk is not None else position * 0


def _load(blocks: _Stored, tokens: tuple[int, int], dtype: DType) -> Array:
    """The rows of tokens [first, end), which lie in `blocks`: [end - first, num_kv_heads, size]."""
    first, end = tokens
    skipped = first - first % blocks.shape[1]
    rows = blocks.reshape(-1, *blocks.shape[2:])
    return _decode(rows[first - skipped : end - skipped], dtype)


def _attend_tile(
    q: Array,
    keys: Array,
    values: Array,
    is_hidden: npt.NDArray[np.bool_],
    attention: Attention,
) -> Array:
    """Softmax attention of scaled queries.

    Args:
        q: [num_queries, num_heads, head_size]; head h reads KV head
            h // (num_heads / num_kv_heads).
        keys: [num_keys, num_kv_heads, head_size].
        values: [num_keys, num_kv_heads, head_size_v].
        is_hidden: [num_queries, num_keys].
        attention: how the scores are bounded, and the sinks.
    """
    num_queries, num_heads, head_size = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    by_kv_head = q.transpose(1, 0, 2).reshape(num_kv_heads, -1, head_size)
    scores = (by_kv_head @ keys.transpose(1, 2, 0)).reshape(num_heads, num_queries, num_keys)
    if attention.soft_cap is not None:
        cap = np.float32(attention.soft_cap)
        scores /= cap
        np.tanh(scores, out=scores)
        scores *= cap
    np.copyto(scores, -np.inf, where=is_hidden)
    weights = _softmax(scores, None if attention.sinks is None else attention.sinks.value)
    by_kv_head = weights.reshape(num_kv_heads, -1, num_keys)
    out = by_kv_head @ values.transpose(1, 0, 2)
    return out.reshape(num_heads, num_queries, -1).transpose(1, 0, 2)


def _softmax(scores: Array, sinks: Array | None) -> Array:
    """In place, over the last axis of [num_heads, num_queries, num_keys].

    A head's sink adds to its sum.
    """
    largest = scores.max(axis=-1, keepdims=True)
    scores -= largest
    weights = np.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:  # one that overflows leaves the keys no weight, as it should
        total += np.exp(sinks[:, None, None] - largest)
    weights /= total
    return weights


def _encode(x: Array, dtype: DType) -> _Stored:
    """float32 values in the stored format, rounded to nearest, ties to even."""
    if dtype is DType.BFLOAT16:
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # Rounding could carry a NaN into infinity, so NaNs get a pattern of their own.
        rounded = np.where(np.isnan(x), np.uint32(0x7FC00000), rounded)
        return (rounded >> np.uint32(16)).astype(np.uint16)
    return x.astype(STORED_TYPES[dtype])


def _decode(stored: _Stored, dtype: DType) -> Array:
    """Stored values as float32, exactly."""
    if dtype is DType.BFLOAT16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)
