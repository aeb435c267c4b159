"""Tiny random models whose layers differ: windows, chunks, shared KV, heads and ropes by layer.

Prompts have tiny_models.NUM_TOKENS tokens: windows and chunks are shorter, and no multiple of the
block sizes that tests use.
"""

from __future__ import annotations

from typing import Any

from tiny_models import BASE

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _mistral(**changes: Any) -> dict[str, Any]:
    return {"model_type": "mistral", **BASE, "sliding_window": 7, **changes}


def _gemma(model_type: str, **changes: Any) -> dict[str, Any]:
    config = {
        **BASE,
        "model_type": model_type,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "head_dim": 16,
        "sliding_window": 7,
        **changes,
    }
    del config["hidden_act"]
    return config


def _gemma2(**changes: Any) -> dict[str, Any]:
    soft_caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return _gemma(
        "gemma2", num_hidden_layers=4, query_pre_attn_scalar=20, **{**soft_caps, **changes}
    )


def _gemma3(**changes: Any) -> dict[str, Any]:
    own = {"num_hidden_layers": 4, "rope_theta": 500.0, "rope_local_base_freq": 20.0}
    return _gemma("gemma3_text", query_pre_attn_scalar=20, **{**own, **changes})


_LOCAL_AND_GLOBAL = {
    _FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 20.0},
}


def _gemma3n(**changes: Any) -> dict[str, Any]:
    own = {
        "num_hidden_layers": 6,
        "layer_types": [_SLIDING, _FULL] * 3,
        "num_kv_shared_layers": 2,
        "intermediate_size": [40, 40, 24, 40, 56, 40],
        "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.0, 0.9],
        "vocab_size_per_layer_input": BASE["vocab_size"],
        "hidden_size_per_layer_input": 12,
        "laurel_rank": 6,
        "final_logit_softcapping": 5.0,
        "rope_parameters": _LOCAL_AND_GLOBAL,
    }
    return _gemma("gemma3n_text", **{**own, **changes})


def _gemma4(**changes: Any) -> dict[str, Any]:
    own = {
        "num_hidden_layers": 6,
        "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": BASE["vocab_size"],
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 500.0,
            },
            _SLIDING: {"rope_type": "default", "rope_theta": 20.0},
        },
    }
    return _gemma("gemma4_text", **{**own, **changes})


HYBRID_CASES: dict[str, dict[str, Any]] = {
    "mistral_window": _mistral(num_hidden_layers=3),
    "mistral_window_never_reached": _mistral(sliding_window=64),
    "mistral_window_of_one": _mistral(sliding_window=1),
    "gemma2": _gemma2(),
    "gemma2_uncapped": _gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma2_layer_types": _gemma2(layer_types=[_FULL, _SLIDING, _SLIDING, _FULL]),
    "gemma3_pattern": _gemma3(sliding_window_pattern=3),
    "gemma3_mqa_capped": _gemma3(
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING],
        num_key_value_heads=1,
        final_logit_softcapping=5.0,
    ),
    "gemma3_linear": _gemma3(
        layer_types=[_SLIDING, _FULL] * 2, rope_scaling={"rope_type": "linear", "factor": 3.0}
    ),
    "gemma3_ropes": _gemma3(layer_types=[_SLIDING, _FULL] * 2, rope_parameters=_LOCAL_AND_GLOBAL),
    "gemma3n": _gemma3n(),
    "gemma3n_unshared": _gemma3n(
        num_kv_shared_layers=0, altup_active_idx=1, altup_num_inputs=3, altup_correct_scale=False
    ),
    "gemma4": _gemma4(),
    "gemma4_shared": _gemma4(
        num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=12
    ),
    "gemma4_keys_as_values": _gemma4(
        attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=5.0
    ),
    "gemma4_experts": _gemma4(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=24
    ),
}
