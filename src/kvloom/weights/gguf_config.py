"""From a GGUF file's metadata to the fields of a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvloom.errors import UnsupportedModelError, WeightsError
from kvloom.weights.gguf_architectures import (
    ARCHITECTURES,
    COUNT,
    FLAG,
    NUMBER,
    SIZE,
    TEXT,
    Own,
    Shapes,
)

Metadata = Mapping[str, Any]

# Metadata key below the architecture's name -> config field. Every one of them is required.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Tensors that are divisors of the rotary frequencies: of all contexts, or of long and short ones.
_ROPE_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_ROPE_FREQS, _LONG, _SHORT)
# Keys below these prefixes change the mathematics, so an unknown one is refused, never ignored.
_GUARDED = ("attention.", "rope.", "expert_")
# Those below the architecture's name that are known, and what each has to be.
_KNOWN = {
    **dict.fromkeys(_FIELDS, SIZE),
    "attention.layer_norm_rms_epsilon": NUMBER,
    "attention.head_count_kv": SIZE,
    "attention.key_length": SIZE,
    "attention.value_length": SIZE,
    "attention.causal": FLAG,
    "attention.sliding_window": COUNT,
    "rope.dimension_count": SIZE,
    "rope.freq_base": NUMBER,
    "rope.scale_linear": NUMBER,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": NUMBER,
    "rope.scaling.attn_factor": NUMBER,
    "rope.scaling.original_context_length": SIZE,
    "rope.scaling.finetuned": FLAG,
    "rope.scaling.yarn_beta_fast": NUMBER,
    "rope.scaling.yarn_beta_slow": NUMBER,
    "expert_count": COUNT,
    "expert_used_count": COUNT,
}
# Ends of a sequence, of a turn and of a message.
EOS_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_TOKEN_KEYS = ("tokenizer.ggml.bos_token_id", *EOS_KEYS)


def translate_config(
    metadata: Metadata, shapes: Shapes, rope_factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The config.json fields of a GGUF file.

    Args:
        metadata: the file's key/value pairs.
        shapes: of the file's tensors: they tell vocabulary size, biases and whether the head is
            tied to the embedding.
        rope_factors: the values of those of ROPE_TENSORS that the file has.

    Raises:
        UnsupportedModelError: an architecture, or a key that changes the mathematics, which we do
            not run; named.
        WeightsError: a required key or tensor is missing; named.
    """
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported; "
            f"those that are: {', '.join(ARCHITECTURES)}"
        )
    architecture, prefix = ARCHITECTURES[name], f"{name}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    known = {**_KNOWN, **architecture.keys}
    _refuse_per_layer(name, own)
    kinds = {f"{prefix}{key}": kind for key, kind in known.items()}
    _check_kinds(metadata, kinds | dict.fromkeys(_TOKEN_KEYS, COUNT))
    _refuse_unknown(name, own, known)
    if "token_embd.weight" not in shapes:
        raise WeightsError("the GGUF file has no tensor token_embd.weight; fetch it again")
    config = _common_fields(name, own, shapes)
    config |= _rope_factors(name, own, config, rope_factors)
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    config |= {f: own[key] for key, f in architecture.fields.items() if key in own}
    return config | architecture.complete(own, shapes, config)


def _common_fields(name: str, own: Own, shapes: Shapes) -> dict[str, Any]:
    """What files of every architecture say alike."""
    architecture = ARCHITECTURES[name]
    config: dict[str, Any] = {"model_type": architecture.model_type, "hidden_act": "silu"}
    for key, field in (*_FIELDS.items(), architecture.norm_eps):
        config[field] = _required(own, name, key)
    config["num_key_value_heads"] = own.get(
        "attention.head_count_kv", config["num_attention_heads"]
    )
    if architecture.has_one_head_size:
        config["head_dim"] = _head_size(name, own, config)
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    config["rope_theta"] = own.get("rope.freq_base", 10000.0)
    config["rope_scaling"] = _rope_scaling(own)
    if own.get("attention.sliding_window"):
        config["sliding_window"] = own["attention.sliding_window"]
        config["use_sliding_window"] = True
    return config


def _required(own: Own, architecture: str, key: str) -> Any:
    if key not in own:
        raise WeightsError(
            f"the GGUF metadata has no {architecture}.{key}; the file was not converted whole"
        )
    return own[key]


def _refuse_unknown(architecture: str, own: Own, known: Mapping[str, str]) -> None:
    for key, value in own.items():
        if key.startswith(_GUARDED) and key not in known:
            raise UnsupportedModelError(
                f"GGUF metadata {architecture}.{key} = {value!r} is not supported; "
                "use a plain model of this architecture"
            )
    if own.get("expert_count") and known["expert_count"] == COUNT:
        raise UnsupportedModelError(
            f"the GGUF file has {own['expert_count']} experts per layer, which models of "
            f"architecture {architecture!r} do not compute; use a dense one"
        )
    if own.get("attention.causal") is False:
        raise UnsupportedModelError("the GGUF file is an encoder; use a model that generates text")


def _refuse_per_layer(architecture: str, own: Own) -> None:
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
    if kind == FLAG:
        return isinstance(value, bool)
    if kind == TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == NUMBER:
        return 0 < value < math.inf
    return isinstance(value, int) and value >= (1 if kind == SIZE else 0)


def _head_size(architecture: str, own: Own, config: Mapping[str, Any]) -> int:
    head_size = own.get(
        "attention.key_length", config["hidden_size"] // config["num_attention_heads"]
    )
    rotated = ("rope.dimension_count",) if ARCHITECTURES[architecture].rotates_whole_heads else ()
    for key in ("attention.value_length", *rotated):
        if own.get(key, head_size) != head_size:
            raise UnsupportedModelError(
                f"GGUF metadata {architecture}.{key} = {own[key]} differs from the head size "
                f"{head_size}; such models are not supported"
            )
    return int(head_size)


def _rope_scaling(own: Own) -> dict[str, Any] | None:
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


def _rope_factors(
    architecture: str, own: Own, config: Mapping[str, Any], factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """What tensors say of the rope, as fields.

    Raises:
        UnsupportedModelError: the metadata say another kind of rope.
        WeightsError: there are factors for long contexts or short ones, but not for both.
    """
    if not factors:
        return {}
    kind = (config["rope_scaling"] or {}).get("rope_type")
    if kind is not None and (kind != "longrope" or _ROPE_FREQS in factors):
        raise UnsupportedModelError(
            f"the GGUF file has both {next(iter(factors))} and {architecture}.rope.scaling.type = "
            f"{kind!r}; use a file with one of them"
        )
    if _ROPE_FREQS in factors:
        return {"gguf.rope_factors": factors[_ROPE_FREQS]}  # no field of a config.json
    if factors.keys() != {_LONG, _SHORT}:
        raise WeightsError(
            f"the GGUF file should have both {_LONG} and {_SHORT}, or none of them; fetch it again"
        )
    scaling = {
        "rope_type": "longrope",
        "long_factor": factors[_LONG],
        "short_factor": factors[_SHORT],
        "attention_factor": own.get("rope.scaling.attn_factor"),
    }
    original = _required(own, architecture, "rope.scaling.original_context_length")
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}
