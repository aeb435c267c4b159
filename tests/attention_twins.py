"""Attention and the KV cache in numpy, by definition: what the native library is compared with.

The twins know the documented layout and the definition of softmax attention, and nothing of splits,
tiles or items: those must not be visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.dtypes import DType
from visibility import first_visible

Array = npt.NDArray[Any]

FORMATS = ("float32", "bfloat16", "int8")
LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Shape:
    """One layer's cache, heads and mask.

    A latent row is read as key, and its first head_size_v values as value.
    """

    format: str = "bfloat16"
    block_size: int = 16
    num_kv_heads: int = 2
    heads_per_kv: int = 3
    head_size: int = 64
    head_size_v: int = 64
    window: int = 0
    chunk: int = 0
    is_latent: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.heads_per_kv

    @property
    def row_width(self) -> int:
        """Values of a token's q, k and v."""
        stored_v = 0 if self.is_latent else self.head_size_v
        return self.num_heads * self.head_size + self.num_kv_heads * (self.head_size + stored_v)

    def first_visible(self, position: int) -> int:
        """The first key that the query at a position sees."""
        return first_visible(position, self.window, self.chunk)

    def layout(self, native: ModuleType) -> Any:
        sizes = (self.num_kv_heads, self.head_size, self.head_size_v, self.is_latent)
        return native.attention.KVLayout(self.format, self.block_size, *sizes)

    def layer(self, native: ModuleType, num_threads: int = 1) -> Any:
        return native.attention.AttentionLayer(
            self.layout(native), self.num_heads, num_threads, 4096, self.window, self.chunk
        )


# --- formats ------------------------------------------------------------------------------------


def to_bf16(x: Array) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(x), 0x7FC00000, rounded) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def read_sub_block(shape: Shape, data: Array) -> tuple[Array, Array]:
    """Keys [16, head_size] and values [16, head_size_v] of a sub-block's bytes, by the layout."""
    end = DType(shape.format).num_bytes(16 * shape.head_size)
    keys = read_keys(shape, data[:end])
    return keys, keys[:, : shape.head_size_v] if shape.is_latent else read_values(shape, data[end:])


def read_keys(shape: Shape, data: Array) -> Array:
    size = shape.head_size
    if shape.format == "float32":
        return data.view(np.float32).reshape(size, 16).T
    if shape.format == "bfloat16":
        numbers = from_bf16(data.view(np.uint16))
        return numbers.reshape(size // 2, 16, 2).transpose(1, 0, 2).reshape(16, size)
    codes = data[: 16 * size].astype(np.float32).reshape(size // 4, 16, 4) - 128
    keys = codes.transpose(1, 0, 2).reshape(16, size // 32, 32)
    scales = from_bf16(data[16 * size :].view(np.uint16)).reshape(-1, 16)
    return (keys * scales.T[:, :, None]).reshape(16, size)


def read_values(shape: Shape, data: Array) -> Array:
    size = shape.head_size_v
    if shape.format == "float32":
        return data.view(np.float32).reshape(16, size)
    if shape.format == "bfloat16":
        numbers = from_bf16(data.view(np.uint16))
        return numbers.reshape(8, size, 2).transpose(0, 2, 1).reshape(16, size)
    codes = data[: 16 * size].view(np.int8).astype(np.float32)
    values = codes.reshape(4, size, 4).transpose(0, 2, 1).reshape(16, size // 32, 32)
    scales = from_bf16(data[16 * size :].view(np.uint16)).reshape(-1, 16)
    return (values * scales.T[:, :, None]).reshape(16, size)


def read_cache(shape: Shape, raw: Array, table: Array, num_tokens: int) -> tuple[Array, Array]:
    """Keys and values [num_tokens, num_kv_heads, size] of a request."""
    per_block = shape.block_size // 16
    stored_v = 0 if shape.is_latent else shape.head_size_v
    sub_bytes = DType(shape.format).num_bytes(16 * (shape.head_size + stored_v))
    keys = np.zeros((num_tokens, shape.num_kv_heads, shape.head_size))
    values = np.zeros((num_tokens, shape.num_kv_heads, shape.head_size_v))
    for first in range(0, num_tokens, 16):
        block = raw[table[first // shape.block_size]][: shape.num_kv_heads * per_block * sub_bytes]
        subs = block.reshape(shape.num_kv_heads, per_block, sub_bytes)
        rest = min(16, num_tokens - first)
        for head in range(shape.num_kv_heads):
            sub = subs[head, first // 16 % per_block].copy()
            k, v = read_sub_block(shape, sub)
            keys[first : first + rest, head] = k[:rest]
            values[first : first + rest, head] = v[:rest]
    return keys, values


# --- the twin -----------------------------------------------------------------------------------


def as_stored_query(shape: Shape, q: Array) -> Array:
    """What scores are computed from: q of attention, rounded as the kernel does by definition."""
    if shape.format == "float32":
        return q.astype(np.float64)
    if shape.format == "bfloat16":
        return from_bf16(q).astype(np.float64)
    groups = q.reshape(*q.shape[:-1], -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * np.where(largest > 0, np.float32(127) / largest, 0))
    return (codes.astype(np.float64) * largest / 127).reshape(q.shape)


@dataclass(frozen=True)
class Scoring:
    """What a layer does to its scores; to base 2, as they are."""

    soft_cap: float = 0.0
    sinks: Array | None = None  # [num_heads]


def attend(
    shape: Shape,
    q: Array,
    keys: Array,
    values: Array,
    first_position: int,
    scoring: Scoring | None = None,
) -> Array:
    """Softmax attention to base 2 of q [num_queries, num_heads, size], in float64."""
    scoring = scoring or Scoring()
    sinks = np.full(shape.num_heads, -np.inf) if scoring.sinks is None else scoring.sinks
    out = np.zeros((*q.shape[:2], values.shape[-1]))
    for i in range(len(q)):
        position = first_position + i
        seen = slice(shape.first_visible(position), position + 1)
        for kv_head in range(shape.num_kv_heads):
            heads = slice(kv_head * shape.heads_per_kv, (kv_head + 1) * shape.heads_per_kv)
            scores = q[i, heads] @ keys[seen, kv_head].T  # [heads_per_kv, num_keys]
            if scoring.soft_cap:
                scores = scoring.soft_cap * np.tanh(scores / scoring.soft_cap)
            with_sink = np.column_stack((scores, sinks[heads]))
            weights = np.exp2(with_sink - with_sink.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[i, heads] = weights[:, :-1] @ values[seen, kv_head]
    return out.reshape(len(q), -1)


# --- a step -------------------------------------------------------------------------------------


@dataclass
class Stored:
    """Requests whose tokens are all in the cache, and the queries of all of their tokens."""

    shape: Shape
    layer: Any
    raw: Array  # [num_blocks, block_bytes]
    tables: list[Array]
    queries: list[Array]  # each [seq_len, num_heads, head_size], as written

    @property
    def seq_lens(self) -> list[int]:
        return [len(q) for q in self.queries]


def store(
    native: ModuleType, shape: Shape, rows: list[Array], *, fill: int = 0, num_threads: int = 1
) -> Stored:
    """Write requests of qkv rows [seq_len, width] to random blocks of a pool filled with `fill`."""
    rng = np.random.default_rng(7)
    layer = shape.layer(native, num_threads)
    layer.q_scale = shape.head_size**-0.5 * LOG2_E
    num_blocks = [-(-len(r) // shape.block_size) for r in rows]
    ids = rng.permutation(sum(num_blocks) + 2)[: sum(num_blocks)].astype(np.int32)
    tables = np.split(ids, np.cumsum(num_blocks)[:-1])
    stride = layer.block_bytes + 64  # blocks of a layer need not be adjacent
    raw = np.full((sum(num_blocks) + 2, stride), fill, np.uint8)
    positions = np.concatenate([np.arange(len(r)) for r in rows])
    slots = np.concatenate(
        [
            t[np.arange(len(r)) // shape.block_size].astype(np.int64) * shape.block_size
            + np.arange(len(r)) % shape.block_size
            for r, t in zip(rows, tables, strict=True)
        ]
    )
    q = empty_queries(shape, len(positions))
    layer.write(
        raw, np.concatenate(rows), native.attention.StoredAt(positions, slots), no_rotation(), q
    )
    return Stored(shape, layer, raw, tables, np.split(q, np.cumsum([len(r) for r in rows])[:-1]))


def no_rotation() -> Array:
    return np.zeros((1, 0), np.float32)


def empty_queries(shape: Shape, num_tokens: int) -> Array:
    dtype = np.uint16 if shape.format == "bfloat16" else np.float32
    return np.zeros((num_tokens, shape.num_heads, shape.head_size), dtype)


def random_rows(shape: Shape, seq_lens: list[int], seed: int = 1) -> list[Array]:
    """qkv rows with scores that matter: some keys dominate, most have a say."""
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1.2, (n, shape.row_width)).astype(np.float32) for n in seq_lens]


def uniform_rows(shape: Shape, num_tokens: int, key: float = 0.0) -> Array:
    """All scores equal: q = 1 and constant keys; the value of token j is j everywhere."""
    num_q, num_k = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    rows = np.full((num_tokens, shape.row_width), key)
    rows[:, :num_q] = 1
    rows[:, num_q + num_k :] = np.arange(num_tokens)[:, None]
    return rows.astype(np.float32)


def run(
    native: ModuleType,
    stored: Stored,
    num_queries: dict[int, tuple[int, int]],
    layer: Any = None,
    num_layers: int = 1,
) -> dict[int, Array]:
    """Attend with queries [first, end) of each named request, in this order, as one step.

    Columns of the block table that no query sees name a block full of NaNs. Equal layers run one
    after another; the last one's result is left.
    """
    shape = stored.shape
    q = np.concatenate([stored.queries[r][a:b] for r, (a, b) in num_queries.items()])
    counts = [b - a for a, b in num_queries.values()]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    seq_lens = np.array([b for _, b in num_queries.values()], np.int32)
    width = max(len(stored.tables[r]) for r in num_queries) + 1
    raw = np.concatenate((stored.raw, np.full_like(stored.raw[:1], 0xFF)))
    table = np.zeros((len(num_queries), width), np.int32)
    for i, (r, (first, _)) in enumerate(num_queries.items()):
        table[i, : len(stored.tables[r])] = stored.tables[r]
        table[i, : shape.first_visible(first) // shape.block_size] = len(raw) - 1
    out = np.full((len(q), shape.num_heads * shape.head_size_v), np.nan, np.float32)
    step = native.attention.AttentionStep(starts, seq_lens, table)
    (layer or stored.layer).attend(np.stack([raw] * num_layers), q, step, out)
    return {r: out[starts[i] : starts[i + 1]] for i, r in enumerate(num_queries)}


def expected(
    stored: Stored, request: int, first: int, end: int, scoring: Scoring | None = None
) -> Array:
    keys, values = read_cache(stored.shape, stored.raw, stored.tables[request], end)
    q = as_stored_query(stored.shape, stored.queries[request][first:end])
    return attend(stored.shape, q, keys, values, first, scoring)
