"""What models say of their KV against what their configs say, read here a second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config_specs import layer_specs
from kvloom.dtypes import DType
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_models_declare_what_their_configs_say(config, num_ranks):
    model_config = json.loads(config.read_text())
    if model_config["num_attention_heads"] % num_ranks:
        pytest.skip("the heads cannot be cut so")
    dtypes = ModelDTypes(weights=DType.BFLOAT16, kv=DType.BFLOAT16)
    model = build_model(model_config, TensorParallelRank(0, num_ranks), dtypes)
    assert model.get_kv_spec().layers == layer_specs(model_config, num_ranks)
