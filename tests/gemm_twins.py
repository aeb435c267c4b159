"""Formats of weights and rows by their definitions, in numpy, for the tests of packing and GEMM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F64:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random_source(source: str, shape: tuple[int, int], seed: int) -> tuple[bytes, F64]:
    """A checkpoint's rows in a source format, and their values [num_outputs, num_inputs]."""
    rng = np.random.default_rng(seed)
    num_outputs, num_inputs = shape
    if source in ("f32", "bf16", "f16"):
        x = rng.standard_normal(shape).astype(np.float32)
        if source == "f32":
            return x.tobytes(), x.astype(np.float64)
        if source == "f16":
            return x.astype(np.float16).tobytes(), x.astype(np.float16).astype(np.float64)
        return to_bf16(x).tobytes(), from_bf16(to_bf16(x))
    num_blocks = num_outputs * num_inputs // 32
    d = rng.uniform(0.01, 0.02, num_blocks) * rng.choice([-1, 1], num_blocks)
    d = d.astype(np.float16)
    m = rng.uniform(-0.2, 0.2, num_blocks).astype(np.float16)
    if source == "q8_0":
        codes = rng.integers(-128, 128, (num_blocks, 32)).astype(np.int8)
        values = d.astype(np.float64)[:, None] * codes
        raw = np.concatenate([d.view(np.uint8).reshape(-1, 2), codes.view(np.uint8)], axis=1)
        return raw.tobytes(), values.reshape(shape)
    codes = rng.integers(0, 16, (num_blocks, 32)).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    if source == "q4_0":
        raw = np.concatenate([d.view(np.uint8).reshape(-1, 2), packed], axis=1)
        values = d.astype(np.float64)[:, None] * (codes.astype(int) - 8)
        return raw.tobytes(), values.reshape(shape)
    scales = np.stack([d, m], axis=1).view(np.uint8)
    values = d.astype(np.float64)[:, None] * codes + m.astype(np.float64)[:, None]
    return np.concatenate([scales, packed], axis=1).tobytes(), values.reshape(shape)


def quantise(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Codes [num_rows, num_groups, 32], scales [num_rows, num_groups], in float32 arithmetic."""
    pad = -x.shape[1] % 32
    groups = np.pad(x, ((0, 0), (0, pad))).reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    divisor = np.where(largest > 1e-30, largest, np.float32(1))
    inverse = np.where(largest > 1e-30, np.float32(127) / divisor, np.float32(0))
    codes = np.rint(groups * inverse[:, :, None]).astype(np.int8)
    scales = np.where(largest > 1e-30, largest / np.float32(127), np.float32(0))
    return codes, scales.astype(np.float32)


def make_rows(num_rows: int, num_inputs: int) -> F32:
    x = np.random.default_rng(num_rows).standard_normal((num_rows, num_inputs))
    return (x * np.exp(x[:, :1])).astype(np.float32)
