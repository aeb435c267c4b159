"""Hugging Face folders: formats, shards, damage. Files are written by the safetensors package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvloom.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from kvloom.weights.checkpoint import open_checkpoint, read_config

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
        with pytest.raises(WeightsError, match="cut off within its header" if length else "empty"):
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
    "index", [{}, {"weight_map": 5}, {"weight_map": ["a"]}, {"weight_map": {"a": 5}}]
)
def test_an_index_without_its_map(folder: Path, index: dict[str, Any]) -> None:
    write_json(folder / INDEX, index)
    with pytest.raises(WeightsError, match=r"index\.json has no weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize("ids", ["x", 1.5, [[2]], {"a": 2}, [None]])
def test_eos_ids_of_a_wrong_type(folder: Path, ids: Any) -> None:
    save_file({"a": np.float32([1])}, folder / "model.safetensors")
    write_json(folder / "config.json", {"eos_token_id": ids})
    with pytest.raises(ModelNotFoundError, match="eos_token_id is"):
        open_checkpoint(folder)


def test_json_with_a_byte_order_mark(folder: Path) -> None:
    """RFC 8259, section 8.1: a parser may ignore one."""
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_config(folder)["model_type"] == "llama"


def test_deeply_nested_json(folder: Path) -> None:
    nested = '{"a":' * 100_000
    (folder / "config.json").write_text(nested)
    with pytest.raises(ModelNotFoundError, match="not valid JSON"):
        read_config(folder)
    write_json(folder / "config.json", {})
    path = folder / "model.safetensors"
    path.write_bytes(len(nested).to_bytes(8, "little") + nested.encode())
    with pytest.raises(WeightsError, match="damaged header"):
        open_checkpoint(folder)


def test_a_folder_with_a_gguf_file_alone(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for read in (open_checkpoint, read_config):
        with pytest.raises(
            ModelNotFoundError, match=r"no config\.json, but m\.gguf; name the file"
        ):
            read(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_are_links_to_themselves(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    with pytest.raises(ModelNotFoundError, match=rf"{name} cannot be read .*symbolic links"):
        open_checkpoint(folder)


def test_files_that_are_no_regular_files(folder: Path) -> None:
    os.mkfifo(folder / "fifo.json")
    os.mkfifo(folder / "model.safetensors")
    for path in (Path("/dev/null"), folder / "fifo.json"):
        with pytest.raises(ModelNotFoundError, match=f"{path.name} is not a regular file"):
            read_config(path)
    with pytest.raises(ModelNotFoundError, match="safetensors is not a regular file"):
        open_checkpoint(folder)
    with pytest.raises(ModelNotFoundError, match="none does not exist"):
        open_checkpoint(folder / "none")


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom nothing is denied."""

    def deny(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    save_file({"a": np.float32([1])}, folder / "model.safetensors")
    (folder / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ModelNotFoundError, match=r"m\.gguf cannot be read \(Permission denied\)"):
        open_checkpoint(folder / "m.gguf")
    with pytest.raises(ModelNotFoundError, match=r"json cannot be read \(Permission denied\)"):
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
