"""Mistral 7B and others of model_type "mistral": Llama's computation, with windows if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.errors import UnsupportedModelError
from kvloom.models.decoder import DecoderConfig, read_decoder_config, read_window
from kvloom.models.fields import read_int
from kvloom.models.llama import LlamaModel


class MistralModel(LlamaModel):
    """Llama without biases; every layer has the same window, or none has."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; `sliding_window` null means full attention.

        Raises:
            UnsupportedModelError: `layer_types`, which belong to other families.
        """
        if config.get("layer_types") is not None:
            raise UnsupportedModelError(
                "mistral configs have one sliding_window for all layers, but this one has "
                "layer_types; it belongs to another model_type"
            )
        return replace(
            read_decoder_config(config),
            windows=(read_window(config),) * read_int(config, "num_hidden_layers"),
            permutes_gguf_heads=True,
        )
