"""Llama 4 and DeepSeek: what their configs say, and what they refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import ParallelSizeError, UnsupportedModelError
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, MLAAttentionSpec
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import PositionScale, Routing
from kvloom.ops.reference import ReferenceBackend
from tiny_mixtures import MIXTURE_CASES
from tiny_models import TinyRunner, build_loaded, make_token_ids, run_ranks

CONFIGS = Path(__file__).parent.parent / "data" / "model_configs"
BACKEND = ReferenceBackend()
LLAMA4, V2, V3 = (MIXTURE_CASES[k] for k in ("llama4", "deepseek_v2_lite", "deepseek_v3"))


def build(config: dict[str, Any], rank: int = 0, world_size: int = 1, **changes: Any) -> Model:
    dtypes = ModelDTypes(DType.BFLOAT16, DType.BFLOAT16)
    return build_model({**config, **changes}, TensorParallelRank(rank, world_size), dtypes)


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


# --- DeepSeek ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_deepseek_stores_one_latent_row_per_token_on_every_rank(world_size: int) -> None:
    """Bytes as in vLLM's plan: 7,639 blocks of 16 tokens in 8 GiB, 38,199 in 40 GiB."""
    config = published("deepseek-v3")
    layers = build(config, world_size - 1, world_size).get_kv_spec().layers
    specs = {make_kv_cache_spec(layer, 16) for layer in layers}
    assert specs == {
        MLAAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=576, head_size_v=512, dtype=DType.BFLOAT16
        )
    }
    block_bytes = sum(make_kv_cache_spec(layer, 16).page_size_bytes for layer in layers)
    assert [(gib << 30) // block_bytes for gib in (8, 40)] == [7639, 38199]


def test_the_size_of_deepseek_v3() -> None:
    """By hand from the published shapes."""
    hidden, expert = 7168, 3 * 7168 * 2048
    query = 1536 * (hidden + 1 + 128 * (128 + 64))
    key_value = (512 + 64) * hidden + 512 + 512 * 128 * (128 + 128)
    attention = query + key_value + 128 * 128 * hidden + 2 * hidden
    dense = 3 * hidden * 18432
    mixture = 256 * (expert + hidden) + expert  # the bias per expert is counted below
    total = 2 * 129280 * hidden + hidden + 61 * attention + 3 * dense + 58 * mixture
    num_bytes = sum(parameter.num_bytes for parameter in build(published("deepseek-v3")).parameters)
    assert num_bytes == 2 * total + 4 * 58 * 256


def test_routing_of_deepseek() -> None:
    def routing(config: dict[str, Any]) -> Routing:
        found: Routing = build(config).layers[-1].mlp.routing  # type: ignore[attr-defined]
        return found

    assert routing(V2) == Routing(3, "softmax")
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}
    factor = {"routed_scaling_factor": 16.0}
    assert routing(V2 | groups | factor) == Routing(
        3, "softmax", factor=16.0, num_groups=4, num_chosen_groups=3
    )
    assert routing(published("deepseek-v3")) == Routing(
        8,
        "sigmoid",
        is_normalised=True,
        factor=2.5,
        num_groups=8,
        num_chosen_groups=4,
        group_score="sum_of_two",
    )


def test_a_stretched_rope_sharpens_the_scores_of_deepseek() -> None:
    def scale(**changes: Any) -> float:
        found: float = build(V2, **changes).layers[0].attention.scoring.scale  # type: ignore[attr-defined]
        return found

    plain = (12 + 8) ** -0.5
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
    assert scale() == scale(rope_scaling=yarn) == pytest.approx(plain)
    sharper = (0.1 * 0.707 * np.log(40.0) + 1.0) ** 2
    assert scale(rope_scaling=yarn | {"mscale_all_dim": 0.707}) == pytest.approx(plain * sharper)
    shorter = yarn | {"factor": 0.5, "mscale_all_dim": 0.707}
    assert scale(rope_scaling=shorter) == pytest.approx(plain)


def test_queries_without_a_latent_row() -> None:
    names = [parameter.name for parameter in build(V2).parameters]
    assert not any("q_a" in name for name in names)
    with_row = [parameter.name for parameter in build(V2, q_lora_rank=16).parameters]
    assert {name.rpartition(".")[2] for name in set(with_row) - set(names)} == {
        "q_a_proj",
        "q_a_layernorm",
    }
    without = {k: v for k, v in V2.items() if k != "q_lora_rank"}
    row = next(p for p in build(without).parameters if p.name.endswith("q_a_proj"))
    assert row.shape == (1536, 32)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob to True"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func to 'sigmoid'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func to 'softmax'"),
        (V3, {"topk_method": "greedy"}, "topk_method to 'greedy'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq to 2"),
        (V3, {"n_group": 3}, "8 experts do not make 3 groups"),
        (V3, {"topk_group": 5}, "4 groups of which 5"),
        (V3, {"topk_group": 1}, "3 experts out of 2;"),
        (V3, {"num_experts_per_tok": 5}, "5 experts out of 4;"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA4, {"num_experts_per_tok": 5}, "5 experts out of 4;"),
        (LLAMA4, {"no_rope_layers": [1, 0]}, "no_rope_layers should be 0 or 1"),
        (LLAMA4, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers should be 0 or 1"),
        (LLAMA4, {"moe_layers": [4]}, "moe_layers should list"),
        (LLAMA4, {"moe_layers": 4}, "moe_layers should list"),
        (LLAMA4, {"layer_types": ["sliding_attention"] * 4}, "layer_types should name"),
        (
            LLAMA4,
            {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None},
            "no attention_chunk_size",
        ),
        (LLAMA4, {"attn_temperature_tuning": "on"}, "attn_temperature_tuning"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build(config, **changes)


def test_heads_that_ranks_cannot_share() -> None:
    with pytest.raises(ParallelSizeError, match="valid sizes are 1, 2, 4"):
        build(V3, 0, 3)


# --- Llama 4 ----------------------------------------------------------------------------------


def test_layers_of_llama_4_scout() -> None:
    """Three of four layers see chunks of 8,192 and rotate; the others see all."""
    model = build(published("llama-4-scout-text"), 1, 8)
    specs = [make_kv_cache_spec(layer, 16) for layer in model.get_kv_spec().layers]
    stored = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 128,
        "dtype": DType.BFLOAT16,
        "num_global_kv_heads": 8,
    }
    chunked = ChunkedLocalAttentionSpec(**stored, attention_chunk_size=8192)
    assert specs == [*(3 * [chunked]), FullAttentionSpec(**stored)] * 12
    ropes = [layer.attention.rope for layer in model.layers]  # type: ignore[attr-defined]
    assert [rope is not None for rope in ropes] == [True, True, True, False] * 12
    assert all(rope.is_interleaved for rope in ropes if rope is not None)
    assert model.temperature == PositionScale(0.1, 8192.0)  # type: ignore[attr-defined]


def test_the_size_of_llama_4_scout() -> None:
    """By hand from the published shapes."""
    hidden, expert = 5120, 3 * 5120 * 8192
    attention = 2 * hidden * hidden + 2 * hidden * 8 * 128 + 2 * hidden
    layer = attention + 16 * hidden + 17 * expert
    total = 2 * 202048 * hidden + hidden + 48 * layer
    model = build(published("llama-4-scout-text"))
    assert sum(parameter.num_bytes for parameter in model.parameters) == 2 * total


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"interleave_moe_layer_step": 2}, [1, 3]),
        ({"interleave_moe_layer_step": 3}, [2]),
        ({"moe_layers": [1, 2], "interleave_moe_layer_step": 2}, [1, 2]),
        ({"moe_layers": []}, []),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], expected: list[int]) -> None:
    names = [parameter.name for parameter in build(LLAMA4, **changes).parameters]
    assert [i for i in range(4) if f"model.layers.{i}.experts.down" in names] == expected


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, [8, 8, None, 8]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, [8, None, 8, None]),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, [None] * 3 + [8]),
        ({"attention_chunk_size": None}, [None] * 4),
    ],
)
def test_layers_with_chunks(changes: dict[str, Any], chunks: list[int | None]) -> None:
    layers = build(LLAMA4, **changes).get_kv_spec().layers
    assert [layer.chunk_size for layer in layers] == chunks


@pytest.mark.parametrize(
    ("value", "is_on"), [(True, True), (4, True), (False, False), (0, False), (None, False)]
)
def test_temperature_tuning_is_a_flag_in_two_spellings(value: Any, is_on: bool) -> None:
    model = build(LLAMA4, attn_temperature_tuning=value)
    assert (model.temperature is not None) == is_on  # type: ignore[attr-defined]


# --- both -------------------------------------------------------------------------------------


def logits(case: str, chunks: list[int], block_size: int = 4) -> np.ndarray:
    """[num_tokens, vocab_size], computed chunk by chunk over the cache."""
    runner = TinyRunner(build_loaded(MIXTURE_CASES[case], BACKEND), BACKEND, block_size)
    ids, ends = make_token_ids(case), list(itertools.accumulate(chunks))
    return np.concatenate(
        [runner.step(ids[end - n : end]) for n, end in zip(chunks, ends, strict=True)]
    )


@pytest.mark.parametrize("case", MIXTURE_CASES)
def test_ranks_compute_what_one_does(case: str) -> None:
    ids = make_token_ids(case)
    expected = logits(case, [24])

    def work(rank: TensorParallelRank, communicator: Any) -> np.ndarray:
        model = build_loaded(MIXTURE_CASES[case], BACKEND, rank)
        return TinyRunner(model, BACKEND).step(ids, communicator)

    for world_size in (2, 4):
        for found in run_ranks(world_size, work):
            assert isinstance(found, np.ndarray), found
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
