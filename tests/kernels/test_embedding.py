"""Embedding reads rows of packed tables, which are packed here from the words of format.hpp."""

import numpy as np
import pytest

PANEL = 32
GROUP = 32


def padded(values):
    """Rows and columns up to multiples of 32, filled with zeros."""
    num_rows, size = values.shape
    full = np.zeros((-(-num_rows // PANEL) * PANEL, -(-size // GROUP) * GROUP), values.dtype)
    full[:num_rows, :size] = values
    return full


def in_panels(values, unit):
    """[num_panels, num_groups, GROUP / unit, PANEL, unit] of padded values."""
    full = padded(values)
    cut = full.reshape(-1, PANEL, full.shape[1] // GROUP, GROUP // unit, unit)
    return cut.transpose(0, 2, 3, 1, 4)


def per_group(values):
    """f16 [num_panels, num_groups, PANEL] of one value per row and group."""
    num_rows, num_groups = values.shape
    full = np.zeros((-(-num_rows // PANEL) * PANEL, num_groups), np.float16)
    full[:num_rows] = values
    return full.reshape(-1, PANEL, num_groups).transpose(0, 2, 1)


def as_bytes(array):
    """The bytes of each group, [num_panels, num_groups, n]."""
    raw = np.ascontiguousarray(array)
    return raw.reshape(*raw.shape[:2], -1).view(np.uint8)


def f32_table(rng, num_rows, size):
    values = rng.normal(size=(num_rows, size)).astype(np.float32)
    return values, [in_panels(values, 1)]


def bf16_table(rng, num_rows, size):
    bits = rng.normal(size=(num_rows, size)).astype(np.float32).view(np.uint32) >> 16
    values = (bits << 16).view(np.float32)
    return values, [in_panels(bits.astype(np.uint16), 2)]


def q8_table(rng, num_rows, size):
    codes = rng.integers(0, 256, (num_rows, size)).astype(np.uint8)
    scales = rng.normal(size=(num_rows, -(-size // GROUP))).astype(np.float16)
    scales[0, 0] = 3e-7  # a subnormal
    of_values = np.repeat(scales, GROUP, axis=1)[:, :size].astype(np.float32)
    values = of_values * (codes.astype(np.float32) - 128)
    return values, [in_panels(codes, 4), per_group(scales)]


def q4_table(rng, num_rows, size):
    codes = rng.integers(0, 16, (num_rows, size)).astype(np.uint8)
    shape = (num_rows, -(-size // GROUP))
    scales, offsets = rng.normal(size=(2, *shape)).astype(np.float16)
    wide = np.repeat(np.stack([scales, offsets]), GROUP, axis=2)[:, :, :size].astype(np.float32)
    values = wide[0] * codes.astype(np.float32) + wide[1]
    quads = in_panels(codes, 4)
    packed = quads[:, :, :4] | quads[:, :, 4:] << 4
    return values, [packed, per_group(scales), per_group(offsets)]


TABLES = {"f32": f32_table, "bf16": bf16_table, "q8": q8_table, "q4": q4_table}


def make_table(kind, num_rows, size):
    """The values of a table and its packed bytes."""
    values, parts = TABLES[kind](np.random.default_rng([num_rows, size]), num_rows, size)
    return values, np.concatenate([as_bytes(part) for part in parts], axis=-1).ravel()


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("size", [1, 32, 40, 96, 576])
@pytest.mark.parametrize("num_rows", [1, 32, 50, 96])
def test_every_row(native, kind, num_rows, size):
    values, packed = make_table(kind, num_rows, size)
    token_ids = np.arange(num_rows, dtype=np.int32)[::-1].copy()
    out = np.full((num_rows, size), np.nan, np.float32)
    native.elementwise.embedding(kind, packed, num_rows, 0, token_ids, out)
    np.testing.assert_array_equal(out, values[::-1])


@pytest.mark.parametrize("kind", TABLES)
def test_ids_of_other_shards_are_zeros(native, kind):
    values, packed = make_table(kind, 50, 64)
    token_ids = np.array([99, 100, 149, 150, 0, -(2**31), 2**31 - 1, 120], np.int32)
    out = np.full((8, 64), np.nan, np.float32)
    native.elementwise.embedding(kind, packed, 50, 100, token_ids, out)
    expected = np.zeros((8, 64), np.float32)
    expected[[1, 2, 7]] = values[[0, 49, 20]]
    np.testing.assert_array_equal(out, expected)


def test_no_tokens(native):
    _, packed = make_table("f32", 1, 32)
    empty = np.empty((0, 32), np.float32)
    native.elementwise.embedding("f32", packed, 1, 0, np.empty(0, np.int32), empty)


def test_wrong_shapes_are_errors(native):
    _, packed = make_table("q4", 32, 32)
    ids, out = np.zeros(2, np.int32), np.empty((2, 32), np.float32)
    for call in (
        lambda: native.elementwise.embedding("q4", packed[1:], 32, 0, ids, out),
        lambda: native.elementwise.embedding("q4", packed, 33, 0, ids, out),
        lambda: native.elementwise.embedding("q8", packed, 32, 0, ids, out),
        lambda: native.elementwise.embedding("q5", packed, 32, 0, ids, out),
        lambda: native.elementwise.embedding("q4", packed, 32, -1, ids, out),
        lambda: native.elementwise.embedding("q4", packed, 0, 0, ids, out),
        lambda: native.elementwise.embedding("q4", packed, 32, 0, ids[:1], out),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
