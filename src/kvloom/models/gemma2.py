"""Gemma 2 (model_type "gemma2"): windows in every other layer, soft caps, norms on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    SLIDING,
    DecoderConfig,
    DecoderModel,
    read_layers,
    read_window,
)
from kvloom.models.fields import read_float, read_float_or_none
from kvloom.models.gemma import SANDWICH_NORM_NAMES, read_gemma_config, read_pattern
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Attention, Batch, Ops, Parameter, Value


@dataclass(frozen=True, slots=True)
class Gemma2Layer:
    """Attention and feed-forward, each between two norms."""

    input_norm: Parameter
    attention: SelfAttention
    attention_norm: Parameter
    mlp_input_norm: Parameter
    mlp: FeedForward
    mlp_norm: Parameter


class Gemma2Model(DecoderModel):
    """Sandwich-norm decoder; scores and logits are softly capped, embeddings scaled."""

    gguf_names: ClassVar[Mapping[str, str]] = SANDWICH_NORM_NAMES

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(_read_config(fields), rank, dtypes)
        self.final_cap = read_float_or_none(fields, "final_logit_softcapping", 30.0)
        self._scoring = Attention(
            scale=read_float(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
            soft_cap=read_float_or_none(fields, "attn_logit_softcapping", 50.0),
        )
        self.layers = [self._build_layer(i) for i in range(len(self.config.layers))]

    def build_norm(self, name: str) -> Parameter:
        """A norm that weighs by 1 + w."""
        return self.build.norm_around_one(name, self.config.hidden_size)

    def _build_layer(self, index: int) -> Gemma2Layer:
        name = f"model.layers.{index}"
        return Gemma2Layer(
            input_norm=self.build_norm(f"{name}.input_layernorm"),
            attention=self.build_attention(index, scoring=self._scoring),
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
            q, k = layer.attention.rotate(ops, q, k, batch.positions)
            h = layer.attention.attend(ops, q, k, v)
            x = ops.add(x, ops.rms_norm(h, layer.attention_norm, eps))
            h = layer.mlp.compute(ops, ops.rms_norm(x, layer.mlp_input_norm, eps))
            x = ops.add(x, ops.rms_norm(h, layer.mlp_norm, eps))
        logits = self.logits(ops, x, batch.logits_rows)
        return logits if self.final_cap is None else ops.soft_cap(logits, self.final_cap)


def _read_config(fields: Mapping[str, Any]) -> DecoderConfig:
    window = read_window(fields)
    layers = [
        replace(layer, window=window if kind == SLIDING else None)
        for layer, kind in zip(
            read_layers(fields, default_head_size=256), read_pattern(fields, 2), strict=True
        )
    ]
    computes = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    return read_gemma_config(fields, layers, computes)
