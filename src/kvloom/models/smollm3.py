"""SmolLM3 (model_type "smollm3"): Llama's computation, with layers that do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.models.decoder import SLIDING, DecoderConfig, read_layer_types, read_window
from kvloom.models.fields import read_bool
from kvloom.models.llama import LlamaModel
from kvloom.models.rope import read_rotations

# Of fields that a config may leave out, where other families have other defaults.
_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True}


class SmolLM3Model(LlamaModel):
    """Llama, but every few layers have no positions; windows, if any, are those layers'."""

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; `layer_types` may give windows to other layers."""
        fields = {**_DEFAULTS, **fields}
        config = LlamaModel.read_config(fields)
        rotates = read_rotations(fields)
        windows = _read_windows(fields, rotates)
        return replace(
            config,
            layers=tuple(
                replace(layer, rope=layer.rope if is_rotated else None, window=window)
                for layer, is_rotated, window in zip(config.layers, rotates, windows, strict=True)
            ),
        )


def _read_windows(fields: Mapping[str, Any], rotates: list[bool]) -> list[int | None]:
    types = read_layer_types(fields)
    is_on = read_bool(fields, "use_sliding_window") and fields.get("sliding_window") is not None
    window = read_window(fields) if is_on else None
    if types is None:
        return [None if is_rotated else window for is_rotated in rotates]
    return [window if kind == SLIDING else None for kind in types]
