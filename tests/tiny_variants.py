"""Tiny configs of Phi-3, SmolLM3, Cohere 2 and gpt-oss."""

from __future__ import annotations

from typing import Any

from tiny_models import BASE

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Windows of 5 or 7 tokens, which prompts of 24 outgrow several times.
_COMMON: dict[str, Any] = {**BASE, "num_hidden_layers": 4, "pad_token_id": 0}


def _phi3(**changes: Any) -> dict[str, Any]:
    return {"model_type": "phi3", **_COMMON, "sliding_window": None, **changes}


def _smollm3(**changes: Any) -> dict[str, Any]:
    return {"model_type": "smollm3", **_COMMON, **changes}


def _cohere2(**changes: Any) -> dict[str, Any]:
    norm = {"layer_norm_eps": 1e-5, "logit_scale": 0.8, "tie_word_embeddings": True}
    return {"model_type": "cohere2", **_COMMON, **norm, "sliding_window": 7, **changes}


def _gpt_oss(**changes: Any) -> dict[str, Any]:
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
    family = {"model_type": "gpt_oss", "head_dim": 16, "sliding_window": 5}
    return {**_COMMON, **family, **experts, **changes}


def _longrope(num_pairs: int, **changes: Any) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.2 * i for i in range(num_pairs)],
        "long_factor": [1.5 + 0.9 * i for i in range(num_pairs)],
        **changes,
    }


VARIANT_CASES: dict[str, dict[str, Any]] = {
    "phi3_window": _phi3(sliding_window=5),
    "phi3_long": _phi3(
        original_max_position_embeddings=16, rope_scaling=_longrope(4), rope_theta=100.0
    ),
    "phi3_long_by_its_old_name": _phi3(
        num_key_value_heads=4,
        original_max_position_embeddings=16,
        rope_scaling=_longrope(
            4, type="su", attention_factor=1.4, original_max_position_embeddings=16
        ),
    ),
    "phi3_short": _phi3(
        max_position_embeddings=32,
        original_max_position_embeddings=32,
        rope_scaling=_longrope(4, factor=4.0),
        rope_theta=100.0,
    ),
    "phi3_part_of_the_head_tied": _phi3(
        partial_rotary_factor=0.75,
        num_key_value_heads=1,
        sliding_window=7,
        original_max_position_embeddings=16,
        rope_scaling=_longrope(3),
        tie_word_embeddings=True,
    ),
    "smollm3": _smollm3(tie_word_embeddings=True),
    "smollm3_windows_biases": _smollm3(
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=100.0,
    ),
    "smollm3_lists": _smollm3(
        no_rope_layers=[0, 1, 1, 0],
        layer_types=[_SLIDING, _SLIDING, _FULL, _FULL],
        use_sliding_window=True,
        sliding_window=7,
    ),
    "cohere2": _cohere2(),
    "cohere2_pattern_biases": _cohere2(
        sliding_window_pattern=2, attention_bias=True, num_key_value_heads=4, rope_theta=100.0
    ),
    "cohere2_types_untied": _cohere2(
        layer_types=[_FULL, _SLIDING, _SLIDING, _FULL], tie_word_embeddings=False
    ),
    "gpt_oss": _gpt_oss(
        rope_theta=100.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    ),
    # Small experts, whose larger weights reach the bounds of the activation.
    "gpt_oss_clamped": _gpt_oss(
        intermediate_size=4, num_key_value_heads=1, layer_types=[_FULL, _FULL, _SLIDING, _SLIDING]
    ),
    "gpt_oss_no_biases_tied": _gpt_oss(
        attention_bias=False, tie_word_embeddings=True, num_experts_per_tok=1
    ),
}
