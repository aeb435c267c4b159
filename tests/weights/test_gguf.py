"""Headers and tensors of GGUF files, against the gguf package and against damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from gguf_files import LLAMA_METADATA, write_gguf
from kvloom.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from kvloom.models.rope import RopeFields, build_rope
from kvloom.weights.checkpoint import open_checkpoint, read_config
from kvloom.weights.gguf import GGUFCheckpoint
from kvloom.weights.gguf_header import read_header

EMBEDDING = (np.zeros((8, 32), np.float32), GGMLType.F32)
# Everything the package dequantises, whether or not it can also quantise.
BLOCK_TYPES = sorted(gguf.quants._type_traits)
PLAIN_TYPES = [GGMLType.F32, GGMLType.F16]


def make_blocks(kind: GGMLType, seed: int, num_rows: int = 3) -> np.ndarray:
    """[num_rows, bytes] random blocks of `kind`; scales may be anything a file may hold."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_rows, 2 * block_bytes), np.uint8)


@pytest.mark.parametrize("kind", [*PLAIN_TYPES, *BLOCK_TYPES], ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
def test_every_type_reads_as_the_package_does(tmp_path: Path, kind: GGMLType) -> None:
    raw = make_blocks(kind, seed=int(kind))
    if kind in PLAIN_TYPES:
        raw = np.arange(12.0).reshape(3, 4).astype("<f4" if kind == GGMLType.F32 else "<f2")
    tensors = {"token_embd.weight": EMBEDDING, "x": (raw, kind)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA))
    values = checkpoint.read("x")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, gguf.dequantize(raw, kind))


def test_a_tensor_of_several_pieces(tmp_path: Path) -> None:
    raw = make_blocks(GGMLType.Q8_0, seed=1, num_rows=5000)  # 320,000 values
    raw[:, 1::34] = 0x20  # small finite scales
    tensors = {"token_embd.weight": (raw, GGMLType.Q8_0)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA))
    expected = gguf.dequantize(raw, GGMLType.Q8_0)
    np.testing.assert_array_equal(checkpoint.read("token_embd.weight"), expected)


def test_quantised_values_are_near_the_originals(tmp_path: Path) -> None:
    original = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    raw = gguf.quantize(original, GGMLType.Q8_0)
    tensors = {"token_embd.weight": EMBEDDING, "x": (raw, GGMLType.Q8_0)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA))
    assert np.abs(checkpoint.read("x") - original).max() < np.abs(original).max() / 127


def test_metadata_equal_the_package_reader(tmp_path: Path) -> None:
    metadata = LLAMA_METADATA | {
        "a.bool": True,
        "a.float": 0.5,
        "a.text": "naïve 😀",
        "a.numbers": [1, -2, 3],
        "a.floats": [0.25, -1.5],
        "a.texts": ["", "x", "日本"],
        "general.alignment": 4096,
    }
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": EMBEDDING}, metadata)
    header, reader = read_header(path), gguf.GGUFReader(path)
    expected = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.metadata == expected
    assert header.metadata["a.texts"] == ["", "x", "日本"]
    [tensor] = reader.tensors
    assert header.tensors["token_embd.weight"].start == tensor.data_offset
    assert header.tensors["token_embd.weight"].start == 4096


def test_shapes_are_in_hugging_face_order(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (np.zeros((8, 32), np.float32), GGMLType.F32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA)
    assert read_header(path).tensors["token_embd.weight"].shape == (8, 32)
    assert open_checkpoint(path).config["vocab_size"] == 8


def test_eos_ids_of_sequence_turn_and_message(tmp_path: Path) -> None:
    metadata = LLAMA_METADATA | {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 6,
    }
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": EMBEDDING}, metadata)
    assert open_checkpoint(path).eos_token_ids == {2, 5, 6}


@pytest.mark.parametrize("kind", ["eos", "eot", "eom"])
@pytest.mark.parametrize("value", ["x", [2], 1.5, True])
def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path, kind: str, value: Any) -> None:
    key = f"tokenizer.ggml.{kind}_token_id"
    tensors = {"token_embd.weight": EMBEDDING}
    path = write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA | {key: value})
    with pytest.raises(UnsupportedModelError, match=f"{key} .*should be an integer"):
        open_checkpoint(path)


def test_rope_factors_belong_to_the_configuration(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    tensors = {"token_embd.weight": EMBEDDING, "rope_freqs.weight": (factors, GGMLType.F32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA))
    fields = RopeFields.read(checkpoint.config)
    assert build_rope(fields, 8).inv_freq == pytest.approx((1.0, 0.1, 0.01 / 2.5, 0.001 / 8))
    assert checkpoint.tensor_names == {"token_embd.weight"}


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    metadata = LLAMA_METADATA | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(50)]}
    tensors = {"token_embd.weight": EMBEDDING, "output_norm.weight": EMBEDDING}
    return write_gguf(tmp_path / "whole.gguf", tensors, metadata).read_bytes()


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    data_start = min(info.start for info in read_header(path).tensors.values())
    for length in [*range(0, data_start, 41), data_start - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises((WeightsError, UnsupportedModelError), match="cut"):
            open_checkpoint(path)


def test_a_cut_tensor_is_named(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-1])
    with pytest.raises(WeightsError, match=r"output_norm\.weight .* cut off"):
        open_checkpoint(path)


def test_files_of_another_kind_are_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(UnsupportedModelError, match="version 1"):
        open_checkpoint(path)
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "none.gguf")


def test_an_unknown_tensor_type_is_refused_by_name(tmp_path: Path, whole: bytes) -> None:
    # The table's entry: name, number of sizes, two sizes, then the type.
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 16
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:at] + struct.pack("<I", 999) + whole[at + 4 :])
    with pytest.raises(UnsupportedModelError, match=r"output_norm\.weight .* 999"):
        open_checkpoint(path)


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": EMBEDDING,
        "numbers": (np.arange(32, dtype=np.int32), GGMLType.I32),
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA))
    with pytest.raises(UnsupportedModelError, match="numbers is stored as I32"):
        checkpoint.read("numbers")


def test_a_damaged_header_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole.replace(b"t17", b"\xff\xfe7"))
    with pytest.raises(WeightsError, match="damaged"):
        open_checkpoint(path)
    path.write_bytes(whole.replace(b"output_norm.weight", b"token_embd.weights"[:18]))
    assert "token_embd.weights" in open_checkpoint(path).tensor_names
    # Eight values are no whole block of 32.
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4
    patch = struct.pack("<QQI", 8, 8, GGMLType.Q8_0)
    path.write_bytes(whole[:at] + patch + whole[at + len(patch) :])
    with pytest.raises(WeightsError, match=r"output_norm\.weight .*whole blocks"):
        open_checkpoint(path)


def test_the_config_needs_no_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": EMBEDDING}, LLAMA_METADATA)
    assert read_config(path) == open_checkpoint(path).config
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == {"model_type": "llama"}
    assert read_config(tmp_path / "config.json") == {"model_type": "llama"}
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        read_config(tmp_path / "none.json")
