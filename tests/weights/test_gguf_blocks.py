"""Blocks moved into another format hold the values that the gguf package reads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from gguf_files import LLAMA_METADATA, write_gguf
from kvloom.weights.gguf import GGUFCheckpoint
from kvloom.weights.gguf_blocks import CONVERSIONS, PIECE_BLOCKS, convert_blocks

BYTES_BEFORE_CODES = {"Q5_0": 2, "Q4_K": 4}


def make_blocks(kind: str, num_blocks: int) -> np.ndarray:
    """[num_blocks, block_bytes]: any codes, scales of either sign and many sizes, 0 among them."""
    rng = np.random.default_rng(num_blocks)
    blocks = rng.integers(0, 256, (num_blocks, CONVERSIONS[kind].block_bytes), np.uint8)
    num_scales = BYTES_BEFORE_CODES[kind] // 2
    scales = rng.normal(size=(num_blocks, num_scales)) * 10.0 ** rng.integers(
        -6, 2, (num_blocks, 1)
    )
    scales[0] = 0
    blocks[:, : 2 * num_scales] = scales.astype("<f2").view(np.uint8)
    return blocks


def read(raw: np.ndarray, kind: str) -> np.ndarray:
    return gguf.dequantize(raw.reshape(1, -1), GGMLType[kind]).reshape(-1, 32)


@pytest.mark.parametrize("num_blocks", [1, 3, PIECE_BLOCKS, PIECE_BLOCKS + 1])
def test_q5_0_in_q8_0_keeps_every_value(num_blocks: int) -> None:
    raw = make_blocks("Q5_0", num_blocks)
    made = convert_blocks(raw, CONVERSIONS["Q5_0"])
    np.testing.assert_array_equal(read(made, "Q8_0"), read(raw, "Q5_0"))


def f16_error(values: np.ndarray) -> np.ndarray:
    """The most that rounding to f16 changes: half the distance to the next."""
    return np.spacing(np.abs(values).astype(np.float16)).astype(np.float32) / 2


@pytest.mark.parametrize("num_blocks", [2, PIECE_BLOCKS + 1])
def test_q4_k_in_q4_1_differs_by_the_rounding_of_scales_alone(num_blocks: int) -> None:
    raw = make_blocks("Q4_K", num_blocks)
    made = convert_blocks(raw, CONVERSIONS["Q4_K"]).reshape(-1, 20)
    found, expected = read(made, "Q4_1"), read(raw, "Q4_K")
    scales, minima = made[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    codes = np.concatenate([made[:, 4:] & 15, made[:, 4:] >> 4], axis=1)
    # A value is scale x code + minimum, and both are rounded; float32's own rounding is far less.
    bound = 1.001 * (codes * f16_error(scales) + f16_error(minima)) + 1e-6 * np.abs(expected)
    assert np.all(np.abs(found - expected) <= bound)
    assert np.any(found != expected)


def test_codes_of_q4_k_are_kept() -> None:
    """With d = 1, dmin = 0 and all s = 1, a value is its code."""
    raw = make_blocks("Q4_K", 5)
    raw[:, :4] = np.array([1, 0], "<f2").view(np.uint8)
    raw[:, 4:16] = np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)
    made = convert_blocks(raw, CONVERSIONS["Q4_K"])
    np.testing.assert_array_equal(read(made, "Q4_1"), read(raw, "Q4_K"))
    assert set(np.unique(read(made, "Q4_1"))) == set(range(16))


@pytest.mark.parametrize(("kind", "stored"), [("Q5_0", "Q8_0"), ("Q4_K", "Q4_1")])
def test_a_file_gives_rows_in_the_format_it_names(tmp_path: Path, kind: str, stored: str) -> None:
    raw = make_blocks(kind, 6).reshape(3, -1)  # 3 rows of 2 blocks
    tensors = {
        "token_embd.weight": (np.zeros((8, 32), np.float32), GGMLType.F32),
        "x": (raw, GGMLType[kind]),
    }
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA))
    rows = checkpoint.read_rows("x")
    assert checkpoint.stored_format("x") == rows.format == stored
    made = convert_blocks(raw.reshape(-1, CONVERSIONS[kind].block_bytes), CONVERSIONS[kind])
    np.testing.assert_array_equal(rows.data, made.reshape(3, -1))
    assert rows.num_inputs == {"Q5_0": 64, "Q4_K": 512}[kind]
