"""Cohere 2 (model_type "cohere2"): Command R7B, Command A and Aya of the second generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    DecoderModel,
    LayerConfig,
    read_decoder_config,
    read_layer_types,
    read_layers,
    read_window,
)
from kvloom.models.fields import read_bool, read_float, read_int
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Batch, Ops, Parameter, Value


@dataclass(frozen=True, slots=True)
class Cohere2Layer:
    """Attention and feed-forward side by side, after one norm."""

    norm: Parameter
    attention: SelfAttention
    mlp: FeedForward


class Cohere2Model(DecoderModel):
    """Layers with windows rotate; the full ones between them do not."""

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(self.read_config(fields), rank, dtypes)
        self.logit_scale = read_float(fields, "logit_scale", 0.0625)
        self.layers = [
            Cohere2Layer(
                norm=self.build_norm(f"model.layers.{i}.input_layernorm"),
                attention=self.build_attention(i),
                mlp=self.build_feed_forward(i),
            )
            for i in range(len(self.config.layers))
        ]

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; the head is tied unless they say otherwise."""
        has_attention_bias = read_bool(fields, "attention_bias")
        return replace(
            read_decoder_config(fields, _read_layers(fields)),
            norm_eps=read_float(fields, "layer_norm_eps", 1e-5),
            has_tied_head=read_bool(fields, "tie_word_embeddings", default=True),
            has_qkv_bias=has_attention_bias,
            has_out_bias=has_attention_bias,
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.layer_norm(x, layer.norm, eps)
            q, k, v = layer.attention.project(ops, h)
            q, k = layer.attention.rotate(ops, q, k, batch.positions)
            x = ops.add(x, layer.attention.attend(ops, q, k, v))
            x = ops.add(x, layer.mlp.compute(ops, h))
        h = ops.layer_norm(ops.select_rows(x, batch.logits_rows), self.norm, eps)
        return ops.scale(self.unembed(ops, h), self.logit_scale)


def _read_layers(fields: Mapping[str, Any]) -> list[LayerConfig]:
    layers = read_layers(fields)
    window = read_window(fields)
    types = read_layer_types(fields)
    if types is None:
        pattern = read_int(fields, "sliding_window_pattern", 4)
        types = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(len(layers)))
    return [
        replace(layer, window=window, rope=layer.rope and replace(layer.rope, is_interleaved=True))
        if kind == SLIDING and window is not None
        else replace(layer, rope=None)
        for layer, kind in zip(layers, types, strict=True)
    ]
