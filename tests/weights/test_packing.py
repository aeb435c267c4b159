"""Rows reach the packer as they are stored: the same values as when read in float32."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize, quantize

from gguf_files import LLAMA_METADATA, write_gguf
from kvloom.dtypes import DType
from kvloom.errors import WeightsError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import Parameter, StoredRows
from kvloom.ops.source import Add, Reshape, Slice, Source, Step, SwapAxes
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.loader import RowPacking, load_weights
from kvloom.weights.packing import packed_format, stored_rows
from kvloom.weights.steps import block_steps, move_rows, rows_of_units

METADATA = {
    **LLAMA_METADATA,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.vocab_size": 40,
}
SHAPES = {
    "token_embd.weight": (40, 64),
    "output_norm.weight": (64,),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.ffn_gate.weight": (128, 64),
    "blk.0.ffn_up.weight": (128, 64),
    "blk.0.ffn_down.weight": (64, 128),
}


class Packed:
    """What a backend would keep of a matrix."""

    nbytes = 0

    def __init__(self, packed: str, parts: Iterable[StoredRows]) -> None:
        self.packed = packed
        self.formats = []
        self.values = []
        for part in parts:
            self.formats.append(part.format)
            self.values.append(values_of(part))


def values_of(rows: StoredRows) -> np.ndarray:
    if rows.format == "BF16":
        return (rows.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if rows.format in ("F32", "F16"):
        return rows.data.copy().view({"F32": "<f4", "F16": "<f2"}[rows.format]).astype(np.float32)
    return dequantize(rows.data, GGMLType[rows.format])


def write(path: Path, kinds: dict[str, GGMLType], other: GGMLType) -> Path:
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in SHAPES.items():
        kind = GGMLType.F32 if len(shape) == 1 else kinds.get(name.split(".")[-2], other)
        values = rng.standard_normal(shape).astype(np.float32)
        tensors[name] = (quantize(values, kind), kind)
    return write_gguf(path, tensors, METADATA)


def load(path: Path, rank: TensorParallelRank, dtype: str | None) -> Model:
    checkpoint = open_checkpoint(path)
    dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
    model = build_model(checkpoint.config, rank, dtypes)
    packing = RowPacking(dtype, lambda _, packed, parts: Packed(packed, parts)) if dtype else None
    load_weights(model, checkpoint, lambda _, array: array, packing)
    return model


RANKS = [TensorParallelRank(0, 1), TensorParallelRank(0, 2), TensorParallelRank(1, 2)]


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_rows_are_the_values_that_reading_gives(
    tmp_path: Path, kind: str, dtype: str, rank: TensorParallelRank
) -> None:
    path = write(tmp_path / "model.gguf", {}, GGMLType[kind])
    expected, stored = load(path, rank, None), load(path, rank, dtype)
    for wanted, found in zip(expected.parameters, stored.parameters, strict=True):
        if len(wanted.shape) == 1:
            np.testing.assert_array_equal(found.value, wanted.value)
        else:
            np.testing.assert_array_equal(np.concatenate(found.value.values), wanted.value)
    # Stacked parameters keep the sources' format, with which nothing is dequantised.
    [qkv] = [p.value for p in stored.parameters if p.name.endswith("qkv")]
    moved = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q8_0"}
    if dtype == "auto" and kind in moved:
        assert (qkv.packed, qkv.formats) == (moved[kind][:2], [moved[kind]] * 3)


def test_sources_of_different_formats_take_the_widest(tmp_path: Path) -> None:
    kinds = {"attn_q": GGMLType.Q8_0, "ffn_up": GGMLType.BF16}
    model = load(write(tmp_path / "model.gguf", kinds, GGMLType.Q4_1), RANKS[0], "auto")
    packed = {p.name.rpartition(".")[2]: p.value for p in model.parameters if len(p.shape) == 2}
    assert (packed["qkv"].packed, packed["qkv"].formats) == ("BF16", ["F32"] * 3)
    assert (packed["gate_up"].packed, packed["gate_up"].formats) == ("BF16", ["F32", "BF16"])
    assert (packed["down_proj"].packed, packed["o_proj"].packed) == ("Q4", "Q4")


def test_a_misshaped_matrix_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", {}, GGMLType.Q4_0)
    checkpoint = open_checkpoint(path)
    config = {**checkpoint.config, "intermediate_size": 96}
    model = build_model(config, RANKS[0], ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    packing = RowPacking("auto", lambda _, packed, parts: Packed(packed, parts))
    with pytest.raises(WeightsError, match="ffn_gate"):
        load_weights(model, checkpoint, lambda _, array: array, packing)


@pytest.mark.parametrize(
    ("stored", "dtype", "has_whole_blocks", "packed"),
    [
        (["F32"], "auto", True, "F32"),
        (["F16"], "auto", True, "BF16"),
        (["BF16"], "auto", False, "BF16"),
        (["Q4_0", "Q4_1"], "auto", True, "Q4"),
        (["Q8_0"], "auto", True, "Q8"),
        (["Q8_0"], "auto", False, "BF16"),
        (["Q8_0", "Q4_0"], "auto", True, "BF16"),
        (["Q8_0", "F32"], "auto", True, "F32"),
        (["Q6_K"], "auto", True, "BF16"),
        (["Q4_0"], "bfloat16", True, "BF16"),
        (["Q4_0"], "float32", True, "F32"),
    ],
)
def test_what_formats_become(
    stored: list[str], dtype: str, has_whole_blocks: bool, packed: str
) -> None:
    assert packed_format(stored, dtype, has_whole_blocks=has_whole_blocks) == packed


SHAPE = (4, 6, 128)
MOVES: dict[str, tuple[Step, ...]] = {
    "nothing": (),
    "rows": (Slice(1, 2, 5),),
    "every other row": (Slice(1, 1, 6, 2),),
    "columns": (Slice(2, 32, 96),),
    "one of the stack": (Slice(0, 2, 3), Reshape((6, 128))),
    "halves": (Reshape((4, 3, 2, 128)), SwapAxes(1, 2), Reshape(SHAPE)),
    "columns of flat rows": (Reshape((24, 128)), Slice(1, 0, 64)),
}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", MOVES)
def test_rows_moved_as_they_are_stored_hold_the_values_moved(name: str, kind: str) -> None:
    values = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)
    raw = quantize(values, GGMLType[kind]).view(np.uint8)
    expected = dequantize(quantize(values, GGMLType[kind]), GGMLType[kind])
    rows = stored_rows("x", kind, SHAPE, raw.reshape(-1))
    units = move_rows(rows, Source("x", SHAPE, MOVES[name]))
    found = values_of(rows_of_units(units.reshape(-1, units.shape[-1]), kind, 0))
    for step in MOVES[name]:
        if isinstance(step, Slice):
            indices = range(step.start, step.stop, step.step)
            expected = np.take(expected, indices, axis=step.axis)
        elif isinstance(step, Reshape):
            expected = np.reshape(expected, step.shape)
        elif isinstance(step, SwapAxes):
            expected = np.swapaxes(expected, step.first, step.second)
    np.testing.assert_array_equal(found, expected.reshape(-1, expected.shape[-1]))


@pytest.mark.parametrize(
    "steps",
    [
        (Slice(2, 16, 48),),
        (Slice(2, 0, 128, 2),),
        (SwapAxes(1, 2),),
        (Reshape((4, 12, 64)),),
        (Reshape((24, 128)), SwapAxes(0, 1)),
        (Slice(2, 0, 64), Reshape((4, 3, 128))),
        (Add(1.0),),
    ],
    ids=str,
)
def test_steps_that_blocks_cannot_take(steps: tuple[Step, ...]) -> None:
    assert block_steps(Source("x", SHAPE, steps)) is None


def test_rows_that_are_not_made_of_whole_blocks() -> None:
    assert block_steps(Source("x", (4, 48))) is None


def test_a_transposed_matrix_moves_as_it_is_stored() -> None:
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    rows = stored_rows("x", "F16", (3, 4), values.view(np.uint8).reshape(-1))
    moved = move_rows(rows, Source("x", (3, 4), (SwapAxes(0, 1),)))
    found = rows_of_units(moved, "F16", 7)
    assert (found.num_inputs, found.first_row) == (3, 7)
    np.testing.assert_array_equal(values_of(found), values.T)


def test_float_values_become_rows_from_any_layout() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (values, values.T, values[:, ::2]):
        rows = rows_of_units(array, "F32", 0)
        assert rows.num_inputs == array.shape[1]
        np.testing.assert_array_equal(values_of(rows), array)


def test_a_parameter_is_filled_with_what_the_packer_returns(tmp_path: Path) -> None:
    seen: list[tuple[Parameter, Any]] = []

    def pack_rows(parameter: Parameter, packed: Any, parts: Iterable[StoredRows]) -> Packed:
        seen.append((parameter, value := Packed(packed, parts)))
        return value

    path = write(tmp_path / "model.gguf", {}, GGMLType.Q8_0)
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, RANKS[0], ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    load_weights(model, checkpoint, lambda _, array: array, RowPacking("auto", pack_rows))
    assert seen
    assert all(parameter.value is value for parameter, value in seen)
