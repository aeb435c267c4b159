"""What the operations of a rewritten tape mean, in operations of the vocabulary."""

from __future__ import annotations

from typing import Any

from kvloom.ops.base import Attention, Experts, KVLayer, Ops, Parameter
from kvloom.ops.rewrites_attention import HeadForms, HeadNorm


class FusedOps:
    """The fused operations over any Ops; everything else goes to it unchanged."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def store_qkv(
        self, kv: KVLayer, q: Any, k: Any, v: Any, positions: Any, forms: HeadForms
    ) -> Any:
        # The vocabulary stores when it attends, so the parts are handed to `attend`.
        if not forms.norms_follow_rope:
            q, k = self._norm(q, forms.q_norm), self._norm(k, forms.k_norm)
        if forms.rope is not None:
            q = self._ops.rotate(q, positions, forms.rope)
            k = None if k is None else self._ops.rotate(k, positions, forms.rope)
        if forms.norms_follow_rope:
            q, k = self._norm(q, forms.q_norm), self._norm(k, forms.k_norm)
        if forms.position_scale is not None:
            q = self._ops.scale_by_position(q, positions, forms.position_scale)
        return [q, k, self._norm(v, forms.v_norm), forms.scale]  # one value

    def _norm(self, x: Any, norm: HeadNorm | None) -> Any:
        return x if norm is None else self._ops.rms_norm(x, norm.weight, norm.eps)

    def attend(self, kv: KVLayer, stored: Any, scoring: Attention, head_size_v: int) -> Any:
        q, k, v, scale = stored
        assert scale == scoring.scale
        if k is None:
            return self._ops.shared_attention(kv, q, scoring)
        if v is None:
            return self._ops.latent_attention(kv, q, k, scoring, head_size_v)
        return self._ops.attention(kv, q, k, v, scoring)

    def gated_linear(self, x: Any, weight: Parameter, bias: Any, activation: Any) -> Any:
        return self._ops.gated_activation(self._ops.linear(x, weight, bias), activation)

    def add_linear(self, residual: Any, x: Any, weight: Parameter, bias: Any) -> Any:
        return self._ops.add(residual, self._ops.linear(x, weight, bias))

    def add_norm(self, residual: Any, x: Any, norm: Parameter | None, eps: float) -> Any:
        return self._ops.add(residual, self._ops.rms_norm(x, norm, eps))

    def pack(self, x: Any, weight: Parameter) -> Any:
        return x

    def norm_pack(self, x: Any, norm: Parameter | None, eps: float, weight: Parameter) -> Any:
        return self._ops.rms_norm(x, norm, eps)

    def gated_pack(self, x: Any, weight: Parameter, bias: Any, activation: Any, _: Any) -> Any:
        return self.gated_linear(x, weight, bias, activation)

    def pack_heads(self, x: Any, weight: Parameter) -> Any:
        return x

    def pack_experts(self, x: Any, routes: Any, experts: Experts) -> Any:
        return x

    def gate_experts(self, rows: Any, routes: Any, experts: Experts) -> Any:
        return rows

    def down_experts(self, inner: Any, routes: Any, experts: Experts) -> Any:
        return inner

    def sum_experts(self, y: Any, routes: Any, experts: Experts) -> Any:
        return self._ops.experts(y, routes, experts)
