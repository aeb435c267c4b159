"""Layer specs straight from a config.json: a second implementation of models' `get_kv_spec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvloom.dtypes import DType
from kvloom.kv.spec import LayerSpec

WINDOW, CHUNKS = "sliding_attention", "chunked_attention"


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    num_layers = config["num_hidden_layers"]
    if "layer_types" in config:
        return config["layer_types"]
    if config["model_type"] == "gemma2":
        return [WINDOW if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    if "sliding_window_pattern" in config:
        every = config["sliding_window_pattern"]
        return ["full_attention" if i % every == every - 1 else WINDOW for i in range(num_layers)]
    return [WINDOW if config["model_type"] == "mistral" else "full_attention"] * num_layers


def layer_specs(config: Mapping[str, Any], num_ranks: int = 1) -> list[LayerSpec]:
    """The attention layers of one rank, bfloat16."""
    kinds = layer_kinds(config)
    num_storing = len(kinds) - config.get("num_kv_shared_layers", 0)
    return [
        LayerSpec(
            name=f"layers.{i}.self_attn",
            **heads(config, num_ranks),
            sliding_window_size=config["sliding_window"] if kind == WINDOW else None,
            chunk_size=config["attention_chunk_size"] if kind == CHUNKS else None,
            shares_kv_with=None
            if i < num_storing
            else f"layers.{max(j for j in range(num_storing) if kinds[j] == kind)}.self_attn",
        )
        for i, kind in enumerate(kinds)
    ]


def heads(config: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    if "kv_lora_rank" in config:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        return {
            "num_kv_heads": 1,
            "head_size": rank + rope,
            "head_size_v": rank,
            "dtype": DType.BFLOAT16,
            "is_latent": True,
        }
    num_global = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "num_kv_heads": max(num_global // num_ranks, 1),
        "head_size": size,
        "dtype": DType.BFLOAT16,
        "num_global_kv_heads": num_global,
    }
