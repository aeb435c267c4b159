"""The same tiny model from a sharded folder and from a GGUF file gives the same parameters.

GGUF names come from the gguf package, and rows are interleaved by llama.cpp's own formula.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from safetensors.numpy import load_file, save_file

from gguf_files import write_gguf
from kvloom.dtypes import DType
from kvloom.errors import ModelError, WeightsError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.reference import ReferenceBackend
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.loader import load_weights
from tiny_models import CASES, make_weights, tensor_shapes

NAMES = ["llama_gqa", "llama_tied", "llama_mha_biases", "qwen2_tied", "qwen2_untied_mha"]
NAMES += ["qwen3_tied", "mistral_gqa"]


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """Two shards, the first with every other tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shard_of = {}
    for part in range(2):
        names = list(weights)[part::2]
        save_file({name: weights[name] for name in names}, folder / f"{part}.safetensors")
        shard_of |= dict.fromkeys(names, f"{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return folder


def write_file(path: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    family = "llama" if config["model_type"] == "mistral" else config["model_type"]
    name_map = get_tensor_name_map(MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        num_heads = heads.get(module.rpartition(".")[2], 0)
        stored = interleave(array, num_heads) if num_heads and family == "llama" else array
        tensors[f"{name_map.get_name(module)}.{kind}"] = (stored, GGMLQuantizationType.F32)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        keys["attention.key_length"] = keys["attention.value_length"] = config["head_dim"]
    metadata = {f"{family}.{key}": value for key, value in keys.items()}
    return write_gguf(path, tensors, {"general.architecture": family, **metadata})


def load(path: Path, rank: TensorParallelRank) -> tuple[Model, int]:
    checkpoint = open_checkpoint(path)
    dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
    model = build_model(checkpoint.config, rank, dtypes)
    return model, load_weights(model, checkpoint, ReferenceBackend().pack)


@pytest.mark.parametrize("rank", [TensorParallelRank(), TensorParallelRank(1, 2)], ids=["1", "2"])
@pytest.mark.parametrize("name", NAMES)
def test_both_formats_load_the_same(tmp_path: Path, name: str, rank: TensorParallelRank) -> None:
    config = CASES[name]
    weights = make_weights(tensor_shapes(config))
    folder, num_bytes = load(write_folder(tmp_path / "folder", config, weights), rank)
    file, num_file_bytes = load(write_file(tmp_path / "m.gguf", config, weights), rank)
    assert num_bytes == num_file_bytes == sum(p.num_bytes for p in folder.parameters)
    assert folder.get_kv_spec() == file.get_kv_spec()
    for ours, theirs in zip(folder.parameters, file.parameters, strict=True):
        assert ours.name == theirs.name
        np.testing.assert_array_equal(ours.value, theirs.value)
    if rank.world_size == 1:
        for parameter in folder.parameters:
            expected = np.concatenate([weights[source.name] for source in parameter.sources])
            np.testing.assert_array_equal(parameter.value, expected)


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    config = CASES["llama_tied"]
    weights = make_weights(tensor_shapes(config))
    embedding = weights["model.embed_tokens.weight"]
    same = write_folder(tmp_path / "same", config, weights | {"lm_head.weight": embedding})
    load(same, TensorParallelRank(1, 2))
    own = write_folder(tmp_path / "own", config, weights | {"lm_head.weight": embedding + 1})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load(own, TensorParallelRank(1, 2))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    config = CASES["llama_gqa"]
    folder = write_folder(tmp_path / "m", config, make_weights(tensor_shapes(config)))
    shard = folder / "1.safetensors"
    save_file(load_file(shard) | {"model.embed_tokens.weight": np.zeros((2, 2))}, shard)
    message = r"model\.embed_tokens\.weight is both in 0\.safetensors and in 1\.safetensors"
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("place", [None, [], 5, {}])
def test_an_index_that_names_no_file_is_refused(tmp_path: Path, place: Any) -> None:
    config = CASES["llama_gqa"]
    folder = write_folder(tmp_path / "m", config, make_weights(tensor_shapes(config)))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for broken in (place, places | {"model.norm.weight": place}):
        index.write_text(json.dumps({"weight_map": broken}))
        with pytest.raises(ModelError, match=r"weight_map|no tensor"):
            load(folder, TensorParallelRank())


def test_a_shard_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    config = CASES["llama_gqa"]
    folder = write_folder(tmp_path / "m", config, make_weights(tensor_shapes(config)))
    (folder / "1.safetensors").unlink()
    (folder / "1.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"1\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("write", [write_folder, write_file])
def test_every_tensor_is_accounted_for(tmp_path: Path, write: Any) -> None:
    config = CASES["llama_gqa"]
    weights = make_weights(tensor_shapes(config))
    lost = {name: array for name, array in weights.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(WeightsError, match=r"no tensor (model\.layers\.1|blk\.1)\..*up"):
        load(write(tmp_path / "lost.gguf", config, lost), TensorParallelRank())
    more = weights | {"model.layers.2.mlp.up_proj.weight": weights["model.norm.weight"]}
    config_of_three = config | {"num_hidden_layers": 3}
    path = write(tmp_path / "more.gguf", config_of_three, more)
    checkpoint = open_checkpoint(path)
    model = build_model(config, TensorParallelRank(), ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    with pytest.raises(WeightsError, match=r"no use for tensor (model\.layers\.2|blk\.2)\..*up"):
        load_weights(model, checkpoint, ReferenceBackend().pack)
    bent = weights | {"model.norm.weight": np.zeros(7, np.float32)}
    with pytest.raises(WeightsError, match=r"norm\.weight has shape \[7\].*\[32\]"):
        load(write(tmp_path / "bent.gguf", config, bent), TensorParallelRank())
