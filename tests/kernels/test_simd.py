"""The vector operations, lane by lane, against numpy in higher precision."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[np.generic]
NUM_LANES = 16  # the widest; a multiple of all
FLOATS = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.5,
        2.5,
        -2.5,
        0.1,
        3.4e38,
        -3.4e38,
        1e-30,
        np.inf,
        -np.inf,
        np.nan,
        7,
        65504,
    ],
    np.float32,
)


def bf16_bits(x: Array) -> npt.NDArray[np.uint32]:
    """Nearest even by arithmetic on the bits: the definition, for numbers that are not NaN."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    half = np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
    return ((bits + half) >> np.uint64(16)).astype(np.uint32)


def bf16_values(bits: Array) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def lanes_of(x: Array) -> Array:
    """Padded with its first value to full vectors."""
    return np.concatenate([x, np.full(-len(x) % NUM_LANES, x[0], x.dtype)])


def unary(native: ModuleType, name: str, x: Array) -> npt.NDArray[np.float32]:
    y = np.full(len(x), 77.0, np.float32)
    native.simd.unary(name, x.astype(np.float32), y)
    return y


def test_a_module_says_what_it_is(native: ModuleType):
    assert native.__name__ == f"kvloom._native_{native.isa}"
    assert native.num_lanes in {4, 8, 16}


def test_exp2_is_accurate(native: ModuleType):
    x = lanes_of(np.linspace(-126, 127.4, 100_003).astype(np.float32))
    expected = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(unary(native, "exp2", x) / expected - 1)) <= 3e-7


def test_exp2_is_exact_at_integers_and_at_the_ends(native: ModuleType):
    x = lanes_of(np.arange(-126, 128).astype(np.float32))
    assert np.array_equal(
        unary(native, "exp2", x), np.exp2(x.astype(np.float64)).astype(np.float32)
    )
    ends = np.array([-150, -151, -1e30, -np.inf, 128, 1e30, np.inf, np.nan], np.float32)
    y = unary(native, "exp2", lanes_of(ends))[: len(ends)]
    assert np.array_equal(y, [0, 0, 0, 0, np.inf, np.inf, np.inf, np.nan], equal_nan=True)
    assert not np.any(np.signbit(y[:4]))


def test_exp2_of_what_is_subnormal_is_that_number_or_0(native: ModuleType):
    x = lanes_of(np.linspace(-150, -126, 3000).astype(np.float32))
    y, expected = unary(native, "exp2", x), np.exp2(x.astype(np.float64))
    assert np.all((y == 0) | (np.abs(y - expected) <= 3e-7 * expected + 2.0**-149))


def test_round_goes_to_the_nearest_even(native: ModuleType):
    x = lanes_of(
        np.array(
            [0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 126.5, -127.5, 2**22, -(2**22), 1e-9], np.float32
        )
    )
    assert np.array_equal(unary(native, "round", x), np.rint(x))


def test_abs_clears_the_sign(native: ModuleType):
    y = unary(native, "abs", FLOATS)
    assert np.array_equal(y, np.abs(FLOATS), equal_nan=True)
    assert not np.any(np.signbit(y[:2]))


@pytest.mark.parametrize("name", ["max", "min"])
def test_max_and_min_give_the_second_of_a_pair_with_nan(native: ModuleType, name: str):
    a, b = (pair.ravel().copy() for pair in np.meshgrid(FLOATS, FLOATS))
    y = np.zeros_like(a)
    native.simd.binary(name, a, b, y)
    expected = np.where(a > b, a, b) if name == "max" else np.where(a < b, a, b)
    assert np.array_equal(y, expected, equal_nan=True)


def test_fma_rounds_once_or_twice(native: ModuleType):
    """The function computes a * b + a."""
    a, b = np.random.default_rng(1).standard_normal((2, 1024)).astype(np.float32)
    y = np.zeros_like(a)
    native.simd.binary("fma", a, b, y)
    exact = a.astype(np.float64) * b + a
    error = np.abs(y - exact)
    assert np.all(error <= 2.0**-24 * (np.abs(exact) + np.abs(a.astype(np.float64) * b)))


def test_reductions_go_over_one_vector(native: ModuleType):
    x = np.random.default_rng(2).standard_normal((64, native.num_lanes)).astype(np.float32)
    sums = unary(native, "reduce_add", x.ravel()).reshape(x.shape)
    assert np.allclose(sums, x.astype(np.float64).sum(axis=1, keepdims=True), atol=1e-5)
    assert np.array_equal(
        unary(native, "reduce_max", x.ravel()).reshape(x.shape),
        np.repeat(x.max(axis=1, keepdims=True), native.num_lanes, axis=1),
    )
    tree = x.copy()
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    assert np.array_equal(sums[:, :1], tree)  # the documented order, to the last bit


def test_bf16_rounds_to_the_nearest_even(native: ModuleType):
    random = np.random.default_rng(3).integers(0, 2**32, 64 * 1024, np.uint32).view(np.float32)
    ties = (np.arange(0x3F000000, 0x3F200000, 0x8000, np.uint32)).view(np.float32)
    x = lanes_of(np.concatenate([FLOATS, random, ties]))
    y = np.zeros(len(x), np.uint16)
    native.simd.to_bf16(x, y)
    is_normal = np.abs(x) >= np.finfo(np.float32).tiny
    assert np.array_equal(y[is_normal], bf16_bits(x)[is_normal])
    assert np.all(np.isnan(bf16_values(y[np.isnan(x)])))
    assert np.all(
        np.abs(bf16_values(y[np.abs(x) < np.finfo(np.float32).tiny])) <= np.finfo(np.float32).tiny
    )


def test_all_bf16_numbers_are_read_exactly(native: ModuleType):
    bits = np.arange(2**16, dtype=np.uint16)
    y = np.zeros(len(bits), np.float32)
    native.simd.from_bf16(bits, y)
    assert np.array_equal(y, bf16_values(bits), equal_nan=True)


def test_all_f16_numbers_are_read_exactly(native: ModuleType):
    bits = np.arange(2**16, dtype=np.uint16)
    y = np.zeros(len(bits), np.float32)
    native.simd.from_f16(bits, y)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(y, expected, equal_nan=True)
    assert np.array_equal(np.signbit(y), np.signbit(expected))


def test_bf16_pairs_hold_low_below_high(native: ModuleType):
    lo, hi = np.random.default_rng(4).standard_normal((2, 512)).astype(np.float32)
    y = np.zeros(len(lo), np.uint32)
    native.simd.to_bf16_pairs(lo, hi, y)
    assert np.array_equal(y, bf16_bits(lo) | bf16_bits(hi) << np.uint32(16))


def test_bytes_are_widened(native: ModuleType):
    x = np.arange(256, dtype=np.uint8)
    y = np.zeros(256, np.int32)
    native.simd.from_bytes(False, x, y)
    assert np.array_equal(y, x)
    native.simd.from_bytes(True, x, y)
    assert np.array_equal(y, x.view(np.int8))


def test_store_i8_saturates(native: ModuleType):
    x = lanes_of(
        np.array([0, 1, -1, 127, 128, -128, -129, 2**31 - 1, -(2**31), 300, -300], np.int32)
    )
    y = np.zeros(len(x), np.int8)
    native.simd.to_i8(x, y)
    assert np.array_equal(y, np.clip(x, -128, 127))


def test_dot_bf16_adds_two_products_per_lane(native: ModuleType):
    generator = np.random.default_rng(5)
    values = generator.standard_normal((4, 4096)).astype(np.float32)
    a_lo, a_hi, b_lo, b_hi = (bf16_bits(v) for v in values)
    before = generator.standard_normal(4096).astype(np.float32)
    acc = before.copy()
    native.simd.add_dot_bf16(acc, a_lo | a_hi << np.uint32(16), b_lo | b_hi << np.uint32(16))
    lo = bf16_values(a_lo) * bf16_values(b_lo)
    hi = bf16_values(a_hi) * bf16_values(b_hi)
    # Two additions round a sum of at most this size, and each product may be rounded, too.
    bound = 4 * 2.0**-24 * (np.abs(before) + np.abs(lo) + np.abs(hi))
    assert np.all(np.abs(acc - (before + lo + hi)) <= bound)


@pytest.mark.parametrize(("name", "largest"), [("u8s8", 255), ("u7s8", 127)])
def test_dots_of_bytes_are_exact(native: ModuleType, name: str, largest: int):
    generator = np.random.default_rng(6)
    a = generator.integers(0, largest + 1, (1024, 4)).astype(np.uint8)
    b = generator.integers(-128, 128, (1024, 4)).astype(np.int8)
    a[:64] = largest  # the sums that would overflow 16 bits
    b[:32], b[32:64] = -128, 127
    before = generator.integers(-1000, 1000, 1024).astype(np.int32)
    acc = before.copy()
    native.simd.add_dot_bytes(name, acc, a.view(np.uint32).ravel(), b.view(np.uint32).ravel())
    assert np.array_equal(acc, before + (a.astype(np.int32) * b).sum(axis=1))


def test_partial_vectors_touch_no_more_than_they_should(native: ModuleType):
    x = np.arange(1, native.num_lanes + 1, dtype=np.float32)
    for n in range(native.num_lanes + 1):
        y = np.full(native.num_lanes, 9.0, np.float32)
        native.simd.partial(x, n, -1.0, y)
        assert np.array_equal(y, np.where(np.arange(native.num_lanes) < n, x, 9.0))


def test_arrays_of_other_lengths_or_types_are_refused(native: ModuleType):
    x = np.zeros(NUM_LANES, np.float32)
    with pytest.raises(ValueError, match="multiple of num_lanes"):
        native.simd.unary("exp2", x[:3].copy(), x[:3].copy())
    with pytest.raises(ValueError, match="one length"):
        native.simd.unary("exp2", x, np.zeros(2 * NUM_LANES, np.float32))
    with pytest.raises(TypeError):
        native.simd.unary("exp2", x.astype(np.float64), x)
    with pytest.raises(TypeError):
        native.simd.unary("exp2", np.zeros(2 * NUM_LANES, np.float32)[::2], x)
    with pytest.raises(ValueError, match="no such function"):
        native.simd.unary("cosine", x, x.copy())
