"""Qwen2 and Qwen2.5 (model_type "qwen2"): Llama's computation, with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.models.decoder import DecoderConfig, read_decoder_config, read_layer_windows
from kvloom.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    """Llama with biases on q, k, v; upper layers may have windows."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields."""
        return replace(
            read_decoder_config(config), has_qkv_bias=True, windows=read_layer_windows(config)
        )
