"""GGUF metadata as config.json fields."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from gguf_files import LLAMA_METADATA
from kvloom.dtypes import DType
from kvloom.errors import UnsupportedModelError, WeightsError
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.weights.gguf_config import translate_config

SHAPES = {"token_embd.weight": (100, 32)}


def translate(
    extra: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Any]:
    return translate_config(LLAMA_METADATA | (extra or {}), SHAPES | (shapes or {}), {})


def of_architecture(name: str) -> dict[str, Any]:
    """The same metadata under another architecture's prefix."""
    return {
        key.replace("llama.", f"{name}."): name if value == "llama" else value
        for key, value in LLAMA_METADATA.items()
    }


def test_a_plain_llama() -> None:
    assert translate() == {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "head_dim": 8,
        "vocab_size": 100,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def test_what_the_tensors_tell() -> None:
    config = translate(
        shapes={
            "output.weight": (100, 32),
            "blk.0.attn_q.bias": (32,),
            "blk.0.ffn_up.bias": (64,),
        }
    )
    assert not config["tie_word_embeddings"]
    assert config["attention_bias"]
    assert config["mlp_bias"]


def test_optional_keys() -> None:
    config = translate(
        {
            "llama.rope.freq_base": 5e5,
            "llama.attention.key_length": 16,
            "llama.attention.value_length": 16,
            "llama.rope.dimension_count": 16,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    assert (config["rope_theta"], config["head_dim"]) == (5e5, 16)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_kv_heads_default_to_the_query_heads() -> None:
    metadata = {k: v for k, v in LLAMA_METADATA.items() if not k.endswith("head_count_kv")}
    assert translate_config(metadata, SHAPES, {})["num_key_value_heads"] == 4


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_architectures(name: str) -> None:
    config = translate_config(of_architecture(name), SHAPES, {})
    assert config == translate() | {"model_type": name}


def test_a_windowed_llama_file_is_a_mistral() -> None:
    config = translate({"llama.attention.sliding_window": 4096})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 4096)


GEMMA_SIZES = {"attention.sliding_window": 7, "attention.key_length": 16}


def of_gemma(name: str, **extra: Any) -> dict[str, Any]:
    own = {
        f"{name}.{key.replace('__', '.')}": value for key, value in (GEMMA_SIZES | extra).items()
    }
    config = translate_config(of_architecture(name) | own, SHAPES, {})
    build_model(config, TensorParallelRank(), ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    return config


def test_gemma_2() -> None:
    """Queries are scaled by the head size, and in 27B models by hidden size / heads (32 / 4)."""
    config = of_gemma("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0)
    assert config["model_type"] == "gemma2"
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (7, 16)
    caps = (config["attn_logit_softcapping"], config["final_logit_softcapping"])
    assert caps == (20.0, 10.0)
    assert of_gemma("gemma2", block_count=46)["query_pre_attn_scalar"] == 8


def test_gemma_3() -> None:
    plain = of_gemma("gemma3")
    assert plain["model_type"] == "gemma3_text"
    assert not plain.keys() & {"sliding_window_pattern", "rope_local_base_freq"}
    assert of_gemma("gemma3", block_count=62)["query_pre_attn_scalar"] == 8
    config = of_gemma(
        "gemma3",
        attention__sliding_window_pattern=3,
        rope__freq_base=1e5,
        rope__freq_base_swa=2e4,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    assert config["sliding_window_pattern"] == 3
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e5, 2e4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_gemma_file_says_its_window(name: str) -> None:
    with pytest.raises(WeightsError, match=r"no attention\.sliding_window"):
        translate_config(of_architecture(name), SHAPES, {})


def test_smollm3() -> None:
    config = translate_config(of_architecture("smollm3"), SHAPES, {})
    assert config == translate() | {"model_type": "smollm3"}


PHI3 = of_architecture("phi3") | {
    "phi3.attention.sliding_window": 0,
    "phi3.rope.dimension_count": 6,
    "phi3.rope.scaling.original_context_length": 16,
}
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def test_phi_3() -> None:
    """Six of a head's eight values turn; window 0 is none."""
    plain = translate_config(PHI3, SHAPES, {})
    assert plain == translate() | {"model_type": "phi3", "partial_rotary_factor": 0.75}
    windowed = translate_config(PHI3 | {"phi3.attention.sliding_window": 5}, SHAPES, {})
    assert windowed["sliding_window"] == 5
    factors = {LONG: [4.0, 5.0, 6.0], SHORT: [1.0, 2.0, 3.0]}
    metadata = PHI3 | {"phi3.rope.scaling.attn_factor": 1.25}
    config = translate_config(metadata, SHAPES, factors)
    assert config == plain | {
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "rope_type": "longrope",
            "long_factor": [4.0, 5.0, 6.0],
            "short_factor": [1.0, 2.0, 3.0],
            "attention_factor": 1.25,  # GGUF's is the whole factor here
        },
    }
    named = metadata | {"phi3.rope.scaling.type": "longrope"}
    assert translate_config(named, SHAPES, factors) == config


@pytest.mark.parametrize("name", [LONG, SHORT])
def test_factors_for_one_length_alone_are_refused(name: str) -> None:
    with pytest.raises(WeightsError, match=r"both rope_factors_long.* and rope_factors_short"):
        translate_config(PHI3, SHAPES, {name: [1.0, 2.0, 3.0]})


def test_long_contexts_have_an_original_length() -> None:
    metadata = {k: v for k, v in PHI3.items() if not k.endswith("original_context_length")}
    with pytest.raises(WeightsError, match=r"phi3\.rope\.scaling\.original_context_length"):
        translate_config(metadata, SHAPES, {LONG: [1.0] * 3, SHORT: [1.0] * 3})


COHERE2 = {
    **{k: v for k, v in of_architecture("cohere2").items() if "rms" not in k},
    "cohere2.attention.layer_norm_epsilon": 1e-4,
    "cohere2.attention.sliding_window": 7,
    "cohere2.logit_scale": 0.25,
    "cohere2.rope.scaling.type": "none",
}


def test_cohere_2() -> None:
    config = translate_config(COHERE2, SHAPES, {})
    expected = translate() | {
        "model_type": "cohere2",
        "layer_norm_eps": 1e-4,
        "sliding_window": 7,
        "use_sliding_window": True,
        "logit_scale": 0.25,
    }
    del expected["rms_norm_eps"]
    assert config == expected


GPT_OSS = of_architecture("gpt-oss") | {
    "gpt-oss.attention.sliding_window": 5,
    "gpt-oss.expert_count": 4,
    "gpt-oss.expert_used_count": 2,
    "gpt-oss.expert_feed_forward_length": 24,
    "gpt-oss.rope.scaling.type": "yarn",
    "gpt-oss.rope.scaling.factor": 32.0,
    "gpt-oss.rope.scaling.original_context_length": 16,
}


def test_gpt_oss() -> None:
    """Its files do not say that the bounds of yarn are not rounded."""
    config = translate_config(GPT_OSS, SHAPES, {})
    assert config == translate() | {
        "model_type": "gpt_oss",
        "sliding_window": 5,
        "use_sliding_window": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    }
    unscaled = translate_config(GPT_OSS | {"gpt-oss.rope.scaling.type": "none"}, SHAPES, {})
    assert unscaled["rope_scaling"]["rope_type"] == "default"  # not that of a bare config.json


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        (COHERE2, "logit_scale"),
        (COHERE2, "attention.sliding_window"),
        (COHERE2, "attention.layer_norm_epsilon"),
        (GPT_OSS, "attention.sliding_window"),
        (GPT_OSS, "expert_feed_forward_length"),
    ],
)
def test_what_an_architecture_needs_is_named(metadata: dict[str, Any], key: str) -> None:
    without = {k: v for k, v in metadata.items() if not k.endswith(key)}
    with pytest.raises(WeightsError, match=re.escape(key)):
        translate_config(without, SHAPES, {})


LLAMA4 = of_architecture("llama4") | {
    "llama4.expert_count": 16,
    "llama4.expert_used_count": 1,
    "llama4.expert_feed_forward_length": 24,
    "llama4.interleave_moe_layer_step": 2,
}


def test_llama_4() -> None:
    """What its files do not say is as in llama.cpp: chunks of 8,192, every fourth layer full."""
    config = translate_config(LLAMA4, SHAPES, {"rope_freqs.weight": [2.0]})
    assert config == translate() | {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 64,
        "intermediate_size": 24,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": True,
        "gguf.rope_factors": [2.0],
    }
    maverick = translate_config(LLAMA4 | {"llama4.expert_count": 128}, SHAPES, {})
    assert not maverick["use_qk_norm"]


def test_other_models_under_llama_4s_name_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"attention\.sliding_window = 0"):
        translate_config(LLAMA4 | {"llama4.attention.sliding_window": 0}, SHAPES, {})


@pytest.mark.parametrize(
    "key", ["attention.key_length_mla", "expert_group_count", "leading_dense_block_count"]
)
def test_deepseek_files_of_old_converters_are_refused(key: str) -> None:
    metadata = of_architecture("deepseek2") | {
        f"deepseek2.{name}": 8
        for name in (
            "attention.kv_lora_rank",
            "attention.key_length_mla",
            "attention.value_length_mla",
            "expert_group_count",
            "expert_group_used_count",
            "leading_dense_block_count",
            "rope.dimension_count",
        )
    }
    translate_config(metadata, SHAPES, {})
    del metadata[f"deepseek2.{key}"]
    with pytest.raises(WeightsError, match=f"no {re.escape(key)} .* current converter"):
        translate_config(metadata, SHAPES, {})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 1.0}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (
            {"type": "yarn", "factor": 4.0, "attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0)),
            },
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    config = translate({f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert config["rope_scaling"] == expected


def test_the_older_key_of_linear_scaling() -> None:
    config = translate({"llama.rope.scale_linear": 2.0})
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba'.*llama, qwen2, qwen3"),
        ({"llama.attention.logit_softcapping": 30.0}, r"llama\.attention\.logit_softcapping"),
        ({"llama.rope.dimension_sections": [1, 2]}, r"llama\.rope\.dimension_sections"),
        ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count = 4"),
        ({"llama.attention.value_length": 16}, r"llama\.attention\.value_length = 16"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.attention.causal": False}, "encoder"),
        ({"llama.attention.head_count": [4, 8]}, r"attention\.head_count has one value per layer"),
    ],
)
def test_what_changes_the_mathematics_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        translate(extra)


SIZES = ["block_count", "context_length", "embedding_length", "feed_forward_length"]
SIZES += ["attention.head_count", "attention.head_count_kv", "attention.key_length"]
SIZES += ["attention.value_length", "rope.dimension_count"]
NUMBERS = ["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scale_linear"]
NUMBERS += [f"rope.scaling.{name}" for name in ("factor", "attn_factor", "yarn_beta_fast")]
NO_NUMBERS = [[1], "1", None, True, -1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in SIZES for value in [*NO_NUMBERS, 0, 1.5]),
        *((key, value) for key in NUMBERS for value in [*NO_NUMBERS, 0.0, math.inf, math.nan]),
        *(("attention.sliding_window", value) for value in [*NO_NUMBERS, 1.5]),
        *(("expert_count", value) for value in NO_NUMBERS),
        *(("attention.causal", value) for value in ["false", 0, None, [False]]),
        *(("rope.scaling.type", value) for value in [1, None, ["linear"]]),
    ],
)
def test_values_of_another_kind_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{re.escape(key)} "):
        translate({f"llama.{key}": value})


def test_two_scalings_at_once_are_refused() -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        translate_config(LLAMA_METADATA | extra, SHAPES, {"rope_freqs.weight": [1.0]})


def test_missing_parts_are_named() -> None:
    metadata = {k: v for k, v in LLAMA_METADATA.items() if k != "llama.block_count"}
    with pytest.raises(WeightsError, match=r"llama\.block_count"):
        translate_config(metadata, SHAPES, {})
    with pytest.raises(WeightsError, match=r"token_embd\.weight"):
        translate_config(LLAMA_METADATA, {}, {})
