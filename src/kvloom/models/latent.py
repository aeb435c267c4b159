"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1), with absorbed maps.

A token's keys and values are linear maps of one latent row. q . (K c) = (K^T q) . c, and a weighted
sum of V c is V times the weighted sum of c: so queries go into the latent space, all heads attend
to the rows themselves, and what they find is mapped to values afterwards. Nothing is expanded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.models.fields import read_float, read_int, read_mapping
from kvloom.models.layers import Linear
from kvloom.ops.base import Attention, KVLayer, Ops, Parameter, Rope, Value

# Of the norms inside; configs have one for the norms of the layers alone.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Values per token or head.

    Attributes:
        query_latent: of the row that all heads' queries are made from; None makes them directly.
        latent: of the row that keys and values are made from.
        plain: of a query head that meet the latent row.
        rotated: of a query head, and of the row, that are rotated by the position.
        value: of a value head.
    """

    query_latent: int | None
    latent: int
    plain: int
    rotated: int
    value: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> LatentSizes:
        """From Hugging Face's fields.

        Raises:
            UnsupportedModelError: a size is missing or malformed.
        """
        has_query_latent = fields.get("q_lora_rank") is not None
        return cls(
            query_latent=read_int(fields, "q_lora_rank") if has_query_latent else None,
            latent=read_int(fields, "kv_lora_rank"),
            plain=read_int(fields, "qk_nope_head_dim"),
            rotated=read_int(fields, "qk_rope_head_dim"),
            value=read_int(fields, "v_head_dim"),
        )

    @property
    def query(self) -> int:
        """Values of a query head."""
        return self.plain + self.rotated

    @property
    def row(self) -> int:
        """Values stored per token."""
        return self.latent + self.rotated


def read_scale(fields: Mapping[str, Any], sizes: LatentSizes) -> float:
    """What multiplies q . k; a stretched rope sharpens it twice, once for q and once for k.

    Raises:
        UnsupportedModelError: a setting of the rope is malformed.
    """
    scale: float = sizes.query**-0.5
    settings = read_mapping(fields, "rope_scaling") or read_mapping(fields, "rope_parameters")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default" or not settings.get("mscale_all_dim"):
        return scale
    factor = read_float(settings, "factor")
    weight = read_float(settings, "mscale_all_dim")
    magnitude = 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return scale * magnitude * magnitude


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's attention over latent rows.

    Attributes:
        kv: the layer's cache.
        sizes: of everything.
        num_heads: query heads of this rank.
        rope: of the rotated parts.
        scoring: how rows are scored.
        query_down: hidden states to the queries' latent row; None where queries are made directly.
        query_norm: of that row.
        query: to query heads.
        down: hidden states to the latent row, and to its rotated part.
        norm: of the latent row.
        key_map: [num_heads, latent, plain]: queries into the latent space.
        value_map: [num_heads, value, latent]: what heads find there to values.
        out: heads to hidden states; ranks' results must be summed.
    """

    kv: KVLayer
    sizes: LatentSizes
    num_heads: int
    rope: Rope
    scoring: Attention
    query_down: Linear | None
    query_norm: Parameter | None
    query: Linear
    down: Linear
    norm: Parameter
    key_map: Parameter
    value_map: Parameter
    out: Linear

    def compute(self, ops: Ops, h: Value, positions: Value) -> Value:
        """[num_tokens, hidden_size] of h [num_tokens, hidden_size]."""
        sizes = self.sizes
        heads = ops.heads(self._project_query(ops, h), self.num_heads)
        plain, rotated = ops.split(heads, (sizes.plain, sizes.rotated))
        latent, shared = ops.split(ops.linear(h, *self.down), (sizes.latent, sizes.rotated))
        latent = ops.rms_norm(latent, self.norm, _NORM_EPS)
        rotated, shared = ops.rope(rotated, ops.heads(shared, 1), positions, self.rope)
        q = ops.concat(
            [ops.head_linear(plain, self.key_map), rotated]
        )  # [num_tokens, num_heads, row]
        row = ops.concat([ops.heads(latent, 1), shared])  # [num_tokens, 1, row]
        found = ops.latent_attention(self.kv, q, row, self.scoring, sizes.latent)
        values = ops.head_linear(found, self.value_map)  # [num_tokens, num_heads, value]
        return ops.all_reduce(ops.linear(ops.merge_heads(values), *self.out))

    def _project_query(self, ops: Ops, h: Value) -> Value:
        """[num_tokens, num_heads x (plain + rotated)]."""
        if self.query_down is None or self.query_norm is None:
            return ops.linear(h, *self.query)
        low = ops.rms_norm(ops.linear(h, *self.query_down), self.query_norm, _NORM_EPS)
        return ops.linear(low, *self.query)
