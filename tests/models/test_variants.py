"""Phi-3, SmolLM3, Cohere 2 and gpt-oss: what their configs say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import UnsupportedModelError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.layers import Rows, fuse_rows
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import Rope, Routing
from kvloom.weights.steps import take_steps
from tiny_models import BASE, tensor_shapes
from tiny_variants import VARIANT_CASES

CONFIGS = Path(__file__).parent.parent / "data" / "model_configs"
FULL, SLIDING = "full_attention", "sliding_attention"
PHI3, SMOLLM3, COHERE2, GPT_OSS = (
    VARIANT_CASES[name] for name in ("phi3_window", "smollm3", "cohere2", "gpt_oss")
)


def build(config: dict[str, Any], rank: int = 0, world_size: int = 1, **changes: Any) -> Model:
    dtypes = ModelDTypes(DType.BFLOAT16, DType.BFLOAT16)
    return build_model({**config, **changes}, TensorParallelRank(rank, world_size), dtypes)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def windows(model: Model) -> list[int | None]:
    return [layer.sliding_window_size for layer in model.get_kv_spec().layers]


def ropes(model: Model) -> list[Rope | None]:
    return [layer.attention.rope for layer in model.layers]  # type: ignore[attr-defined]


def rotates(model: Model) -> list[bool]:
    return [rope is not None for rope in ropes(model)]


# --- Phi-3 --------------------------------------------------------------------------------------


def test_all_layers_of_phi_3_have_the_window_or_none_has() -> None:
    assert windows(build(PHI3)) == [5] * 4
    assert windows(build(PHI3, sliding_window=None)) == [None] * 4
    assert windows(build(without(PHI3, "sliding_window"))) == [None] * 4


def test_rows_of_fused_modules() -> None:
    """Three modules of 8, 4 and 4 rows, one after another."""
    parts = [Rows("q", 8, 2, 6), Rows("k", 4, 1, 3), Rows("v", 4, 0, 4)]
    assert fuse_rows(parts, "qkv") == [
        Rows("qkv", 16, 2, 6),
        Rows("qkv", 16, 9, 11),
        Rows("qkv", 16, 12, 16),
    ]
    whole = [Rows("q", 8, 0, 8), Rows("k", 4, 0, 4), Rows("v", 4, 0, 4)]
    assert fuse_rows(whole, "qkv") == [Rows("qkv", 16, 0, 16)]
    last = [Rows("q", 8, 4, 8), Rows("k", 4, 0, 2), Rows("v", 4, 2, 4)]
    assert fuse_rows(last, "qkv") == [Rows("qkv", 16, 4, 10), Rows("qkv", 16, 14, 16)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_rows_of_fused_modules(world_size: int) -> None:
    """Each row is on one rank, but for a KV head that is copied: 4 query and 2 KV heads of 8."""
    counts = {name: np.zeros(shape, int) for name, shape in tensor_shapes(PHI3).items()}
    for rank in range(world_size):
        for parameter in build(PHI3, rank, world_size).parameters:
            for source in parameter.sources:
                kept = take_steps(counts[source.name], source.steps)  # a view
                kept += 1
    qkv = counts["model.layers.3.self_attn.qkv_proj.weight"]
    copies = max(world_size // 2, 1)
    assert (qkv == np.repeat([1, copies], 32)[:, None]).all()
    assert (counts["model.layers.3.mlp.gate_up_proj.weight"] == 1).all()


def test_the_rotated_part_of_a_head() -> None:
    [rope] = set(ropes(build(PHI3, partial_rotary_factor=0.5)))
    assert rope is not None
    assert rope.inv_freq == pytest.approx((1.0, 0.01))  # 4 of 8 values, theta 10,000
    settings = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    by_settings = build(PHI3, rope_parameters=settings, partial_rotary_factor=0.75)
    assert set(ropes(by_settings)) == {rope}
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor should be at most 1"):
        build(PHI3, partial_rotary_factor=1.5)


def test_short_requests_alone_take_the_short_factors() -> None:
    config = VARIANT_CASES["phi3_long"]  # 16 of 64 tokens
    dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)

    def frequencies(*longest: Any) -> tuple[float, ...]:
        rope = ropes(build_model(config, TensorParallelRank(), dtypes, *longest))[0]
        assert rope is not None
        return rope.inv_freq

    plain = [100.0 ** (-2 * i / 8) for i in range(4)]
    divided = {
        kind: pytest.approx(
            [f / d for f, d in zip(plain, config["rope_scaling"][f"{kind}_factor"], strict=True)]
        )
        for kind in ("short", "long")
    }
    assert frequencies(16) == divided["short"]
    assert frequencies() == frequencies("auto") == frequencies(17) == divided["long"]


def test_the_original_length_of_phi_3_is_4096() -> None:
    config = without(VARIANT_CASES["phi3_long"], "original_max_position_embeddings")
    short, long = (
        ropes(build(config, max_position_embeddings=length))[0] for length in (4096, 4097)
    )
    assert short is not None
    assert long is not None
    assert short.inv_freq[-1] > long.inv_freq[-1]


# --- SmolLM3 ------------------------------------------------------------------------------------


def test_every_fourth_layer_of_smollm3_has_no_positions() -> None:
    assert rotates(build(SMOLLM3)) == [True, True, True, False]
    assert rotates(build(SMOLLM3, no_rope_layer_interval=3)) == [True, True, False, True]
    assert rotates(build(SMOLLM3, no_rope_layers=[0, 1, 1, 1])) == [False, True, True, True]


def test_windows_of_smollm3_are_those_layers() -> None:
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert windows(build(SMOLLM3)) == windows(build(SMOLLM3, sliding_window=5)) == [None] * 4
    assert windows(build(SMOLLM3, use_sliding_window=True)) == [None] * 4
    assert windows(build(SMOLLM3, **on)) == [None, None, None, 5]
    types = [SLIDING, FULL, SLIDING, FULL]
    assert windows(build(SMOLLM3, **on, layer_types=types)) == [5, None, 5, None]


def test_defaults_of_smollm3() -> None:
    """Of its class in transformers: 4 KV heads, base 2,000,000, a tied head."""
    names = ("num_key_value_heads", "rope_theta", "tie_word_embeddings")
    model = build(without(SMOLLM3, *names), num_attention_heads=8)
    assert {layer.num_kv_heads for layer in model.get_kv_spec().layers} == {4}
    rope = ropes(model)[0]
    assert rope is not None
    assert rope.inv_freq == pytest.approx((1.0, 2000000.0**-0.5))
    assert "lm_head.weight" in model.ignored_tensors


# --- Cohere 2 -----------------------------------------------------------------------------------


def test_full_layers_of_cohere_2_have_no_positions() -> None:
    model = build(COHERE2)
    assert windows(model) == [7, 7, 7, None]
    assert rotates(model) == [True, True, True, False]
    assert all(rope.is_interleaved for rope in ropes(model) if rope is not None)
    types = [FULL, SLIDING, FULL, SLIDING]
    other = build(COHERE2, layer_types=types)
    assert (windows(other), rotates(other)) == ([None, 7] * 2, [False, True] * 2)
    assert windows(build(without(COHERE2, "sliding_window")))[0] == 4096
    unbounded = build(COHERE2, sliding_window=None)
    assert (windows(unbounded), rotates(unbounded)) == ([None] * 4, [False] * 4)


def test_defaults_of_cohere_2() -> None:
    model = build(without(COHERE2, "logit_scale", "layer_norm_eps", "tie_word_embeddings"))
    assert "lm_head.weight" in model.ignored_tensors
    assert model.logit_scale == 0.0625  # type: ignore[attr-defined]
    assert model.config.norm_eps == 1e-5  # type: ignore[attr-defined]


# --- gpt-oss ------------------------------------------------------------------------------------


def test_layers_of_gpt_oss_20b() -> None:
    model = build(json.loads((CONFIGS / "gpt-oss-20b.json").read_text()))
    layers = model.get_kv_spec().layers
    assert {(layer.num_kv_heads, layer.head_size) for layer in layers} == {(8, 64)}
    assert windows(model) == [128, None] * 12
    assert model.routing == Routing(4, "softmax_of_chosen")  # type: ignore[attr-defined]
    assert model.max_model_len == 131072


def test_the_size_of_gpt_oss_20b() -> None:
    """By hand from the published shapes, biases and sinks included."""
    hidden, inner, num_experts = 2880, 2880, 32
    query, key_value = (hidden + 1) * 64 * 64, 2 * (hidden + 1) * 8 * 64
    attention = query + key_value + (64 * 64 + 1) * hidden + 64
    experts = num_experts * (2 * (hidden + 1) * inner + (inner + 1) * hidden)
    layer = attention + num_experts * (hidden + 1) + experts + 2 * hidden
    total = 2 * 201088 * hidden + hidden + 24 * layer
    assert total == 20_914_757_184  # as published
    model = build(json.loads((CONFIGS / "gpt-oss-20b.json").read_text()))
    assert sum(parameter.num_bytes for parameter in model.parameters) == 2 * total


def test_defaults_of_gpt_oss() -> None:
    """Of its class in transformers, for a config that says sizes alone."""
    sizes = without(BASE, "rms_norm_eps", "rope_theta", "num_key_value_heads")
    sizes |= {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_attention_heads": 8}
    model = build(sizes)
    assert windows(model) == [128, None, 128, None]
    assert {(x.num_kv_heads, x.head_size) for x in model.get_kv_spec().layers} == {(8, 64)}
    assert model.config.norm_eps == 1e-5  # type: ignore[attr-defined]
    settings = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    spelled = build(GPT_OSS, head_dim=64, rope_scaling=settings, rope_theta=None)
    assert set(ropes(model)) == set(ropes(spelled))
    shapes = tensor_shapes(sizes)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj_bias"] == (128, 80)
    assert "model.layers.0.self_attn.o_proj.bias" in shapes


@pytest.mark.parametrize("world_size", [2, 4])
def test_sinks_of_a_rank_are_those_of_its_heads(world_size: int) -> None:
    num_heads = 4 // world_size
    for rank in range(world_size):
        parameters = {p.name: p for p in build(GPT_OSS, rank, world_size).parameters}
        [source] = parameters["model.layers.1.self_attn.sinks"].sources
        kept = take_steps(np.arange(4), source.steps)
        assert list(kept) == list(range(rank * num_heads, (rank + 1) * num_heads))


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dynamic rope": (PHI3, {"rope_scaling": {"type": "dynamic"}}, "rope kind 'dynamic'"),
    "too few factors": (
        VARIANT_CASES["phi3_long"],
        {"partial_rotary_factor": 0.5},
        "2 rope frequencies, but 4 factors",
    ),
    "part of a head": (PHI3, {"partial_rotary_factor": "x"}, "partial_rotary_factor should be"),
    "no-rope flags": (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers should be 0 or 1"),
    "part of smollm3": (SMOLLM3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "chunks": (COHERE2, {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    "logit scale": (COHERE2, {"logit_scale": "x"}, "logit_scale should be a finite number"),
    "mxfp4": (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4.*GGUF file"),
    "limit": (GPT_OSS, {"swiglu_limit": 6.0}, "swiglu_limit should be 7.0"),
    "alpha": (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha should be 1.702"),
    "too many chosen": (GPT_OSS, {"num_experts_per_tok": 6}, "6 experts out of 5"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_changes_the_computation_is_refused(kind: str) -> None:
    config, changes, message = REFUSALS[kind]
    build(config)  # the twin that works
    with pytest.raises(UnsupportedModelError, match=message):
        build(config, **changes)
