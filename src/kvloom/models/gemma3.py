"""Gemma 3 text models (model_type "gemma3_text"): five window layers to each full one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import DecoderConfig, DecoderModel, read_window
from kvloom.models.fields import read_float, read_float_or_none, read_int
from kvloom.models.gemma import (
    SANDWICH_NORM_NAMES,
    read_gemma_config,
    read_local_and_global_layers,
    read_pattern,
)
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Attention, Batch, Ops, Parameter, Value


@dataclass(frozen=True, slots=True)
class Gemma3Layer:
    """Attention and feed-forward, each between two norms; norms [head_size] of q and k."""

    input_norm: Parameter
    attention: SelfAttention
    q_norm: Parameter
    k_norm: Parameter
    attention_norm: Parameter
    mlp_input_norm: Parameter
    mlp: FeedForward
    mlp_norm: Parameter


class Gemma3Model(DecoderModel):
    """Sandwich-norm decoder with normalised heads; window and full layers have their own ropes."""

    gguf_names: ClassVar[Mapping[str, str]] = SANDWICH_NORM_NAMES

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(_read_config(fields), rank, dtypes)
        self.final_cap = read_float_or_none(fields, "final_logit_softcapping")
        scale = read_float(fields, "query_pre_attn_scalar", 256.0) ** -0.5
        self.layers = [
            self._build_layer(i, Attention(scale)) for i in range(len(self.config.layers))
        ]

    def build_norm(self, name: str) -> Parameter:
        """A norm that weighs by 1 + w."""
        return self.build.norm_around_one(name, self.config.hidden_size)

    def _build_layer(self, index: int, scoring: Attention) -> Gemma3Layer:
        name, head_size = f"model.layers.{index}", self.config.layers[index].head_size
        return Gemma3Layer(
            input_norm=self.build_norm(f"{name}.input_layernorm"),
            attention=self.build_attention(index, scoring=scoring),
            q_norm=self.build.norm_around_one(f"{name}.self_attn.q_norm", head_size),
            k_norm=self.build.norm_around_one(f"{name}.self_attn.k_norm", head_size),
            attention_norm=self.build_norm(f"{name}.post_attention_layernorm"),
            mlp_input_norm=self.build_norm(f"{name}.pre_feedforward_layernorm"),
            mlp=self.build_feed_forward(index),
            mlp_norm=self.build_norm(f"{name}.post_feedforward_layernorm"),
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        x = ops.scale(x, self.config.hidden_size**0.5)
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, eps)
            q, k, v = layer.attention.project(ops, h)
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
            q, k = layer.attention.rotate(ops, q, k, batch.positions)
            h = layer.attention.attend(ops, q, k, v)
            x = ops.add(x, ops.rms_norm(h, layer.attention_norm, eps))
            h = layer.mlp.compute(ops, ops.rms_norm(x, layer.mlp_input_norm, eps))
            x = ops.add(x, ops.rms_norm(h, layer.mlp_norm, eps))
        logits = self.logits(ops, x, batch.logits_rows)
        return logits if self.final_cap is None else ops.soft_cap(logits, self.final_cap)


def _read_config(fields: Mapping[str, Any]) -> DecoderConfig:
    types = read_pattern(fields, read_int(fields, "sliding_window_pattern", 6))
    layers = read_local_and_global_layers(fields, types, read_window(fields))
    return read_gemma_config(fields, layers, ("query_pre_attn_scalar", "final_logit_softcapping"))
