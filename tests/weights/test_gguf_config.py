"""GGUF metadata as config.json fields."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from gguf_files import LLAMA_METADATA
from kvloom.errors import UnsupportedModelError, WeightsError
from kvloom.weights.gguf_config import translate_config

SHAPES = {"token_embd.weight": (100, 32)}


def translate(
    extra: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Any]:
    return translate_config(LLAMA_METADATA | (extra or {}), SHAPES | (shapes or {}), None)


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
    assert translate_config(metadata, SHAPES, None)["num_key_value_heads"] == 4


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_architectures(name: str) -> None:
    config = translate_config(of_architecture(name), SHAPES, None)
    assert config == translate() | {"model_type": name}


def test_a_windowed_llama_file_is_a_mistral() -> None:
    config = translate({"llama.attention.sliding_window": 4096})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 4096)


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
        ({"general.architecture": "gemma3"}, "'gemma3'.*llama, qwen2, qwen3"),
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
        translate_config(LLAMA_METADATA | extra, SHAPES, [1.0])


def test_missing_parts_are_named() -> None:
    metadata = {k: v for k, v in LLAMA_METADATA.items() if k != "llama.block_count"}
    with pytest.raises(WeightsError, match=r"llama\.block_count"):
        translate_config(metadata, SHAPES, None)
    with pytest.raises(WeightsError, match=r"token_embd\.weight"):
        translate_config(LLAMA_METADATA, {}, None)
