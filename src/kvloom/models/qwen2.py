"""Qwen2 and Qwen2.5 (model_type "qwen2"): Llama's computation, with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.models.decoder import (
    SLIDING,
    DecoderConfig,
    LayerConfig,
    read_decoder_config,
    read_layer_types,
    read_layers,
    read_window,
)
from kvloom.models.fields import read_bool, read_int
from kvloom.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    """Llama with biases on q, k, v; upper layers may have windows."""

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields."""
        layers = add_windows(fields, read_layers(fields))
        return replace(read_decoder_config(fields, layers), has_qkv_bias=True)


def add_windows(fields: Mapping[str, Any], layers: list[LayerConfig]) -> list[LayerConfig]:
    """Windows of the Qwen families: where `layer_types` say, else from `max_window_layers` on.

    Raises:
        UnsupportedModelError: a layer type that is neither full nor sliding attention.
    """
    window = read_window(fields) if read_bool(fields, "use_sliding_window") else None
    types = read_layer_types(fields)
    if types is not None:
        has_window = [kind == SLIDING for kind in types]
    else:
        first = read_int(fields, "max_window_layers", 28, at_least=0)
        has_window = [i >= first for i in range(len(layers))]
    return [
        replace(layer, window=window) if has else layer
        for layer, has in zip(layers, has_window, strict=True)
    ]
