"""What a query sees, from the definitions, token by token: a second implementation for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

from kvloom.dtypes import DType
from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True)
class Kind:
    """An attention kind and the block size of its group."""

    name: str  # "full", "latent", "window" or "chunk"
    block_size: int
    size: int = 0  # of the window or the chunk

    def __str__(self) -> str:
        return f"{self.name}{self.size or ''}x{self.block_size}"

    @property
    def spec(self) -> KVCacheSpec:
        common: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": 4,
            "dtype": DType.FLOAT32,
        }
        if self.name == "window":
            return SlidingWindowSpec(**common, sliding_window=self.size)
        if self.name == "chunk":
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.size)
        return {"full": FullAttentionSpec, "latent": MLAAttentionSpec}[self.name](**common)

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at position `query` sees the key at position `key`."""
        if self.name == "window":
            return query - self.size < key <= query
        if self.name == "chunk":
            return key <= query and key // self.size == query // self.size
        return key <= query

    def columns_seen(self, first: int, num_stored: int) -> frozenset[int]:
        """Columns with a token, out of `num_stored`, that a query from `first` on sees."""
        return _columns_seen(self, first, num_stored)


@cache
def _columns_seen(kind: Kind, first: int, num_stored: int) -> frozenset[int]:
    queries = range(first, num_stored + 1)  # who is blind to a token stays so
    return frozenset(
        key // kind.block_size
        for key in range(num_stored)
        if any(kind.sees(query, key) for query in queries)
    )


def first_visible(position: int, window: int | None = None, chunk: int | None = None) -> int:
    """The first key that the query at `position` sees: in a window, an aligned chunk, or at all."""
    if window:
        return max(position - window + 1, 0)
    return position // chunk * chunk if chunk else 0


def first_visible_of(spec: KVCacheSpec, position: int) -> int:
    """The same of a layer with that spec."""
    window = getattr(spec, "sliding_window", None)
    return first_visible(position, window, getattr(spec, "attention_chunk_size", None))


def joint_hit(kinds: Sequence[Kind], num_tokens: int, is_cached: Callable[[int, int], bool]) -> int:
    """Tokens of the longest joint prefix hit of a request, tried out from the longest on.

    Whole blocks of every group, at least one token left to compute, and cached (by group and
    column) whatever the next query sees.
    """
    step = lcm(*(kind.block_size for kind in kinds))
    lengths = range((num_tokens - 1) // step * step, 0, -step)
    for length in lengths:
        if all(
            is_cached(group, key // kind.block_size)
            for group, kind in enumerate(kinds)
            for key in range(length)
            if kind.sees(length, key)
        ):
            return length
    return 0


def cache_of(kinds: Sequence[Kind], num_blocks: int) -> KVCacheConfig:
    """One group per kind."""
    groups = [KVCacheGroupSpec([f"layers.{i}"], kind.spec) for i, kind in enumerate(kinds)]
    return KVCacheConfig(num_blocks, [], groups)
