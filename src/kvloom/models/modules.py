"""The parts that decoder layers are made of: one rank's attention and feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.models.layers import Linear
from kvloom.models.parallel import HeadShare
from kvloom.ops.base import Activation, Attention, KVLayer, Ops, Rope, Value


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention of one layer.

    Attributes:
        kv: the layer's cache.
        heads: the query and KV heads of this rank.
        head_size: values per head.
        rope: how queries and keys are rotated; None leaves them as they are.
        scoring: how keys are scored.
        qkv: hidden states to queries, keys and values; to queries alone where KV is shared.
        out: heads to hidden states; ranks' results must be summed.
    """

    kv: KVLayer
    heads: HeadShare
    head_size: int
    rope: Rope | None
    scoring: Attention
    qkv: Linear
    out: Linear

    def project(self, ops: Ops, h: Value) -> tuple[Value, Value, Value]:
        """This rank's q, k, v of h: each [num_tokens, its heads, head_size]."""
        heads = self.heads
        qkv = ops.linear(h, *self.qkv)
        return ops.split_heads(qkv, heads.num_heads, heads.num_kv_heads, self.head_size)

    def project_query(self, ops: Ops, h: Value) -> Value:
        """The queries of a layer that shares KV: [num_tokens, num_heads, head_size]."""
        return ops.heads(ops.linear(h, *self.qkv), self.heads.num_heads)

    def project_query_and_key(self, ops: Ops, h: Value) -> tuple[Value, Value]:
        """Q and k of a layer that has no projection of values, shaped as `project` does."""
        num_heads, num_kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        sizes = (num_heads * self.head_size, num_kv_heads * self.head_size)
        q, k = ops.split(ops.linear(h, *self.qkv), sizes)
        return ops.heads(q, num_heads), ops.heads(k, num_kv_heads)

    def rotate(self, ops: Ops, q: Value, k: Value, positions: Value) -> tuple[Value, Value]:
        """Q and k by their positions."""
        return (q, k) if self.rope is None else ops.rope(q, k, positions, self.rope)

    def rotate_query(self, ops: Ops, q: Value, positions: Value) -> Value:
        """Q alone, where KV is shared."""
        return q if self.rope is None else ops.rotate(q, positions, self.rope)

    def attend(self, ops: Ops, q: Value, k: Value, v: Value) -> Value:
        """[num_tokens, hidden_size]: store k and v, let q read the cache, mix the heads."""
        return self._mix(ops, ops.attention(self.kv, q, k, v, self.scoring))

    def attend_shared(self, ops: Ops, q: Value) -> Value:
        """The same over the KV that another layer stored."""
        return self._mix(ops, ops.shared_attention(self.kv, q, self.scoring))

    def _mix(self, ops: Ops, a: Value) -> Value:
        return ops.all_reduce(ops.linear(a, *self.out))  # a: [num_tokens, num_heads x head_size]


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Down(activation(gate(h)) * up(h)); ranks share the inner values."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def compute(self, ops: Ops, h: Value) -> Value:
        """[num_tokens, hidden_size] of h [num_tokens, hidden_size]."""
        return ops.all_reduce(self.compute_share(ops, h))

    def compute_share(self, ops: Ops, h: Value) -> Value:
        """This rank's share of the same, to be summed over ranks."""
        inner = ops.gated_activation(ops.linear(h, *self.gate_up), self.activation)
        return ops.linear(inner, *self.down)
