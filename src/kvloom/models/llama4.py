"""Llama 4's text models (model_type "llama4_text"): chunked and full layers, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvloom.errors import UnsupportedModelError
from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    FULL,
    DecoderConfig,
    DecoderModel,
    LayerConfig,
    read_decoder_config,
    read_layer_types,
    read_layers,
)
from kvloom.models.experts import (
    ExpertSizes,
    ExpertSources,
    MixtureOfExperts,
    build_experts,
    check_routing,
)
from kvloom.models.fields import read_bool, read_float, read_int
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.rope import read_rotations
from kvloom.ops.base import Batch, Experts, Ops, Parameter, PositionScale, Routing, Value
from kvloom.ops.source import Slice, Source, SwapAxes

CHUNKED = "chunked_attention"
# Of fields that a config may leave out, where other families have other defaults.
_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}


@dataclass(frozen=True, slots=True)
class Llama4Layer:
    """Attention, then a dense feed-forward or experts."""

    input_norm: Parameter
    attention: SelfAttention
    mlp_norm: Parameter
    mlp: FeedForward | MixtureOfExperts


class Llama4Model(DecoderModel):
    """Most layers see their chunk and rotate; the others see all and grow with the position."""

    gguf_names: ClassVar[Mapping[str, str]] = {
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
        "feed_forward.router": "ffn_gate_inp",
        "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
        "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
        "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    }

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(self.read_config(fields), rank, dtypes)
        self.has_qk_norm = read_bool(fields, "use_qk_norm", default=True)
        self.temperature = _read_temperature(fields)
        expert_size = read_int(fields, "intermediate_size")
        self._expert_sizes = ExpertSizes(
            read_int(fields, "num_local_experts", 16),
            self.config.hidden_size,
            expert_size,
            *rank.share(expert_size),
        )
        self._routing = Routing(read_int(fields, "num_experts_per_tok", 1), score="sigmoid")
        check_routing(self._routing, self._expert_sizes.num_experts)
        expert_layers = _read_expert_layers(fields)
        self.layers = [
            Llama4Layer(
                input_norm=self.build_norm(f"model.layers.{i}.input_layernorm"),
                attention=self.build_attention(i),
                mlp_norm=self.build_norm(f"model.layers.{i}.post_attention_layernorm"),
                mlp=(
                    self._build_mixture(i)
                    if i in expert_layers
                    else self.build_feed_forward(i, "feed_forward")
                ),
            )
            for i in range(len(self.config.layers))
        ]

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; `intermediate_size` there is that of an expert."""
        dense_size = read_int(fields, "intermediate_size_mlp", 16384)
        fields = {**_DEFAULTS, **fields, "intermediate_size": dense_size}
        has_attention_bias = read_bool(fields, "attention_bias")
        return replace(
            read_decoder_config(fields, _read_layers(fields), computes=("attention_chunk_size",)),
            has_qkv_bias=has_attention_bias,
            has_out_bias=has_attention_bias,
        )

    def _build_mixture(self, index: int) -> MixtureOfExperts:
        path, sizes = "feed_forward", self._expert_sizes
        name = f"model.layers.{index}.{path}"
        return MixtureOfExperts(
            router=self.build.whole(
                f"{name}.router.weight", (sizes.num_experts, sizes.hidden_size)
            ),
            routing=self._routing,
            experts=self._build_experts(index, f"{name}.experts"),
            shared=self.build_feed_forward(index, f"{path}.shared_expert", sizes.inner_size),
        )

    def _build_experts(self, index: int, name: str) -> Experts:
        """From matrices that are stored [in, out], gate and up side by side."""
        sizes = self._expert_sizes
        inner, hidden = sizes.inner_size, sizes.hidden_size
        both = (sizes.num_experts, hidden, 2 * inner)
        gate_up = [
            Source(
                f"{name}.gate_up_proj",
                both,
                (SwapAxes(1, 2), Slice(1, half, half + inner), *sizes.keep(1)),
            )
            for half in (0, inner)
        ]
        down = Source(
            f"{name}.down_proj",
            (sizes.num_experts, inner, hidden),
            (SwapAxes(1, 2), *sizes.keep(2)),
        )
        experts = build_experts(
            self.build, index, sizes, ExpertSources(gate_up, [down]), self.config.activation
        )
        return replace(experts, weighs_input=True)

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, eps)
            x = ops.add(x, self._attend(ops, layer.attention, h, batch.positions))
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = ops.add(x, layer.mlp.compute(ops, h))
        return self.logits(ops, x, batch.logits_rows)

    def _attend(self, ops: Ops, attention: SelfAttention, h: Value, positions: Value) -> Value:
        q, k, v = attention.project(ops, h)
        if attention.rope is not None:
            q, k = ops.rope(q, k, positions, attention.rope)
            if self.has_qk_norm:
                eps = self.config.norm_eps
                q, k = ops.rms_norm(q, None, eps), ops.rms_norm(k, None, eps)
        elif self.temperature is not None:
            q = ops.scale_by_position(q, positions, self.temperature)
        return attention.attend(ops, q, k, v)


def _read_layers(fields: Mapping[str, Any]) -> list[LayerConfig]:
    layers = read_layers(fields)
    chunk_size = None
    if fields.get("attention_chunk_size", 8192) is not None:
        chunk_size = read_int(fields, "attention_chunk_size", 8192)
    rotates = read_rotations(fields)
    types = read_layer_types(fields, (FULL, CHUNKED))
    if types is None:
        types = tuple(CHUNKED if is_rotated and chunk_size else FULL for is_rotated in rotates)
    if CHUNKED in types and chunk_size is None:
        raise UnsupportedModelError(
            "the config's layer_types name chunked_attention, but it has no attention_chunk_size"
        )
    return [
        replace(
            layer,
            rope=replace(layer.rope, is_interleaved=True) if is_rotated and layer.rope else None,
            chunk_size=chunk_size if kind == CHUNKED else None,
        )
        for layer, is_rotated, kind in zip(layers, rotates, types, strict=True)
    ]


def _read_expert_layers(fields: Mapping[str, Any]) -> frozenset[int]:
    """The layers with experts: `moe_layers`, else every `interleave_moe_layer_step`-th."""
    num_layers = read_int(fields, "num_hidden_layers")
    layers = fields.get("moe_layers")
    if layers is None:
        step = read_int(fields, "interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, num_layers, step))
    if not isinstance(layers, list) or set(layers) - set(range(num_layers)):
        raise UnsupportedModelError(
            f"moe_layers should list some of the {num_layers} layers, not {layers!r:.80}"
        )
    return frozenset(layers)


def _read_temperature(fields: Mapping[str, Any]) -> PositionScale | None:
    """How queries of layers that do not rotate grow; configs ask for it by true or 4."""
    is_on = fields.get("attn_temperature_tuning", True)
    if not isinstance(is_on, bool | int | None):
        raise UnsupportedModelError(
            f"attn_temperature_tuning should be true or false, not {is_on!r:.80}"
        )
    if not is_on:
        return None
    return PositionScale(
        scale=read_float(fields, "attn_scale", 0.1),
        floor_scale=read_float(fields, "floor_scale", 8192.0),
    )
