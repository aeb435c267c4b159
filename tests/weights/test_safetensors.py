"""Hugging Face folders: formats, shards, damage. Files are written by the safetensors package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvloom.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from kvloom.weights.checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")


def write_raw(path: Path, entries: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file byte by byte: the package's numpy side has no bfloat16."""
    table, data = {}, b""
    for name, (dtype, shape, raw) in entries.items():
        offsets = [len(data), len(data) + len(raw)]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": 2})
    return tmp_path


def test_single_file(folder: Path) -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    half = np.array([0.1, -2.0], np.float16)
    save_file({"a": a, "half": half}, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensor_names == {"a", "half"}
    assert checkpoint.metadata is None
    assert checkpoint.config["model_type"] == "llama"
    np.testing.assert_array_equal(checkpoint.read("a"), a)
    read = checkpoint.read("half")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, half.astype(np.float32))


def test_bfloat16_at_an_odd_place(folder: Path) -> None:
    # 1.0, -2.0, 2**-126, inf: the upper halves of their float32 forms.
    raw = np.array([0x3F80, 0xC000, 0x0080, 0x7F80], "<u2").tobytes()
    entries = {"odd": ("U8", [1], b"x"), "b": ("BF16", [2, 2], raw)}
    write_raw(folder / "model.safetensors", entries)
    values = open_checkpoint(folder).read("b")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, [[1.0, -2.0], [2.0**-126, np.inf]])


def test_shards(folder: Path) -> None:
    save_file({"a": np.float32([1])}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.float32([2])}, folder / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_json(folder / INDEX, {"weight_map": shards})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensor_names == {"a", "b"}
    assert [checkpoint.read(name).tolist() for name in "ab"] == [[1.0], [2.0]]


def test_a_missing_shard_and_a_wrong_index_name_the_tensor(folder: Path) -> None:
    save_file({"a": np.float32([1])}, folder / "one.safetensors")
    write_json(folder / INDEX, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    with pytest.raises(WeightsError, match=r"two\.safetensors is missing, tensor b"):
        open_checkpoint(folder)
    write_json(folder / INDEX, {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
    with pytest.raises(WeightsError, match="tensor b is not in one"):
        open_checkpoint(folder)


def test_what_a_shard_has_beyond_its_index_is_seen(folder: Path) -> None:
    save_file({"a": np.float32([1]), "extra": np.float32([2])}, folder / "one.safetensors")
    write_json(folder / INDEX, {"weight_map": {"a": "one.safetensors"}})
    assert open_checkpoint(folder).tensor_names == {"a", "extra"}


def test_cut_off_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({"a": np.float32([1, 2, 3])}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(WeightsError, match=r"tensor a .*cut off"):
        open_checkpoint(folder)
    for length in (0, 7, 8, 20):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match="cut off within its header"):
            open_checkpoint(folder)
    path.write_bytes(whole[:8] + b"}" + whole[9:])
    with pytest.raises(WeightsError, match="damaged header"):
        open_checkpoint(folder)


def test_a_size_that_is_not_the_shapes(folder: Path) -> None:
    write_raw(folder / "model.safetensors", {"a": ("F32", [2], bytes(12))})
    with pytest.raises(WeightsError, match=r"tensor a of shape \[2\] has 12 bytes"):
        open_checkpoint(folder)


def test_other_formats_are_refused_by_name(folder: Path) -> None:
    write_raw(folder / "model.safetensors", {"a": ("F8_E4M3", [2], bytes(2))})
    with pytest.raises(UnsupportedModelError, match="tensor a is stored as F8_E4M3"):
        open_checkpoint(folder).read("a")


def test_quantised_folders_are_refused(folder: Path) -> None:
    write_json(folder / "config.json", {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(UnsupportedModelError, match="quantised by awq"):
        open_checkpoint(folder)


def test_folders_that_are_no_model(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors file"):
        open_checkpoint(folder)
    for name in ("x", "y"):
        save_file({name: np.float32([1])}, folder / f"{name}.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"x\.safetensors, y\.safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelNotFoundError, match="JSON object"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="not valid JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json cannot be read"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, set()),
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 3]}, None, {2, 3}),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, {7, 8}),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, {0}),
    ],
)
def test_eos_ids(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    save_file({"a": np.float32([1])}, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    assert open_checkpoint(folder).eos_token_ids == expected
