"""One attention layer over a pool of blocks, driven step by step by tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eager_backends import make_backend, make_ops
from kvloom.dtypes import DType
from kvloom.kv.spec import AttentionSpec, FullAttentionSpec
from kvloom.ops.base import Attention, AttentionMetadata, Batch, KVLayer, Ops, Parameter

BLOCK_SIZES = [1, 2, 4, 8, 16]
SCHEDULES = {"prefill": [10], "decode": [1] * 10, "chunks": [3, 3, 4]}
HEAD_SIZE = 2
NAN_BITS = -1  # all bits set is a NaN in float32, float16 and bfloat16
MAX_TOKENS = 320

FirstVisible = Callable[[int], int]


def sees_all(position: int) -> int:
    return 0


def sees_window(window: int) -> FirstVisible:
    """The first key a query sees: itself and the `window` - 1 before."""
    return lambda position: max(position - window + 1, 0)


def sees_chunk(chunk: int) -> FirstVisible:
    """The first key a query sees: its own aligned chunk's."""
    return lambda position: position - position % chunk


@dataclass
class Piece:
    """The next tokens of one request in a step, with their q, k, v [num_tokens, heads, size]."""

    request: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


class Cache:
    """One attention layer over a pool filled with NaN; request r owns a shuffled run of blocks.

    Attributes:
        cut: if set, a step's tables begin with the block of the first key that a query sees.
    """

    cut: FirstVisible | None = None

    def __init__(
        self,
        block_size: int,
        spec_type: type[AttentionSpec] = FullAttentionSpec,
        *,
        num_requests: int = 1,
        **spec: Any,
    ) -> None:
        blocks_each = -(-MAX_TOKENS // block_size)
        self.num_blocks = 1 + num_requests * blocks_each
        ids = 1 + np.random.default_rng(7).permutation(self.num_blocks - 1)
        self.tables = ids.reshape(num_requests, blocks_each).astype(np.int32)
        self.num_computed = [0] * num_requests
        self.block_size = block_size
        self.backend = make_backend()
        defaults = {"num_kv_heads": 1, "head_size": HEAD_SIZE, "dtype": DType.FLOAT32}
        self.spec = spec_type(block_size=block_size, **(defaults | spec))
        self.raw = self.backend.allocate_kv(self.spec.page_size_bytes * self.num_blocks)
        self.raw[:] = NAN_BITS
        storage = self.backend.view_kv(self.raw, self.spec, self.num_blocks)
        self.layer = KVLayer("layers.0.self_attn", self.spec, 0, storage)

    def slots(self, request: int, num_tokens: int) -> np.ndarray:
        positions = self.num_computed[request] + np.arange(num_tokens)
        blocks = self.tables[request][positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def drop_left(self, first_visible: FirstVisible, fate: str) -> None:
        """What becomes of the blocks that no query from now on sees.

        "nulled" columns name block 0, "stale" blocks hold NaN, "unreadable" ones are no blocks.
        """
        for request, computed in enumerate(self.num_computed):
            left = self.tables[request, : first_visible(computed) // self.block_size]
            if fate == "stale":
                blocks = self.raw.reshape(self.num_blocks, -1)
                blocks[left[left < self.num_blocks]] = NAN_BITS
            else:
                left[:] = {"nulled": 0, "unreadable": self.num_blocks}[fate]

    def step(
        self, pieces: Sequence[Piece], attention: Attention | None = None, num_padding: int = 0
    ) -> np.ndarray:
        """[num_tokens + num_padding, num_heads, head_size_v] of all pieces, one after another."""
        scoring = attention or Attention(1.0)
        ops, q, k, v = self.begin(pieces, num_padding)
        return ops.attention(self.layer, q, k, v, scoring).reshape(
            len(q), q.shape[1], self.spec.value_head_size
        )

    def begin(
        self, pieces: Sequence[Piece], num_padding: int = 0
    ) -> tuple[Ops, np.ndarray, np.ndarray, np.ndarray]:
        """The operations of a step over the pieces, and their q, k, v, padding included."""
        counts = [len(piece.q) for piece in pieces]
        slots = [self.slots(p.request, n) for p, n in zip(pieces, counts, strict=True)]
        before = [self.num_computed[p.request] for p in pieces]
        padding = np.full(num_padding, -1, np.int64)
        tables = self.tables[[p.request for p in pieces]]
        firsts = None
        if self.cut is not None:
            firsts = np.array([self.cut(n) // self.block_size for n in before], np.int32)
            width = len(tables[0]) - firsts.max()
            tables = np.stack([t[n : n + width] for t, n in zip(tables, firsts, strict=True)])
        metadata = AttentionMetadata(
            block_table=tables,
            slot_mapping=np.concatenate([*slots, padding]),
            query_start=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=np.add(before, counts).astype(np.int32),
            num_computed_tokens=np.array(before, np.int32),
            block_size=self.block_size,
            first_columns=firsts,
        )
        for piece, count in zip(pieces, counts, strict=True):
            self.num_computed[piece.request] += count
        q, k, v = (
            np.concatenate([getattr(p, name) for p in pieces], dtype=np.float32) for name in "qkv"
        )
        pad = ((0, num_padding), (0, 0), (0, 0))
        q, k, v = (np.pad(x, pad, constant_values=np.nan) for x in (q, k, v))
        ids = np.zeros(len(q), np.int64)
        ops = make_ops(self.backend, Batch(ids, ids, ids, [metadata]))
        return ops, q, k, v


def make_sinks(values: Sequence[float]) -> Parameter:
    return Parameter("sinks", (len(values),), DType.FLOAT32, (), value=np.array(values, np.float32))


def constant(num_tokens: int, value: float, num_heads: int = 1) -> np.ndarray:
    return np.full((num_tokens, num_heads, HEAD_SIZE), value, np.float32)


def counting(first: int, num_tokens: int) -> np.ndarray:
    """v_j = j in every value, for the positions from `first` on."""
    return constant(num_tokens, 0.0) + np.arange(first, first + num_tokens)[:, None, None]


def run_counting(
    cache: Cache,
    chunks: Sequence[int],
    qk: tuple[float, float] = (0.0, 0.0),
    attention: Attention | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Any:
    """Output [num_tokens, head_size] of one request with constant q, k and counting v."""
    outputs = []
    for count in chunks:
        before_step()
        first = cache.num_computed[0]
        piece = Piece(0, constant(count, qk[0]), constant(count, qk[1]), counting(first, count))
        outputs.append(cache.step([piece], attention)[:, 0])
    return np.concatenate(outputs)


def mean_of_visible(num_tokens: int, first_visible: FirstVisible = sees_all) -> np.ndarray:
    """[num_tokens, HEAD_SIZE]: position i sees first_visible(i)..i; the mean of their numbers."""
    means = [(first_visible(i) + i) / 2.0 for i in range(num_tokens)]
    return np.repeat(np.array(means)[:, None], HEAD_SIZE, axis=1)


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    attention: Attention,
    first_visible: FirstVisible = sees_all,
) -> np.ndarray:
    """The textbook formula, query by query and head by head, in float64."""
    out = np.zeros((len(q), q.shape[1], v.shape[2]))
    for i in range(len(q)):
        seen = range(first_visible(i), i + 1)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = [math.fsum(q[i, head] * k[j, kv_head]) * attention.scale for j in seen]
            if (cap := attention.soft_cap) is not None:
                scores = [cap * math.tanh(score / cap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights)
            if attention.sinks is not None:
                total += math.exp(attention.sinks.value[head])
            out[i, head] = sum(
                w / total * v[j, kv_head] for w, j in zip(weights, seen, strict=True)
            )
    return out


def random_qkv(num_tokens: int, heads: tuple[int, int], sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(num_tokens)
    shapes = [(heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1])]
    return [rng.standard_normal((num_tokens, *shape)).astype(np.float32) for shape in shapes]
