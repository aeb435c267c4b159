"""Mistral 7B and others of model_type "mistral": Llama's computation, with windows if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.errors import UnsupportedModelError
from kvloom.models.decoder import DecoderConfig, read_decoder_config, read_layers, read_window
from kvloom.models.llama import LlamaModel


class MistralModel(LlamaModel):
    """Llama without biases; every layer has the same window, or none has."""

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; `sliding_window` null means full attention.

        Raises:
            UnsupportedModelError: `layer_types`, which belong to other families.
        """
        if fields.get("layer_types") is not None:
            raise UnsupportedModelError(
                "mistral configs have one sliding_window for all layers, but this one has "
                "layer_types; it belongs to another model_type"
            )
        window = read_window(fields)
        layers = [replace(layer, window=window) for layer in read_layers(fields)]
        return replace(read_decoder_config(fields, layers), permutes_gguf_heads=True)
