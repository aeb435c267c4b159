"""Phi-3, SmolLM3, Cohere 2 and gpt-oss compute the same from a folder and from a GGUF file.

GGUF names come from the gguf package; metadata and what is stored otherwise there are written out
below from llama.cpp's conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize, quantize

from gguf_files import write_gguf
from kvloom.dtypes import DType
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.reference import ReferenceBackend
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.loader import load_weights
from tiny_models import TinyRunner, build_loaded, make_token_ids, make_weights, tensor_shapes
from tiny_variants import VARIANT_CASES

BACKEND = ReferenceBackend()
ARCHITECTURES = {
    "phi3": MODEL_ARCH.PHI3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "cohere2": MODEL_ARCH.COHERE2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
# Those whose lists and patterns files cannot say are left out.
FILE_CASES = ["phi3_window", "phi3_long", "phi3_short", "phi3_part_of_the_head_tied", "smollm3"]
FILE_CASES += ["cohere2", "gpt_oss", "gpt_oss_no_biases_tied"]


def gguf_tensors(config: Mapping[str, Any], weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same weights under a GGUF file's names, in its shapes."""
    family = config["model_type"]
    name_map = get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Any] = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if ".experts." in name:
            tensors |= gguf_experts(name_map, module, kind, array)
        elif kind == "sinks":
            tensors[f"{name_map.get_name(name)}.weight"] = array
        else:
            num_heads = heads.get(module.rpartition(".")[2], 0) if family == "smollm3" else 0
            if num_heads:  # rows of rotary pairs side by side
                halves = array.reshape(num_heads, 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
            tensors[f"{name_map.get_name(module)}.{kind}"] = array
    for kind, factors in config.get("rope_scaling", {}).items():
        if kind in ("long_factor", "short_factor"):
            name = f"rope_factors_{kind.removesuffix('_factor')}.weight"
            tensors[name] = np.array(factors, np.float32)
    return tensors


def gguf_experts(name_map: Any, path: str, kind: str, array: np.ndarray) -> dict[str, Any]:
    """Matrices as [out, in], gate and up apart, where Hugging Face has their columns in turns."""
    if kind.endswith("_bias"):
        kind, part = kind.removesuffix("_bias"), "bias"
    else:
        array, part = array.swapaxes(1, 2), "weight"
    if kind == "down_proj":
        return {f"{name_map.get_name(f'{path}.{kind}')}.{part}": array}
    halves = {"gate_proj": array[:, ::2], "up_proj": array[:, 1::2]}
    return {f"{name_map.get_name(f'{path}.{k}')}.{part}": half for k, half in halves.items()}


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    name = {"gpt_oss": "gpt-oss"}.get(config["model_type"], config["model_type"])
    head_size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rotated = head_size * config.get("partial_rotary_factor", 1)
    norm = ("layer_norm", "layer_norm_eps") if name == "cohere2" else ("layer_norm_rms", None)
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        f"attention.{norm[0]}_epsilon": config[norm[1] or "rms_norm_eps"],
        "rope.dimension_count": int(rotated),
        "rope.freq_base": config["rope_theta"],
    }
    if name != "smollm3":
        keys["attention.sliding_window"] = config["sliding_window"] or 0
    if name == "phi3":
        original = config.get("original_max_position_embeddings", 4096)
        keys["rope.scaling.original_context_length"] = original
        stretch = max(config["max_position_embeddings"] / original, 1.0)
        stretch = (config.get("rope_scaling") or {}).get("factor", stretch)
        factor = float(np.sqrt(1 + np.log(stretch) / np.log(original)))
        keys["rope.scaling.attn_factor"] = factor
    if name == "cohere2":
        keys |= {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
    if name == "gpt-oss":
        keys |= gpt_oss_metadata(config)
    return {"general.architecture": name, **{f"{name}.{key}": v for key, v in keys.items()}}


def gpt_oss_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    yarn = config.get("rope_scaling") or {}
    return {
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn.get("factor", 32.0),
        "rope.scaling.original_context_length": yarn.get("original_max_position_embeddings", 4096),
        "rope.scaling.yarn_beta_fast": yarn.get("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": yarn.get("beta_slow", 1.0),
    }


def load_file(path: Path, rank: TensorParallelRank) -> Model:
    checkpoint = open_checkpoint(path)
    dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
    model = build_model(checkpoint.config, rank, dtypes)
    load_weights(model, checkpoint, BACKEND.pack)
    return model


@pytest.mark.parametrize("case", FILE_CASES)
def test_a_file_makes_the_model_that_its_folder_makes(tmp_path: Path, case: str) -> None:
    config = VARIANT_CASES[case]
    weights = make_weights(tensor_shapes(config))
    tensors = {
        name: (np.ascontiguousarray(array), GGMLQuantizationType.F32)
        for name, array in gguf_tensors(config, weights).items()
    }
    path = write_gguf(tmp_path / "model.gguf", tensors, metadata(config))
    for rank in (TensorParallelRank(), TensorParallelRank(1, 2)):
        folder, file = build_loaded(config, BACKEND, rank), load_file(path, rank)
        assert file.get_kv_spec() == folder.get_kv_spec()
        for ours, theirs in zip(file.parameters, folder.parameters, strict=True):
            assert ours.name == theirs.name
            np.testing.assert_array_equal(ours.value, theirs.value)
    ids = make_token_ids(case)
    expected = TinyRunner(build_loaded(config, BACKEND), BACKEND).step(ids)
    # The metadata has float32 where a config.json has float64.
    found = TinyRunner(load_file(path, TensorParallelRank()), BACKEND).step(ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_experts_in_mxfp4_are_read_from_a_file(tmp_path: Path) -> None:
    """As published files have them; the gguf package says what the blocks of 32 values are."""
    config = VARIANT_CASES["gpt_oss"] | {"intermediate_size": 64}
    expected, tensors = {}, {}
    for name, array in gguf_tensors(config, make_weights(tensor_shapes(config))).items():
        kind = "MXFP4" if name.endswith("_exps.weight") else "F32"
        stored = GGMLQuantizationType[kind]
        blocks = quantize(np.ascontiguousarray(array), stored)
        tensors[name] = (blocks, stored)
        expected[name] = dequantize(blocks, stored)
    path = write_gguf(tmp_path / "model.gguf", tensors, metadata(config))
    model = load_file(path, TensorParallelRank(1, 2))
    by_name = {parameter.name: parameter.value for parameter in model.parameters}
    for i in range(4):
        gate, up, down = (expected[f"blk.{i}.ffn_{k}_exps.weight"] for k in ("gate", "up", "down"))
        stack = np.concatenate([gate[:, 32:], up[:, 32:]], axis=1)
        experts = f"model.layers.{i}.experts"
        np.testing.assert_array_equal(by_name[f"{experts}.gate_up"], stack)
        np.testing.assert_array_equal(by_name[f"{experts}.down"], down[:, :, 32:])
