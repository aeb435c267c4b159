"""What a layer needs of the cache, and what a worker is told to allocate.

A spec answers every byte and block question about its layer; nothing else computes bytes.
"Tokens" here are stored tokens: a finished request of n tokens has stored n - 1 of them, since
the last one is never read back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvloom.dtypes import DType


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def _max_touched(num_tokens: int, block_size: int, start_multiple: int) -> int:
    """The most blocks that adjacent tokens lie in, if they start at a multiple of a number.

    Such starts fall on the multiples of the gcd inside a block; the last one reaches farthest.
    """
    last_start = block_size - math.gcd(start_multiple, block_size)
    return cdiv(last_start + num_tokens, block_size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer as the model declares it, already sharded for this rank.

    Attributes:
        name: unique in the model, by convention `layers.{i}.self_attn`.
        num_kv_heads: KV heads stored on this rank.
        head_size: values per key head.
        dtype: format of the stored values.
        sliding_window_size: keys a query sees, its own included; None without a window.
        chunk_size: size of the aligned chunk a query sees; None without chunks.
        shares_kv_with: name of the earlier layer whose KV this layer reads; None if it has its own.
        num_global_kv_heads: KV heads of the whole model, before sharding; None means num_kv_heads.
        head_size_v: values per value head; None means head_size.
        is_latent: multi-head latent attention: the value is the first `head_size_v` values of the
            key, of one KV head that all ranks store.
    """

    name: str
    num_kv_heads: int
    head_size: int
    dtype: DType
    sliding_window_size: int | None = None
    chunk_size: int | None = None
    shares_kv_with: str | None = None
    num_global_kv_heads: int | None = None
    head_size_v: int | None = None
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class KVSpec:
    """All attention layers of a model, in order of execution."""

    layers: list[LayerSpec]


@dataclass(frozen=True, slots=True)
class KVLimits:
    """What bounds the tokens one request may hold at once.

    Attributes:
        max_model_len: prompt plus output tokens, the last one included.
        max_num_batched_tokens: tokens one step may add to a request.
    """

    max_model_len: int
    max_num_batched_tokens: int

    @property
    def max_stored_tokens(self) -> int:
        """Slots a request of `max_model_len` fills: its last token is never read back."""
        return max(self.max_model_len - 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Base of all specs: a layer whose KV is stored in blocks of `block_size` tokens."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer on this rank, keys and values together."""
        raise NotImplementedError  # abstract: every spec below answers it

    @property
    def shared_target(self) -> str | None:
        """The layer whose KV this one reads; None for a layer that stores its own."""
        return None

    @property
    def page_formula(self) -> str:
        """How `page_size_bytes` comes about, for people."""
        raise NotImplementedError  # abstract: every spec below answers it

    def num_steady_blocks(self, num_tokens: int) -> int:
        """The most blocks a request holds on its way to `num_tokens` stored ones, one per step."""
        raise NotImplementedError  # abstract: every spec below answers it

    def max_num_blocks(self, num_tokens: int, limits: KVLimits) -> int:
        """The same with `limits.max_num_batched_tokens` per step: what it holds at any time."""
        raise NotImplementedError  # abstract: every spec below answers it

    def num_transient_blocks(self, limits: KVLimits) -> int:
        """Blocks above the steady ones while the largest chunk is in flight.

        They are reserved once for the pool, and shared by whichever requests compute chunks.
        """
        stored = limits.max_stored_tokens
        return self.max_num_blocks(stored, limits) - self.num_steady_blocks(stored)

    def max_memory_usage_bytes(self, limits: KVLimits) -> int:
        """The most bytes one request of `limits.max_model_len` tokens holds in this layer."""
        return self.max_num_blocks(limits.max_stored_tokens, limits) * self.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of `num_kv_heads` heads per token.

    Attributes:
        num_kv_heads: heads on this rank.
        head_size: values per key head; value heads have `head_size_v` (None: the same).
        num_global_kv_heads: heads of the whole model (None: num_kv_heads).
    """

    num_kv_heads: int
    head_size: int
    dtype: DType
    head_size_v: int | None = None
    num_global_kv_heads: int | None = None

    @property
    def value_head_size(self) -> int:
        """Values per value head."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def total_num_kv_heads(self) -> int:
        """KV heads of the whole model, over all ranks, copies not counted."""
        return self.num_kv_heads if self.num_global_kv_heads is None else self.num_global_kv_heads

    @property
    def page_size_bytes(self) -> int:
        """block_size x num_kv_heads x (head_size + head_size_v) values in `dtype`."""
        rows = self.block_size * self.num_kv_heads
        return self.dtype.num_bytes(rows * self.head_size) + self.dtype.num_bytes(
            rows * self.value_head_size
        )

    @property
    def page_formula(self) -> str:
        """Tokens x heads x (key + value) values."""
        heads = f"{self.num_kv_heads} of {self.total_num_kv_heads} KV heads"
        values = f"({self.head_size} + {self.value_head_size}) {self.dtype.value}"
        return f"{self.block_size} tokens x {heads} x {values}"

    def num_steady_blocks(self, num_tokens: int) -> int:
        """One block per started `block_size` tokens, unless the kind sees less than all of them."""
        return cdiv(num_tokens, self.block_size)

    def max_num_blocks(self, num_tokens: int, limits: KVLimits) -> int:
        """The steady blocks: where every token stays needed, chunks hold no more."""
        return self.num_steady_blocks(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every earlier token stays visible.

    `sliding_window` and `attention_chunk_size` are set only when hybrid management is off: the
    layer computes with a window but keeps all of its blocks.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(AttentionSpec):
    """Multi-head latent attention: one latent row per token, read as key and as value.

    `num_kv_heads` is 1 on every rank and `head_size` the latent rank plus the rope part.
    """

    @property
    def page_size_bytes(self) -> int:
        """block_size x head_size values: the value is part of the stored row."""
        return self.dtype.num_bytes(self.block_size * self.num_kv_heads * self.head_size)

    @property
    def page_formula(self) -> str:
        """Tokens x values of the latent row."""
        return f"{self.block_size} tokens x {self.head_size} {self.dtype.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A query sees `sliding_window` keys, its own included."""

    sliding_window: int

    def num_steady_blocks(self, num_tokens: int) -> int:
        """Blocks touched by the window of one query.

        ```
        block_size 4, window 4    |  xx|xo  |   two blocks for four tokens
        ```
        """
        return self._num_held_blocks(num_tokens, 1)

    def max_num_blocks(self, num_tokens: int, limits: KVLimits) -> int:
        """Blocks touched by the window before the chunk in flight, and the chunk."""
        return self._num_held_blocks(num_tokens, limits.max_num_batched_tokens)

    def _num_held_blocks(self, num_tokens: int, num_new_tokens: int) -> int:
        held = self.sliding_window - 1 + num_new_tokens
        return min(_max_touched(held, self.block_size, 1), cdiv(num_tokens, self.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A query sees the keys of its own `attention_chunk_size`-aligned chunk."""

    attention_chunk_size: int

    def num_steady_blocks(self, num_tokens: int) -> int:
        """Blocks touched by one aligned chunk."""
        return self._num_held_blocks(num_tokens, 1)

    def max_num_blocks(self, num_tokens: int, limits: KVLimits) -> int:
        """Blocks touched by what is stored of the aligned chunk, and the tokens in flight."""
        return self._num_held_blocks(num_tokens, limits.max_num_batched_tokens)

    def _num_held_blocks(self, num_tokens: int, num_new_tokens: int) -> int:
        chunk = self.attention_chunk_size
        held = chunk - 1 + num_new_tokens
        return min(_max_touched(held, self.block_size, chunk), cdiv(num_tokens, self.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKVSpec(KVCacheSpec):
    """A layer that reads the KV of the earlier layer `target` and stores nothing of its own."""

    target: str

    @property
    def shared_target(self) -> str:
        """The layer whose KV this one reads."""
        return self.target

    @property
    def page_size_bytes(self) -> int:
        """No memory of its own."""
        return 0

    @property
    def page_formula(self) -> str:
        """Where its KV is."""
        return f"none of its own: reads {self.target}"

    def num_steady_blocks(self, num_tokens: int) -> int:
        """No blocks of its own."""
        return 0

    def max_num_blocks(self, num_tokens: int, limits: KVLimits) -> int:
        """No blocks of its own."""
        return 0


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One allocation: `size` bytes, read by every layer in `shared_by`."""

    size: int
    shared_by: list[str]


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table, and the spec they have in common."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What one worker allocates. `num_blocks` includes block 0, which is never handed out."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor] = field(default_factory=list)
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)
