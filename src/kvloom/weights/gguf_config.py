"""From a GGUF file's metadata to the fields of a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvloom.errors import UnsupportedModelError, WeightsError

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape in Hugging Face order

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say "llama"

# Metadata key below the architecture's name -> config field. Every one of them is required.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys below these prefixes change the mathematics, so an unknown one is refused, never ignored.
_GUARDED = ("attention.", "rope.", "expert_")
_SIZE, _COUNT, _NUMBER = "a positive integer", "an integer from 0 on", "a positive number"
_FLAG, _TEXT = "true or false", "a text"
# Those below the architecture's name that are known, and what each has to be.
_KNOWN = {
    **dict.fromkeys(_FIELDS, _SIZE),
    "attention.layer_norm_rms_epsilon": _NUMBER,
    "attention.head_count_kv": _SIZE,
    "attention.key_length": _SIZE,
    "attention.value_length": _SIZE,
    "attention.causal": _FLAG,
    "attention.sliding_window": _COUNT,
    "rope.dimension_count": _SIZE,
    "rope.freq_base": _NUMBER,
    "rope.scale_linear": _NUMBER,
    "rope.scaling.type": _TEXT,
    "rope.scaling.factor": _NUMBER,
    "rope.scaling.attn_factor": _NUMBER,
    "rope.scaling.original_context_length": _SIZE,
    "rope.scaling.finetuned": _FLAG,
    "rope.scaling.yarn_beta_fast": _NUMBER,
    "rope.scaling.yarn_beta_slow": _NUMBER,
    "expert_count": _COUNT,
    "expert_used_count": _COUNT,
}
# Ends of a sequence, of a turn and of a message.
EOS_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_TOKEN_KEYS = ("tokenizer.ggml.bos_token_id", *EOS_KEYS)


def translate_config(
    metadata: Metadata, shapes: Shapes, rope_factors: list[float] | None
) -> dict[str, Any]:
    """The config.json fields of a GGUF file.

    Args:
        metadata: the file's key/value pairs.
        shapes: of the file's tensors: they tell vocabulary size, biases and whether the head is
            tied to the embedding.
        rope_factors: the tensor rope_freqs.weight, divisors of the rotary frequencies.

    Raises:
        UnsupportedModelError: an architecture, or a key that changes the mathematics, which we do
            not run; named.
        WeightsError: a required key or tensor is missing; named.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; "
            f"those that are: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    _refuse_per_layer(architecture, own)
    kinds = {f"{prefix}{key}": kind for key, kind in _KNOWN.items()}
    _check_kinds(metadata, kinds | dict.fromkeys(_TOKEN_KEYS, _COUNT))
    _refuse_unknown(architecture, own)
    if "token_embd.weight" not in shapes:
        raise WeightsError("the GGUF file has no tensor token_embd.weight; fetch it again")
    config: dict[str, Any] = {"model_type": architecture, "hidden_act": "silu"}
    for key, field in _FIELDS.items():
        config[field] = _required(own, architecture, key)
    config["num_key_value_heads"] = own.get(
        "attention.head_count_kv", config["num_attention_heads"]
    )
    config["head_dim"] = _head_size(architecture, own, config)
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    config["rope_theta"] = own.get("rope.freq_base", 10000.0)
    config["rope_scaling"] = scaling = _rope_scaling(own)
    if rope_factors is not None:
        if scaling is not None:
            raise UnsupportedModelError(
                f"the GGUF file has both rope_freqs.weight and {prefix}rope.scaling.type = "
                f"{scaling['rope_type']!r}; use a file with one of them"
            )
        config["gguf.rope_factors"] = rope_factors  # no field of a config.json
    if own.get("attention.sliding_window"):
        config["model_type"] = "mistral" if architecture == "llama" else architecture
        config["sliding_window"] = own["attention.sliding_window"]
        config["use_sliding_window"] = True
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return config


def _required(own: Mapping[str, Any], architecture: str, key: str) -> Any:
    if key not in own:
        raise WeightsError(
            f"the GGUF metadata has no {architecture}.{key}; the file was not converted whole"
        )
    return own[key]


def _refuse_unknown(architecture: str, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        if key.startswith(_GUARDED) and key not in _KNOWN:
            raise UnsupportedModelError(
                f"GGUF metadata {architecture}.{key} = {value!r} is not supported; "
                "use a plain model of this architecture"
            )
    if own.get("expert_count"):
        raise UnsupportedModelError(
            f"the GGUF file has {own['expert_count']} experts per layer; mixture-of-experts models "
            "are not supported, use a dense one"
        )
    if own.get("attention.causal") is False:
        raise UnsupportedModelError("the GGUF file is an encoder; use a model that generates text")


def _refuse_per_layer(architecture: str, own: Mapping[str, Any]) -> None:
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(own.get(key), list):
            raise UnsupportedModelError(
                f"GGUF metadata {architecture}.{key} has one value per layer, which is not "
                "supported; use a model whose layers are alike"
            )


def _check_kinds(metadata: Metadata, kinds: Mapping[str, str]) -> None:
    for key, kind in kinds.items():
        if key in metadata and not _is_of_kind(metadata[key], kind):
            raise UnsupportedModelError(
                f"GGUF metadata {key} = {metadata[key]!r:.80} should be {kind}; "
                "convert the model again"
            )


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind == _FLAG:
        return isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == _NUMBER:
        return 0 < value < math.inf
    return isinstance(value, int) and value >= (1 if kind == _SIZE else 0)


def _head_size(architecture: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    head_size = own.get(
        "attention.key_length", config["hidden_size"] // config["num_attention_heads"]
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_size) != head_size:
            raise UnsupportedModelError(
                f"GGUF metadata {architecture}.{key} = {own[key]} differs from the head size "
                f"{head_size}; such models are not supported"
            )
    return int(head_size)


def _rope_scaling(own: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind == "none" and "rope.scale_linear" in own:
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if "rope.scaling.original_context_length" in own:
        scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in own:
            scaling[name] = own[f"rope.scaling.yarn_{name}"]
    if "rope.scaling.attn_factor" in own:
        # GGUF's multiplies YaRN's own factor, Hugging Face's replaces it.
        own_factor = 0.1 * math.log(factor) + 1.0
        scaling["attention_factor"] = own["rope.scaling.attn_factor"] * own_factor
    return scaling
