"""Model types kvloom runs, by the name their configs give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.config import AUTO, Auto
from kvloom.errors import UnsupportedModelError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.decoder import DecoderModel
from kvloom.models.llama import LlamaModel
from kvloom.models.mistral import MistralModel
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.qwen2 import Qwen2Model
from kvloom.models.qwen3 import Qwen3Model

_MODELS: dict[str, type[DecoderModel]] = {
    "llama": LlamaModel,
    "mistral": MistralModel,
    "qwen2": Qwen2Model,
    "qwen3": Qwen3Model,
}


def build_model(
    config: Mapping[str, Any],
    rank: TensorParallelRank,
    dtypes: ModelDTypes,
    longest_request: int | Auto = AUTO,
) -> Model:
    """The model that a Hugging Face config.json describes, cut for `rank`, without weights.

    A window that no request outgrows is none. Requests may be as long as the model was made for, or
    up to `longest_request` tokens.

    Raises:
        UnsupportedModelError: the family, or a value of the config, is not one we compute.
        ParallelSizeError: the heads do not fit `rank.world_size`.
    """
    model_type = str(config.get("model_type"))
    if model_type not in _MODELS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; kvloom runs {', '.join(_MODELS)}"
        )
    model_class = _MODELS[model_type]
    decoder = model_class.read_config(config)
    longest = decoder.max_model_len if longest_request == AUTO else longest_request
    longest = min(longest, decoder.max_model_len)
    windows = tuple(w if w is not None and w < longest else None for w in decoder.windows)
    return model_class(replace(decoder, windows=windows), rank, dtypes)
