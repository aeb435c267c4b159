"""Model types kvloom runs, by the name their configs give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvloom.config import AUTO, Auto
from kvloom.errors import UnsupportedModelError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.cohere2 import Cohere2Model
from kvloom.models.deepseek import DeepseekV2Model, DeepseekV3Model
from kvloom.models.gemma2 import Gemma2Model
from kvloom.models.gemma3 import Gemma3Model
from kvloom.models.gemma3n import Gemma3nModel
from kvloom.models.gemma4 import Gemma4Model
from kvloom.models.gpt_oss import GptOssModel
from kvloom.models.llama import LlamaModel
from kvloom.models.llama4 import Llama4Model
from kvloom.models.mistral import MistralModel
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.phi3 import Phi3Model
from kvloom.models.qwen2 import Qwen2Model
from kvloom.models.qwen3 import Qwen3Model
from kvloom.models.rope import LONGEST_REQUEST
from kvloom.models.smollm3 import SmolLM3Model

_MODELS: dict[str, Callable[[Mapping[str, Any], TensorParallelRank, ModelDTypes], Model]] = {
    "cohere2": Cohere2Model,
    "deepseek_v2": DeepseekV2Model,
    "deepseek_v3": DeepseekV3Model,
    "gemma2": Gemma2Model,
    "gemma3_text": Gemma3Model,
    "gemma3n_text": Gemma3nModel,
    "gemma4_text": Gemma4Model,
    "gpt_oss": GptOssModel,
    "llama": LlamaModel,
    "llama4_text": Llama4Model,
    "mistral": MistralModel,
    "phi3": Phi3Model,
    "qwen2": Qwen2Model,
    "qwen3": Qwen3Model,
    "smollm3": SmolLM3Model,
}


def build_model(
    config: Mapping[str, Any],
    rank: TensorParallelRank,
    dtypes: ModelDTypes,
    longest_request: int | Auto = AUTO,
) -> Model:
    """The model that a Hugging Face config.json describes, cut for `rank`, without weights.

    Requests may be as long as the model was made for, or up to `longest_request` tokens: some
    models rotate by other frequencies where none is long.

    Raises:
        UnsupportedModelError: the family, or a value of the config, is not one we compute.
        ParallelSizeError: the heads do not fit `rank.world_size`.
    """
    model_type = str(config.get("model_type"))
    if model_type not in _MODELS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; kvloom runs {', '.join(_MODELS)}"
        )
    if longest_request != AUTO:
        config = {**config, LONGEST_REQUEST: longest_request}
    return _MODELS[model_type](config, rank, dtypes)
