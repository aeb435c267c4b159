"""Experts and latent maps load the same from a folder's tensors and from a GGUF file's.

GGUF names come from the gguf package; how tensors are stacked, cut and transposed there is written
out below from llama.cpp's conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from kvloom.ops.base import Parameter, StoredRows
from kvloom.ops.reference import ReferenceBackend
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.loader import RowPacking, load_weights
from memory_checkpoint import MemoryCheckpoint
from tiny_mixtures import MIXTURE_CASES
from tiny_models import TinyRunner, build_loaded, make_token_ids, make_weights, tensor_shapes

BACKEND = ReferenceBackend()
DTYPES = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
RANKS = [TensorParallelRank(), TensorParallelRank(0, 2), TensorParallelRank(3, 4)]


def gguf_tensors(config: Mapping[str, Any], weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same weights under a GGUF file's names, in its shapes."""
    arch = MODEL_ARCH.LLAMA4 if config["model_type"] == "llama4_text" else MODEL_ARCH.DEEPSEEK2
    name_map = get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors: dict[str, Any] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            halves = np.split(array.swapaxes(1, 2), 2, axis=1)
            for half, part in zip(("gate_proj", "up_proj"), halves, strict=True):
                tensors[f"{name_map.get_name(f'{module}.{half}')}.weight"] = part
        elif kind == "down_proj":
            tensors[f"{name_map.get_name(name)}.weight"] = array.swapaxes(1, 2)
        elif ".experts." in name:
            path, _, _, matrix = module.rsplit(".", 3)
            stacks.setdefault(f"{path}.experts.{matrix}", []).append(array)
        elif module.endswith("kv_b_proj"):
            by_head = array.reshape(config["num_attention_heads"], -1, array.shape[1])
            keys = by_head[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
            layer = name_map.get_name(module).removesuffix(".attn_kv_b")
            tensors[f"{layer}.attn_k_b.weight"] = keys
            tensors[f"{layer}.attn_v_b.weight"] = by_head[:, config["qk_nope_head_dim"] :]
        elif kind == "e_score_correction_bias":
            tensors[f"{name_map.get_name(f'{module}.e_score_correction')}.bias"] = array
        else:
            tensors[f"{name_map.get_name(module)}.{kind}"] = array
    for path, arrays in stacks.items():
        tensors[f"{name_map.get_name(path)}.weight"] = np.stack(arrays)
    return tensors


def pack_rows(parameter: Parameter, _: str, parts: Iterable[StoredRows]) -> np.ndarray:
    """The parameter's matrices, put together from the rows by what they say of themselves."""
    values = np.full(parameter.shape, np.nan, np.float32)
    flat = values.reshape(-1, parameter.shape[-1])
    for part in parts:
        flat[part.first_row : part.first_row + len(part.data)] = part.data.view(np.float32)
    return values


def load(
    config: Mapping[str, Any], rank: TensorParallelRank, checkpoint: MemoryCheckpoint
) -> tuple[Model, Model]:
    """The model loaded value by value, and row by row."""
    models = build_model(config, rank, DTYPES), build_model(config, rank, DTYPES)
    for model, packing in zip(models, (None, RowPacking("auto", pack_rows)), strict=True):
        load_weights(model, checkpoint, lambda _, array: array, packing)
    return models


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("case", MIXTURE_CASES)
def test_both_formats_load_the_same(case: str, rank: TensorParallelRank) -> None:
    config = MIXTURE_CASES[case]
    weights = make_weights(tensor_shapes(config))
    file = MemoryCheckpoint(gguf_tensors(config, weights), metadata={})
    folder_models = load(config, rank, MemoryCheckpoint(weights))
    for parameters in zip(
        *(model.parameters for model in (*folder_models, *load(config, rank, file))), strict=True
    ):
        expected = parameters[0]
        assert expected.value.shape == expected.shape
        assert np.isfinite(expected.value).all()
        for parameter in parameters[1:]:
            np.testing.assert_array_equal(parameter.value, expected.value)


@pytest.mark.parametrize("case", ["llama4", "deepseek_v3"])
def test_ranks_hold_each_expert_value_once(case: str) -> None:
    """The inner values of the ranks' experts, side by side, are the whole experts'."""
    config = MIXTURE_CASES[case]
    checkpoint = MemoryCheckpoint(make_weights(tensor_shapes(config)))
    [whole], *ranks = [
        [load(config, TensorParallelRank(rank, size), checkpoint)[0] for rank in range(size)]
        for size in (1, 2, 4)
    ]
    for models in ranks:
        for index, parameter in enumerate(whole.parameters):
            values = [model.parameters[index].value for model in models]
            if parameter.name.endswith(".experts.down"):
                np.testing.assert_array_equal(np.concatenate(values, axis=2), parameter.value)
            elif parameter.name.endswith(".experts.gate_up"):
                halves = zip(*(np.split(value, 2, axis=1) for value in values), strict=True)
                both = np.concatenate([np.concatenate(half, axis=1) for half in halves], axis=1)
                np.testing.assert_array_equal(both, parameter.value)


def deepseek_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    is_sigmoid = config["model_type"] == "deepseek_v3"
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "rope.freq_base": config["rope_theta"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_group_count": config.get("n_group", 1),
        "expert_group_used_count": config.get("topk_group", 1),
        "expert_weights_scale": config.get("routed_scaling_factor", 2.5 if is_sigmoid else 1.0),
        "expert_weights_norm": config.get("norm_topk_prob", is_sigmoid),
        "expert_gating_func": 2 if is_sigmoid else 1,
    }
    if config["q_lora_rank"]:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if yarn := config.get("rope_scaling"):
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn["factor"],
            "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": yarn["beta_fast"],
            "rope.scaling.yarn_beta_slow": yarn["beta_slow"],
            "rope.scaling.yarn_log_multiplier": 0.1 * yarn["mscale_all_dim"],
        }
    named = {f"deepseek2.{key}": value for key, value in keys.items()}
    return {"general.architecture": "deepseek2", **named}


@pytest.mark.parametrize("rank", [TensorParallelRank(), TensorParallelRank(1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_experts_keep_their_blocks(
    tmp_path: Path, kind: str, rank: TensorParallelRank
) -> None:
    """Where a rank's part is made of whole blocks of a format that can be packed as it is."""
    config = MIXTURE_CASES["deepseek_v3"] | {"moe_intermediate_size": 64}
    tensors = {}
    for name, array in gguf_tensors(config, make_weights(tensor_shapes(config))).items():
        stored = GGMLQuantizationType[kind if "_exps" in name else "F32"]
        tensors[name] = (quantize(np.ascontiguousarray(array), stored), stored)
    path = write_gguf(tmp_path / "model.gguf", tensors, deepseek_metadata(config))
    formats: dict[str, set[str]] = {}

    def pack_dequantised(
        parameter: Parameter, packed: str, parts: Iterable[StoredRows]
    ) -> np.ndarray:
        found = list(parts)
        if ".experts." in parameter.name:
            formats[packed] = formats.get(packed, set()) | {part.format for part in found}
        values = [dequantize(part.data, GGMLQuantizationType[part.format]) for part in found]
        rows = [
            StoredRows("F32", part.num_inputs, value.view(np.uint8), part.first_row)
            for part, value in zip(found, values, strict=True)
        ]
        return pack_rows(parameter, packed, rows)

    checkpoint = open_checkpoint(path)
    models = [build_model(checkpoint.config, rank, DTYPES) for _ in range(2)]
    load_weights(models[0], checkpoint, lambda _, array: array)
    load_weights(
        models[1], checkpoint, lambda _, array: array, RowPacking("auto", pack_dequantised)
    )
    moved = {"Q8_0": "Q8_0", "Q4_1": "Q4_1", "Q5_0": "Q8_0"}.get(kind)
    assert formats == ({moved[:2]: {moved}} if moved else {"BF16": {"F32"}})
    for by_value, by_row in zip(*(model.parameters for model in models), strict=True):
        np.testing.assert_array_equal(by_row.value, by_value.value)


@pytest.mark.parametrize(
    "case",
    ["deepseek_v2_lite", "deepseek_v2_groups_yarn", "deepseek_v3", "deepseek_v3_yarn"],
)
def test_a_deepseek_file_makes_the_model_that_its_folder_makes(tmp_path: Path, case: str) -> None:
    config = MIXTURE_CASES[case]
    weights = make_weights(tensor_shapes(config))
    ids = make_token_ids(case)
    expected = TinyRunner(build_loaded(config, BACKEND), BACKEND).step(ids)
    tensors = {
        name: (np.ascontiguousarray(array), GGMLQuantizationType.F32)
        for name, array in gguf_tensors(config, weights).items()
    }
    path = write_gguf(tmp_path / "model.gguf", tensors, deepseek_metadata(config))
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, TensorParallelRank(), DTYPES)
    load_weights(model, checkpoint, BACKEND.pack)
    # The metadata has float32 where a config.json has float64.
    found = TinyRunner(model, BACKEND).step(ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_further_layers_that_predict_tokens_are_left_alone() -> None:
    config = MIXTURE_CASES["deepseek_v3"]
    weights = make_weights(tensor_shapes(config))
    extra = {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    load(config, TensorParallelRank(), MemoryCheckpoint(weights | extra))
