"""Tiny configs of the families with experts: Llama 4, DeepSeek V2 and V3."""

from __future__ import annotations

from typing import Any

from tiny_models import BASE

# Chunks of 8 and floors of 4: the 24 tokens of a prompt cross both several times.
_LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    **BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "attention_chunk_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [1, 1, 0, 1],
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
_EQUAL_BOUNDS = {  # as Llama 4 Scout has them
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
_DEEPSEEK: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}


def _deepseek_v2(**changes: Any) -> dict[str, Any]:
    family = {"model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2}
    return {**_DEEPSEEK, **family, **changes}


def _deepseek_v3(**changes: Any) -> dict[str, Any]:
    family = {
        "model_type": "deepseek_v3",
        "q_lora_rank": 28,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
    }
    return {**_DEEPSEEK, **family, **changes}


MIXTURE_CASES: dict[str, dict[str, Any]] = {
    "llama4": _LLAMA4,
    "llama4_dense_between": _LLAMA4
    | {
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 2,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_theta": 500.0,
        "rope_scaling": _EQUAL_BOUNDS,
    },
    "llama4_biases_tied": _LLAMA4
    | {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 2,
        "moe_layers": [0, 3],
    },
    "deepseek_v2_lite": _deepseek_v2(),
    "deepseek_v2_groups_yarn": _deepseek_v2(
        q_lora_rank=28,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
        attention_bias=True,
        rope_theta=100.0,
        rope_scaling={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v3": _deepseek_v3(),
    "deepseek_v3_yarn": _deepseek_v3(
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_theta=100.0,
        rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3_rotated_halves": _deepseek_v3(
        rope_interleave=False,
        attention_bias=True,
        rope_theta=100.0,
        rope_scaling={**_YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
    ),
}
