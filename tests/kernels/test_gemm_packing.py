"""Packed weights and rows lie as format.hpp and pack_rows.hpp say, and lose nothing."""

from __future__ import annotations

import itertools
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_twins import F64, from_bf16, make_rows, quantise, random_source, to_bf16


def tiles(num_rows: int, max_rows: int) -> list[tuple[int, int]]:
    num_tiles = -(-num_rows // max_rows)
    starts = [num_rows * tile // num_tiles for tile in range(num_tiles + 1)]
    return list(itertools.pairwise(starts))


@pytest.mark.parametrize("num_inputs", [32, 40, 96])
def test_packed_rows_lie_as_defined(native: ModuleType, num_inputs: int) -> None:
    for num_rows in (1, 2, 11, 12, 13, 25, 31):
        x = make_rows(num_rows, num_inputs)
        padded = np.pad(x, ((0, 0), (0, -num_inputs % 32)))
        codes, scales = quantise(x)
        sums = 128.0 * codes.sum(axis=2, dtype=np.float32)
        f32, bf16, s8 = b"", b"", b""
        for start, end in tiles(num_rows, native.gemm.max_tile_rows):
            f32 += padded[start:end].T.tobytes()
            pairs = to_bf16(padded[start:end]).reshape(end - start, -1, 2)
            bf16 += pairs.transpose(1, 0, 2).tobytes()
            for group in range(codes.shape[1]):
                quads = codes[start:end, group].reshape(end - start, 8, 4)
                s8 += quads.transpose(1, 0, 2).tobytes()
                s8 += scales[start:end, group].tobytes() + sums[start:end, group].tobytes()
        assert native.gemm.pack_rows("f32", x) == f32
        assert native.gemm.pack_rows("bf16", x) == bf16
        assert native.gemm.pack_rows("s8", x) == s8


def lanes_of(num_outputs: int, is_gated: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Panel and lane of each output."""
    row = np.arange(num_outputs)
    if not is_gated:
        return row // 32, row % 32
    size = num_outputs // 2
    return row % size // 16, row % size % 16 + 16 * (row // size)


def unpack(panels: bytes, weight: str, num_groups: int) -> F64:
    """Values [num_panels, 32 lanes, inputs] of a packed weight."""
    raw = np.frombuffer(panels, np.uint8)
    if weight == "f32":
        values = raw.view(np.float32).reshape(-1, num_groups * 32, 32).transpose(0, 2, 1)
        return values.astype(float)
    if weight == "bf16":
        pairs = from_bf16(raw.view(np.uint16)).reshape(-1, num_groups * 16, 32, 2)
        return pairs.transpose(0, 2, 1, 3).reshape(-1, 32, num_groups * 32)
    if weight == "q8":
        groups = raw.reshape(-1, num_groups, 1088)
        codes = groups[..., :1024].reshape(-1, num_groups, 8, 32, 4).astype(float) - 128
        d = np.ascontiguousarray(groups[..., 1024:]).view(np.float16).astype(float)
        values = codes * d[:, :, None, :, None]
    else:
        groups = raw.reshape(-1, num_groups, 640)
        both = groups[..., :512].reshape(-1, num_groups, 4, 32, 4)
        codes = np.concatenate([both & 15, both >> 4], axis=2).astype(float)
        d = np.ascontiguousarray(groups[..., 512:576]).view(np.float16).astype(float)
        m = np.ascontiguousarray(groups[..., 576:]).view(np.float16).astype(float)
        values = codes * d[:, :, None, :, None] + m[:, :, None, :, None]
    # [panel, group, quad, lane, 4]
    return values.transpose(0, 3, 1, 2, 4).reshape(-1, 32, num_groups * 32)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("source", "weight"),
    [
        ("f32", "f32"),
        ("bf16", "f32"),
        ("f16", "f32"),
        ("bf16", "bf16"),
        ("q8_0", "q8"),
        ("q4_0", "q4"),
        ("q4_1", "q4"),
    ],
)
def test_packing_is_exact(native: ModuleType, source: str, weight: str, is_gated: bool) -> None:
    for num_outputs, num_inputs in ((32, 32), (40, 96), (80, 64)):
        data, values = random_source(source, (num_outputs, num_inputs), seed=num_outputs)
        packed = native.gemm.GemmWeight(weight, is_gated, num_outputs, num_inputs)
        rows = np.frombuffer(data, np.uint8).reshape(num_outputs, -1)
        # In two parts, as stacked parameters are.
        packed.pack(source, 24, rows[24:].reshape(-1))
        packed.pack(source, 0, rows[:24].reshape(-1))
        got = unpack(packed.panels(), weight, num_inputs // 32)
        panel, lane = lanes_of(num_outputs, is_gated)
        np.testing.assert_array_equal(got[panel, lane], values)
        got[panel, lane] = 0
        assert not got.any()  # padding means zero


def test_rounding_to_bf16(native: ModuleType) -> None:
    data, values = random_source("f32", (32, 32), seed=3)
    packed = native.gemm.GemmWeight("bf16", False, 32, 32)
    packed.pack("f32", 0, np.frombuffer(data, np.uint8))
    expected = from_bf16(to_bf16(values.astype(np.float32)))
    np.testing.assert_array_equal(unpack(packed.panels(), "bf16", 1)[0], expected)


def test_every_scale_of_q4_0_keeps_its_offset(native: ModuleType) -> None:
    """-8 d is exact for all finite d below 8192, subnormals included."""
    d = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    d = d[np.abs(d.astype(np.float32)) < 8192]
    num_outputs = len(d)
    raw = np.zeros((num_outputs, 18), np.uint8)
    raw[:, :2] = d.view(np.uint8).reshape(-1, 2)
    packed = native.gemm.GemmWeight("q4", False, num_outputs, 32)
    packed.pack("q4_0", 0, raw.reshape(-1))
    got = unpack(packed.panels(), "q4", 1).reshape(-1, 32)[:num_outputs]
    np.testing.assert_array_equal(got, np.repeat(-8.0 * d.astype(float)[:, None], 32, axis=1))
