"""What each family reads from its config, and what it refuses instead of ignoring it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom.dtypes import DType
from kvloom.errors import UnsupportedModelError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from tiny_models import CASES, tensor_shapes

DTYPES = ModelDTypes(DType.BFLOAT16, DType.FLOAT16)
LLAMA, QWEN2 = CASES["llama_gqa"], CASES["qwen2_untied_mha"]
QWEN3, MISTRAL = CASES["qwen3_tied"], CASES["mistral_gqa"]


def build(config: dict[str, Any], **changes: Any) -> Model:
    return build_model(config | changes, TensorParallelRank(), DTYPES)


def windows(model: Model) -> list[int | None]:
    return [layer.sliding_window_size for layer in model.get_kv_spec().layers]


def test_spec_names_the_layers_in_order() -> None:
    model = build(LLAMA)
    layers = model.get_kv_spec().layers
    assert [layer.name for layer in layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [layer.name for layer in model.attention_layers] == [layer.name for layer in layers]
    assert all(layer.dtype is DType.FLOAT16 for layer in layers)
    assert all(parameter.dtype is DType.BFLOAT16 for parameter in model.parameters)


def test_parameters_of_a_layer_by_family() -> None:
    def of_layer(config: dict[str, Any]) -> set[str]:
        prefix = "model.layers.1."
        return {n.removeprefix(prefix) for n in tensor_shapes(config) if n.startswith(prefix)}

    linear = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
    linear |= {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    common = linear | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    qkv_biases = {f"self_attn.{x}_proj.bias" for x in "qkv"}
    assert of_layer(LLAMA) == of_layer(MISTRAL) == common
    assert of_layer(QWEN2) == common | qkv_biases
    assert of_layer(QWEN3) == common | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert of_layer(CASES["llama_mha_biases"]) == common | qkv_biases | {
        "self_attn.o_proj.bias",
        *(f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")),
    }


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = build(LLAMA, tie_word_embeddings=True), build(LLAMA)
    assert tied.ignored_tensors == {"lm_head.weight": "model.embed_tokens.weight"}
    assert untied.ignored_tensors == {}
    names = [s.name for p in untied.parameters for s in p.sources]
    assert names.count("lm_head.weight") == 1
    assert "lm_head.weight" not in [s.name for p in tied.parameters for s in p.sources]


@pytest.mark.parametrize("case", CASES)
def test_parameter_names_are_unique(case: str) -> None:
    names = [parameter.name for parameter in build(CASES[case]).parameters]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    # 2 bytes x (untied embedding + head, or tied embedding; layers; final norm), by hand from the
    # published shapes.
    [
        ("llama-3.1-8b", 2 * 8_030_261_248),
        ("qwen2.5-0.5b", 2 * 494_032_768),
        ("qwen3-8b", 2 * 8_190_735_360),
    ],
)
def test_published_parameter_counts(name: str, num_bytes: int) -> None:
    folder = Path(__file__).parent.parent / "data" / "model_configs"
    model = build(json.loads((folder / f"{name}.json").read_text()))
    assert sum(parameter.num_bytes for parameter in model.parameters) == num_bytes


def test_head_size_defaults() -> None:
    def head_size(config: dict[str, Any]) -> int:
        return build(config).get_kv_spec().layers[0].head_size

    assert head_size(LLAMA) == 32 // 4
    assert head_size(LLAMA | {"head_dim": None}) == 32 // 4
    assert head_size(LLAMA | {"head_dim": 20}) == 20
    assert head_size({k: v for k, v in QWEN3.items() if k != "head_dim"}) == 128
    no_kv_heads = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert build(no_kv_heads).get_kv_spec().layers[0].num_kv_heads == 4


def test_windows_of_mistral() -> None:
    assert windows(build(MISTRAL, sliding_window=16)) == [16, 16]
    assert windows(build(MISTRAL)) == [None, None]
    no_window = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    assert windows(build(no_window, max_position_embeddings=8192)) == [4096, 4096]


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_windows_of_qwen(config: dict[str, Any]) -> None:
    assert windows(build(config, sliding_window=16)) == [None, None]
    on = config | {"use_sliding_window": True, "sliding_window": 16}
    assert windows(build(on, max_window_layers=1)) == [None, 16]
    assert windows(build(on)) == [None, None]  # the first 28 layers see everything
    types = ["sliding_attention", "full_attention"]
    assert windows(build(on, layer_types=types)) == [16, None]
    assert windows(build(config, layer_types=["full_attention"] * 2)) == [None, None]


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown family": (LLAMA, {"model_type": "mamba"}, "llama4_text, mistral"),
    "no family": (LLAMA, {"model_type": None}, "model_type 'None'"),
    "activation": (LLAMA, {"hidden_act": "relu"}, "hidden_act 'relu'"),
    "quantised": (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
    "soft cap": (QWEN3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "multiplier": (LLAMA, {"residual_multiplier": 0.22}, "residual_multiplier"),
    "bidirectional": (QWEN2, {"is_causal": False}, "is_causal"),
    "chunks": (LLAMA, {"attention_chunk_size": 8}, "attention_chunk_size"),
    "missing size": (LLAMA, {"hidden_size": None}, "hidden_size should be a positive integer"),
    "no length": (LLAMA, {"max_position_embeddings": None}, "max_position_embeddings"),
    "size as text": (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers"),
    "no layers": (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    "uneven groups": (LLAMA, {"num_key_value_heads": 3}, "4 query heads do not share 3 KV heads"),
    "odd head": (LLAMA, {"head_dim": 7}, "head size 7 must be even"),
    "rope kind": (LLAMA, {"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic'"),
    "rope by layer": (LLAMA, {"rope_parameters": {"full_attention": {}}}, "per layer type"),
    "partial rope": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "layer types": (QWEN3, {"layer_types": ["full_attention", "linear"]}, "layer_types"),
    "too few types": (QWEN2, {"layer_types": ["full_attention"]}, "layer_types"),
    "types as text": (QWEN3, {"layer_types": "full_attention"}, "layer_types"),
    "types of types": (QWEN2, {"layer_types": [["full_attention"], 3]}, "layer_types"),
    "activations": (LLAMA, {"hidden_act": ["silu"]}, "hidden_act"),
    "endless size": (LLAMA, {"hidden_size": 10**400}, "hidden_size should be a positive integer"),
    "eps as text": (LLAMA, {"rms_norm_eps": "x"}, "rms_norm_eps should be a finite number above 0"),
    "negative eps": (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps should be a finite number"),
    "no number": (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps should be a finite number"),
    "bias as text": (LLAMA, {"attention_bias": "false"}, "attention_bias should be true or false"),
    "mlp bias": (LLAMA, {"mlp_bias": 1}, "mlp_bias should be true or false, not 1"),
    "qwen3 bias": (QWEN3, {"attention_bias": "no"}, "attention_bias should be true or false"),
    "tied as text": (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings should be true or"),
    "window as text": (MISTRAL, {"sliding_window": "x"}, "sliding_window should be a positive int"),
    "no window": (MISTRAL, {"sliding_window": 0}, "sliding_window should be a positive integer"),
    "window switch": (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window should be true or"),
    "first window": (
        QWEN2,
        {"use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers should be an integer from 0 on",
    ),
    "mistral types": (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_changes_the_computation_is_refused(kind: str) -> None:
    config, changes, message = REFUSALS[kind]
    build(config)  # the twin that works
    with pytest.raises(UnsupportedModelError, match=message):
        build(config, **changes)


def test_harmless_fields_are_accepted() -> None:
    build(LLAMA, torch_dtype="bfloat16", architectures=["LlamaForCausalLM"], use_cache=True)


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
    "model.layers.1.self_attn.k_proj.bias": "blk.1.attn_k.bias",
    "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
    "model.layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
    "model.layers.1.self_attn.k_norm.weight": "blk.1.attn_k_norm.weight",
    "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
    "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
    "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
}


def test_gguf_names() -> None:
    model = build(QWEN3, attention_bias=True, tie_word_embeddings=False)
    for name, gguf_name in GGUF_NAMES.items():
        assert model.gguf_tensors[name].name == gguf_name
    sources = {s.name for p in model.parameters for s in p.sources}
    assert set(model.gguf_tensors) == sources


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=lambda c: c["model_type"])
def test_only_llama_files_permute_q_and_k(config: dict[str, Any]) -> None:
    is_permuted = config["model_type"] in ("llama", "mistral")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in build(config).gguf_tensors.items():
        expected = heads.get(name.split(".")[-2], 0) if is_permuted else 0
        assert tensor.num_permuted_heads == expected
