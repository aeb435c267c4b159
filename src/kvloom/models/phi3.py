"""Phi-3, Phi-3.5 and Phi-4 (model_type "phi3"): Llama's computation, from fused matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kvloom.errors import UnsupportedModelError
from kvloom.models.decoder import DecoderConfig, read_decoder_config, read_layers, read_window
from kvloom.models.fields import read_float, read_mapping
from kvloom.models.llama import LlamaModel
from kvloom.models.rope import RopeFields, build_rope
from kvloom.ops.base import Rope

# Of fields that a config may leave out, where other families have other defaults.
_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
_OLD_NAMES = ("su", "yarn")  # what early configs call longrope


class Phi3Model(LlamaModel):
    """Llama without biases, some with a window; the first part of each head may rotate alone."""

    fused_modules: ClassVar[Mapping[str, str]] = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}
    gguf_names: ClassVar[Mapping[str, str]] = {
        "self_attn.qkv_proj": "attn_qkv",
        "mlp.gate_up_proj": "ffn_up",
    }

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields; every layer has the same window, or none has."""
        fields, share = _take_rotated_share({**_DEFAULTS, **fields})
        has_window = fields.get("sliding_window") is not None
        window = read_window(fields) if has_window else None

        def rope_of(head_size: int) -> Rope:
            return build_rope(RopeFields.read(fields), int(head_size * share))

        layers = [replace(layer, window=window) for layer in read_layers(fields, rope_of=rope_of)]
        return read_decoder_config(fields, layers)


def _take_rotated_share(fields: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Rope settings as other families have them, and the part of each head that they are for.

    Raises:
        UnsupportedModelError: the part is larger than the head.
    """
    share = read_float(fields, "partial_rotary_factor", 1.0)
    taken = {**fields, "partial_rotary_factor": None}
    for name in ("rope_scaling", "rope_parameters"):
        settings = read_mapping(fields, name)
        share = read_float(settings, "partial_rotary_factor", share)
        kind = settings.get("rope_type", settings.get("type"))
        if settings:
            renamed = {"rope_type": "longrope"} if kind in _OLD_NAMES else {}
            taken[name] = {**settings, **renamed, "partial_rotary_factor": None}
    if share > 1.0:
        raise UnsupportedModelError(
            f"the config's partial_rotary_factor should be at most 1, not {share}"
        )
    return taken, share
