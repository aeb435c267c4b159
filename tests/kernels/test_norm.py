"""Norms and element-wise operations against their definitions in float64."""

import numpy as np
import pytest

from kvloom.ops.base import Parameter
from kvloom.ops.reference_ops import ReferenceOps

SIZES = (1, 2, 15, 16, 31, 32, 33, 64, 96, 100, 576, 577)
EPS = 1e-5
# Sums of `size` squares in float32, a root, a division and two products.
RELATIVE_BOUND = 1e-6


def rows_of(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return (rng.normal(size=shape) * rng.lognormal(size=(shape[0], 1))).astype(np.float32)


def normalised(native, x, weight, eps=EPS):
    y = np.full_like(x, np.nan)
    native.elementwise.rms_norm(x, weight, eps, y)
    return y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 19])
def test_rms_norm_by_definition(native, num_rows, size):
    x, weight = rows_of(num_rows, size), rows_of(1, size, seed=1)[0]
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(normalised(native, x, weight), expected, rtol=RELATIVE_BOUND)


def test_rms_norm_keeps_eps_out_of_the_mean(native):
    """Values far below sqrt(eps) shrink by sqrt(eps) alone."""
    x = np.full((1, 64), 1e-6, np.float32)
    y = normalised(native, x, np.ones(64, np.float32), eps=1e-2)
    np.testing.assert_allclose(y, x / 0.1, rtol=1e-5)


def test_rms_norm_in_place(native):
    x, weight = rows_of(5, 100), rows_of(1, 100, seed=1)[0]
    expected = normalised(native, x, weight)
    native.elementwise.rms_norm(x, weight, EPS, x)
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 31])
@pytest.mark.parametrize("size", [33, 64, 576])
def test_a_row_does_not_depend_on_the_others(native, num_rows, size):
    x, weight = rows_of(num_rows, size), rows_of(1, size, seed=1)[0]
    together = normalised(native, x, weight)
    for i in range(num_rows):
        np.testing.assert_array_equal(normalised(native, x[i : i + 1], weight)[0], together[i])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_nan_stays_in_its_row(native, bad, place):
    x, weight = rows_of(3, 100), np.ones(100, np.float32)
    expected = normalised(native, x, weight)
    x[1, place] = bad
    found = normalised(native, x, weight)
    assert np.isnan(found[1, place])
    np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("row_format", ["f32", "bf16", "s8"])
@pytest.mark.parametrize("num_rows", [1, 4, 12, 13, 25])
@pytest.mark.parametrize("size", [1, 31, 32, 40, 96, 576])
def test_the_fused_norm_packs_what_the_norm_gives(native, row_format, num_rows, size):
    """Bit for bit: packing the norm's rows, or letting the norm pack them."""
    x, weight = rows_of(num_rows, size), rows_of(1, size, seed=1)[0]
    row_bytes = {"f32": 128, "bf16": 64, "s8": 40}[row_format] * -(-size // 32)
    fused, apart = np.full((2, row_bytes * num_rows), 0xAA, np.uint8)
    native.elementwise.pack_rows(x, weight, EPS, row_format, fused)
    native.elementwise.pack_rows(normalised(native, x, weight), weight, None, row_format, apart)
    np.testing.assert_array_equal(fused, apart)


@pytest.mark.parametrize("size", [1, 17, 8191, 8192, 20_000])
def test_add(native, size):
    a, b = rows_of(2, size)
    out = np.empty_like(a)
    native.elementwise.add(a, b, out)
    np.testing.assert_array_equal(out, a + b)
    native.elementwise.add(a, b, a)
    np.testing.assert_array_equal(a, out)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 15, 16, 40, 100])
def test_gated_activation_equals_the_reference(native, activation, size):
    x = rows_of(6, 2 * size)
    x[0, :size] = np.linspace(-40.0, 40.0, size)
    out = np.full((6, size), np.nan, np.float32)
    native.elementwise.gated_activation(x, activation, out)
    expected = ReferenceOps(None, None).gated_activation(x, activation)
    # erf's approximation is within 1.5e-7, and times the gate.
    bound = 4e-7 * np.abs(x[:, :size] * x[:, size:]) + 1e-30
    assert (np.abs(out - expected) <= bound).all()


def test_select_rows(native):
    x = rows_of(9, 33)
    rows = np.array([8, 0, 3, 3], np.int32)
    out = np.empty((4, 33), np.float32)
    native.elementwise.select_rows(x, rows, out)
    np.testing.assert_array_equal(out, x[rows])


def test_equal_to_the_reference(native):
    x, weight = rows_of(4, 576), rows_of(1, 576, seed=1)[0]
    parameter = Parameter("norm", (576,), None, (), value=weight)
    expected = ReferenceOps(None, None).rms_norm(x, parameter, EPS)
    np.testing.assert_allclose(normalised(native, x, weight), expected, rtol=2e-6)


def test_wrong_shapes_are_errors(native):
    x, weight = rows_of(2, 32), np.ones(32, np.float32)
    ops = native.elementwise
    calls = [
        lambda: ops.rms_norm(x, weight[:31], EPS, np.empty_like(x)),
        lambda: ops.rms_norm(x, weight, EPS, np.empty((3, 32), np.float32)),
        lambda: ops.rms_norm(x[:, :0].copy(), weight[:0], EPS, x[:, :0].copy()),
        lambda: ops.pack_rows(x, weight, EPS, "f32", np.empty(255, np.uint8)),
        lambda: ops.pack_rows(x, weight, EPS, "f64", np.empty(256, np.uint8)),
        lambda: ops.add(weight, weight[:31], np.empty(32, np.float32)),
        lambda: ops.gated_activation(x, "silu", np.empty((2, 17), np.float32)),
        lambda: ops.gated_activation(x, "relu", np.empty((2, 16), np.float32)),
        lambda: ops.select_rows(x, np.array([2], np.int32), np.empty((1, 32), np.float32)),
        lambda: ops.select_rows(x, np.array([-1], np.int32), np.empty((1, 32), np.float32)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"."):
            call()
    with pytest.raises(TypeError):
        ops.add(weight, weight, np.empty(32))
