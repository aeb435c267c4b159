"""Qwen3 dense models (model_type "qwen3"): each head's q and k are normalised before rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    DecoderConfig,
    DecoderModel,
    read_decoder_config,
    read_layer_windows,
)
from kvloom.models.fields import read_bool
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Batch, Ops, Parameter, Value


class Qwen3Model(DecoderModel):
    """Pre-norm decoder with RMS norms over each query and key head."""

    def __init__(
        self, config: DecoderConfig, rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(config, rank, dtypes)
        self.q_norms = self._build_head_norms("q_norm")
        self.k_norms = self._build_head_norms("k_norm")

    def _build_head_norms(self, module: str) -> list[Parameter]:
        return [
            self._builder.norm(f"model.layers.{i}.self_attn.{module}", self.config.head_size)
            for i in range(len(self.layers))
        ]

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; the head size does not follow from the hidden size."""
        has_attention_bias = read_bool(config, "attention_bias")
        return replace(
            read_decoder_config(config, default_head_size=128),
            has_qkv_bias=has_attention_bias,
            has_out_bias=has_attention_bias,
            windows=read_layer_windows(config),
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.rms_norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer, q_norm, k_norm in zip(self.layers, self.q_norms, self.k_norms, strict=True):
            h = ops.rms_norm(x, layer.input_norm, eps)
            q, k, v = self.split_heads(ops, ops.linear(h, *layer.qkv))
            q, k = ops.rms_norm(q, q_norm, eps), ops.rms_norm(k, k_norm, eps)
            q, k = ops.rope(q, k, batch.positions, self.config.rope)
            a = ops.attention(layer.kv, q, k, v, self.scale)  # [num_tokens, num_heads x head_size]
            x = ops.add(x, ops.all_reduce(ops.linear(a, *layer.out)))
            x = self.feed_forward(ops, layer, x)
        return self.logits(ops, x, batch.logits_rows)
