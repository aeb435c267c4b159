"""What GGUF files of each architecture say beyond what all of them do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvloom.errors import UnsupportedModelError, WeightsError

Own = Mapping[str, Any]  # metadata below the architecture's name
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape in Hugging Face order
Config = dict[str, Any]

# Kinds of metadata values.
SIZE, COUNT, NUMBER = "a positive integer", "an integer from 0 on", "a positive number"
FLAG, TEXT = "true or false", "a text"


def nothing_more(_own: Own, _shapes: Shapes, _config: Config) -> Config:
    """No field beyond the common ones."""
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one `general.architecture` become a Hugging Face config.

    Attributes:
        model_type: of the config.
        keys: known below the architecture's name besides those of all files -> the kind of each.
        fields: of these, the ones that are a config field as they are -> its name.
        complete: what takes more than a new name: from the metadata, the tensors' shapes and the
            common fields to fields that are added, or replace them.
        has_one_head_size: keys and values have the same size.
        rotates_whole_heads: what rope rotates has that size as well.
        norm_eps: the key of the epsilon of norms, and its config field.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Own, Shapes, Config], Config] = nothing_more
    has_one_head_size: bool = True
    rotates_whole_heads: bool = True
    norm_eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


def require(own: Own, key: str) -> Any:
    """The value of `key`.

    Raises:
        WeightsError: the file has none.
    """
    if key not in own:
        raise WeightsError(
            f"the GGUF metadata has no {key} below its architecture's name; convert the model "
            "again with a current converter"
        )
    return own[key]


def _complete_llama(own: Own, _shapes: Shapes, _config: Config) -> Config:
    return {"model_type": "mistral"} if own.get("attention.sliding_window") else {}


def _complete_llama4(own: Own, _shapes: Shapes, config: Config) -> Config:
    """Files do not say chunks and temperature, so these are the published models'."""
    if "attention.sliding_window" in own:
        raise UnsupportedModelError(
            "the GGUF file is a llama4 with attention.sliding_window = "
            f"{own['attention.sliding_window']}; use a file of Llama 4 itself"
        )
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": require(own, "expert_feed_forward_length"),
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": own.get("expert_count") != 128,  # Maverick alone has none
    }


def _complete_deepseek(own: Own, shapes: Shapes, config: Config) -> Config:
    is_sigmoid = own.get("expert_gating_func", 1) == 2
    num_groups = require(own, "expert_group_count")
    greedy = "group_limited_greedy" if num_groups > 1 else "greedy"
    rotated = require(own, "rope.dimension_count")
    scaling, log_multiplier = config["rope_scaling"], own.get("rope.scaling.yarn_log_multiplier")
    if scaling is not None and log_multiplier is not None:
        # The published models have both magnitudes alike.
        scaling = scaling | dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * log_multiplier)
    return {
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        "topk_method": "noaux_tc" if is_sigmoid else greedy,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in shapes,
        "q_lora_rank": own.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": require(own, "attention.key_length_mla") - rotated,
        "v_head_dim": require(own, "attention.value_length_mla"),
        "kv_lora_rank": require(own, "attention.kv_lora_rank"),
        "first_k_dense_replace": require(own, "leading_dense_block_count"),
        "n_group": num_groups,
        "topk_group": require(own, "expert_group_used_count"),
        "norm_topk_prob": own.get("expert_weights_norm", False),
        "routed_scaling_factor": own.get("expert_weights_scale", 1.0),
        "num_nextn_predict_layers": 0,
        "rope_scaling": scaling,
    }


def _complete_gemma(own: Own, _shapes: Shapes, config: Config) -> Config:
    """Files do not say how queries are scaled; only the 27B models differ from their head size."""
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[config["model_type"]]
    scalar = hidden_size // num_heads if is_27b else config["head_dim"]
    require(own, "attention.sliding_window")
    return {"query_pre_attn_scalar": scalar}


def _complete_phi3(own: Own, _shapes: Shapes, config: Config) -> Config:
    head_size = config["head_dim"]
    return {"partial_rotary_factor": own.get("rope.dimension_count", head_size) / head_size}


def _complete_cohere2(own: Own, _shapes: Shapes, _config: Config) -> Config:
    return {
        "logit_scale": require(own, "logit_scale"),
        "sliding_window": require(own, "attention.sliding_window"),
    }


def _complete_gpt_oss(own: Own, _shapes: Shapes, config: Config) -> Config:
    """Files do not say whether yarn rounds its bounds; the published models do not."""
    return {
        "sliding_window": require(own, "attention.sliding_window"),
        "intermediate_size": require(own, "expert_feed_forward_length"),
        "rope_scaling": (config["rope_scaling"] or {"rope_type": "default"}) | {"truncate": False},
    }


_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}

_EXPERTS = {"expert_count": SIZE, "expert_used_count": SIZE, "expert_feed_forward_length": SIZE}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", complete=_complete_llama),  # Mistral files say "llama"
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture(
        "gemma2",
        keys={"attn_logit_softcapping": NUMBER, "final_logit_softcapping": NUMBER},
        fields={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        complete=_complete_gemma,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        keys={
            "attention.sliding_window_pattern": SIZE,
            "final_logit_softcapping": NUMBER,
            "rope.freq_base_swa": NUMBER,
        },
        fields={
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        complete=_complete_gemma,
    ),
    "phi3": Architecture("phi3", complete=_complete_phi3, rotates_whole_heads=False),
    "smollm3": Architecture("smollm3"),
    "cohere2": Architecture(
        "cohere2",
        keys={"logit_scale": NUMBER, "attention.layer_norm_epsilon": NUMBER},
        complete=_complete_cohere2,
        norm_eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        keys=_EXPERTS,
        fields={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        complete=_complete_gpt_oss,
    ),
    "llama4": Architecture(
        "llama4_text",
        keys={**_EXPERTS, "interleave_moe_layer_step": SIZE},
        fields={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        complete=_complete_llama4,
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        keys={
            **_EXPERTS,
            "attention.q_lora_rank": SIZE,
            "attention.kv_lora_rank": SIZE,
            "attention.key_length_mla": SIZE,
            "attention.value_length_mla": SIZE,
            "expert_shared_count": SIZE,
            "expert_group_count": SIZE,
            "expert_group_used_count": SIZE,
            "expert_gating_func": SIZE,
            "expert_weights_scale": NUMBER,
            "expert_weights_norm": FLAG,
            "leading_dense_block_count": COUNT,
            "rope.scaling.yarn_log_multiplier": NUMBER,
        },
        fields={
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        complete=_complete_deepseek,
        has_one_head_size=False,
    ),
}
