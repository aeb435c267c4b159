"""Qwen3 dense models (model_type "qwen3"): each head's q and k are normalised before rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import DecoderConfig, DecoderModel, read_decoder_config, read_layers
from kvloom.models.fields import read_bool
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.qwen2 import add_windows
from kvloom.ops.base import Batch, Ops, Parameter, Value


@dataclass(frozen=True, slots=True)
class Qwen3Layer:
    """Attention and feed-forward, each after a norm; norms [head_size] of queries and keys."""

    input_norm: Parameter
    attention: SelfAttention
    q_norm: Parameter
    k_norm: Parameter
    mlp_norm: Parameter
    mlp: FeedForward


class Qwen3Model(DecoderModel):
    """Pre-norm decoder with RMS norms over each query and key head."""

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(_read_config(fields), rank, dtypes)
        self.layers = [self._build_layer(i) for i in range(len(self.config.layers))]

    def _build_layer(self, index: int) -> Qwen3Layer:
        name, head_size = f"model.layers.{index}", self.config.layers[index].head_size
        return Qwen3Layer(
            input_norm=self.build_norm(f"{name}.input_layernorm"),
            attention=self.build_attention(index),
            q_norm=self.build.norm(f"{name}.self_attn.q_norm", head_size),
            k_norm=self.build.norm(f"{name}.self_attn.k_norm", head_size),
            mlp_norm=self.build_norm(f"{name}.post_attention_layernorm"),
            mlp=self.build_feed_forward(index),
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, eps)
            q, k, v = layer.attention.project(ops, h)
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
            q, k = layer.attention.rotate(ops, q, k, batch.positions)
            x = ops.add(x, layer.attention.attend(ops, q, k, v))
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = ops.add(x, layer.mlp.compute(ops, h))
        return self.logits(ops, x, batch.logits_rows)


def _read_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """From Hugging Face's fields; the head size does not follow from the hidden size."""
    has_attention_bias = read_bool(fields, "attention_bias")
    layers = add_windows(fields, read_layers(fields, default_head_size=128))
    return replace(
        read_decoder_config(fields, layers),
        has_qkv_bias=has_attention_bias,
        has_out_bias=has_attention_bias,
    )
