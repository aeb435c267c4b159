"""What the operations of a rewritten tape mean, in operations of the vocabulary."""

from __future__ import annotations

from typing import Any

from kvloom.ops.base import KVLayer, Ops, Parameter, Rope
from kvloom.ops.rewrites import HeadCounts, HeadNorms


class FusedOps:
    """The fused operations over any Ops; everything else goes to it unchanged."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def store_qkv(
        self,
        kv: KVLayer,
        x: Any,
        heads: HeadCounts,
        norms: HeadNorms | None,
        positions: Any,
        rope: Rope,
        scale: float,
    ) -> Any:
        # `Ops.attention` stores as well, so the parts are handed to `attend` as they are.
        q, k, v = self._ops.split_heads(x, *heads)
        if norms is not None:
            q = self._ops.rms_norm(q, norms.q, norms.eps)
            k = self._ops.rms_norm(k, norms.k, norms.eps)
        return (*self._ops.rope(q, k, positions, rope), v, scale)

    def attend(self, kv: KVLayer, stored: Any) -> Any:
        return self._ops.attention(kv, *stored)

    def gated_linear(self, x: Any, weight: Parameter, bias: Any, activation: Any) -> Any:
        return self._ops.gated_activation(self._ops.linear(x, weight, bias), activation)

    def add_linear(self, residual: Any, x: Any, weight: Parameter, bias: Any) -> Any:
        return self._ops.add(residual, self._ops.linear(x, weight, bias))

    def pack(self, x: Any, weight: Parameter) -> Any:
        return x

    def norm_pack(self, x: Any, norm: Parameter, eps: float, weight: Parameter) -> Any:
        return self._ops.rms_norm(x, norm, eps)

    def gated_pack(self, x: Any, weight: Parameter, bias: Any, activation: Any, _: Any) -> Any:
        return self.gated_linear(x, weight, bias, activation)
