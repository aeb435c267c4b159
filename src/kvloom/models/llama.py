"""Llama 1 to 3, SmolLM2 and others of model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import DecoderConfig, DecoderModel, read_decoder_config, read_layers
from kvloom.models.fields import read_bool
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Batch, Ops, Parameter, Value


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Attention and feed-forward, each after a norm."""

    input_norm: Parameter
    attention: SelfAttention
    mlp_norm: Parameter
    mlp: FeedForward


class LlamaModel(DecoderModel):
    """Pre-norm decoder: grouped-query attention with rope, gated feed-forward, RMS norms."""

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(self.read_config(fields), rank, dtypes)
        self.layers = [
            LlamaLayer(
                input_norm=self.build_norm(f"model.layers.{i}.input_layernorm"),
                attention=self.build_attention(i),
                mlp_norm=self.build_norm(f"model.layers.{i}.post_attention_layernorm"),
                mlp=self.build_feed_forward(i),
            )
            for i in range(len(self.config.layers))
        ]

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields. Biases are optional; GGUF files permute q and k."""
        has_attention_bias = read_bool(fields, "attention_bias")
        return replace(
            read_decoder_config(fields, read_layers(fields)),
            has_qkv_bias=has_attention_bias,
            has_out_bias=has_attention_bias,
            has_mlp_bias=read_bool(fields, "mlp_bias"),
            permutes_gguf_heads=True,
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, eps)
            q, k, v = layer.attention.project(ops, h)
            q, k = layer.attention.rotate(ops, q, k, batch.positions)
            x = ops.add(x, layer.attention.attend(ops, q, k, v))
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = ops.add(x, layer.mlp.compute(ops, h))
        return self.logits(ops, x, batch.logits_rows)
