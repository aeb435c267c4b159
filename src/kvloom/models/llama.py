"""Llama 1 to 3, SmolLM2 and others of model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.models.decoder import DecoderConfig, DecoderModel, read_decoder_config
from kvloom.models.fields import read_bool
from kvloom.ops.base import Batch, Ops, Value


class LlamaModel(DecoderModel):
    """Pre-norm decoder: grouped-query attention with rope, gated feed-forward, RMS norms."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields. Biases are optional; GGUF files permute q and k."""
        has_attention_bias = read_bool(config, "attention_bias")
        return replace(
            read_decoder_config(config),
            has_qkv_bias=has_attention_bias,
            has_out_bias=has_attention_bias,
            has_mlp_bias=read_bool(config, "mlp_bias"),
            permutes_gguf_heads=True,
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, self.config.rms_norm_eps)
            q, k, v = self.split_heads(ops, ops.linear(h, *layer.qkv))
            q, k = ops.rope(q, k, batch.positions, self.config.rope)
            a = ops.attention(layer.kv, q, k, v, self.scale)  # [num_tokens, num_heads x head_size]
            x = ops.add(x, ops.all_reduce(ops.linear(a, *layer.out)))
            x = self.feed_forward(ops, layer, x)
        return self.logits(ops, x, batch.logits_rows)
