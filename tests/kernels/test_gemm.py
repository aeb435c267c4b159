"""The GEMM against float64 twins: what each format can lose is computed, not guessed.

A twin takes the operands as the kernel does (rounded or quantised, by the definitions in
csrc/include/kvloom/format.hpp and pack_rows.hpp) and multiplies them in float64. What is left is
the rounding of float32 sums: at most (number of additions) x 2^-24 x (sum of the terms' sizes).
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest

from best_twin import keep_best, read_best
from gemm_twins import F32, F64, from_bf16, make_rows, quantise, random_source, to_bf16

EPS = 2.0**-24  # half of the last place of 1
NUMS_ROWS = [*range(1, 14), 31, 64, 65, 200]
SIZES = [(32, 32), (96, 64), (40, 576), (96, 96)]  # (num_outputs, num_inputs)
# (weight, rows, source): all pairs that the kernels multiply
PAIRS = [
    ("f32", "f32", "f32"),
    ("bf16", "bf16", "bf16"),
    ("q8", "s8", "q8_0"),
    ("q4", "s8", "q4_0"),
    ("q4", "s8", "q4_1"),
    ("q8", "bf16", "q8_0"),
    ("q4", "bf16", "q4_1"),
]


def operands(x: F32, weights: F64, rows: str, is_dequantised: bool) -> tuple[F64, F64]:
    """What the kernel multiplies: x [num_rows, num_inputs], w [num_outputs, num_inputs]."""
    if rows == "f32":
        return x.astype(np.float64), weights
    if rows == "bf16":
        if is_dequantised:
            weights = from_bf16(to_bf16(weights.astype(np.float32)))
        return from_bf16(to_bf16(x)), weights
    codes, scales = quantise(x)
    values = codes * scales.astype(np.float64)[:, :, None]
    return values.reshape(len(x), -1)[:, : x.shape[1]], weights


def product(x: F64, weights: F64) -> tuple[F64, F64]:
    """X W^T in float64, and how far a float32 sum may be from it.

    Each of K products and K sums may err by EPS of the sum of sizes.
    """
    sizes = np.abs(x) @ np.abs(weights).T
    return x @ weights.T, (x.shape[1] + 8) * EPS * sizes


def make_weight(
    native: ModuleType, weight: str, source: str, shape: tuple[int, int], is_gated: bool = False
) -> tuple[object, F64]:
    data, values = random_source(source, shape, seed=sum(shape))
    packed = native.gemm.GemmWeight(weight, is_gated, *shape)
    packed.pack(source, 0, np.frombuffer(data, np.uint8))
    return packed, values


def options(native: ModuleType, rows: str, **values: object) -> object:
    result = native.gemm.GemmOptions()
    result.row_format = rows
    for name, value in values.items():
        setattr(result, name, value)
    return result


def run(native: ModuleType, weight: object, x: F32, width: int, opts: object) -> F32:
    out = np.full((len(x), width), np.nan, np.float32)
    native.gemm.run_to_rows(weight, x, out, opts)
    return out


def q4_bound(x: F64) -> F64:
    """The bound for Q4 by S8, [num_rows, 1]: sums within a group of 32 are exact.

    The terms are d x code and m, which may be larger than their sum.
    """
    sizes = (0.02 * 15 + 0.2) * np.abs(x).sum(axis=1, keepdims=True)
    return (x.shape[1] // 32 + 8) * EPS * sizes


# ---- Products ----


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
def test_products_equal_the_twin(
    native: ModuleType, weight: str, rows: str, source: str, shape: tuple[int, int]
) -> None:
    packed, values = make_weight(native, weight, source, shape)
    for num_rows in NUMS_ROWS:
        x = make_rows(num_rows, shape[1])
        x_used, w_used = operands(x, values, rows, weight in ("q8", "q4"))
        expected, bound = product(x_used, w_used)
        if rows == "s8" and weight == "q4":
            bound = q4_bound(x_used)
        got = run(native, packed, x, shape[0], options(native, rows))
        assert (np.abs(got - expected) <= bound).all()


@pytest.mark.parametrize(("weight", "source"), [("f32", "f32"), ("bf16", "bf16")])
def test_inputs_that_are_no_multiple_of_32(native: ModuleType, weight: str, source: str) -> None:
    for num_inputs in (1, 7, 40):
        packed, values = make_weight(native, weight, source, (40, num_inputs))
        x = make_rows(5, num_inputs)
        x_used, w_used = operands(x, values, weight, False)
        expected, bound = product(x_used, w_used)
        got = run(native, packed, x, 40, options(native, weight))
        assert (np.abs(got - expected) <= bound).all()


@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
def test_a_row_does_not_depend_on_other_rows(
    native: ModuleType, weight: str, rows: str, source: str
) -> None:
    packed, _ = make_weight(native, weight, source, (40, 96))
    x = make_rows(67, 96)
    alone = np.concatenate(
        [run(native, packed, x[i : i + 1], 40, options(native, rows)) for i in range(67)]
    )
    for num_rows in [*range(2, 14), 25, 66, 67]:
        together = run(native, packed, x[:num_rows], 40, options(native, rows))
        assert together.tobytes() == alone[:num_rows].tobytes()


@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
def test_neither_order_nor_number_of_items_matters(
    native: ModuleType, weight: str, rows: str, source: str
) -> None:
    packed, _ = make_weight(native, weight, source, (416, 576))
    x = make_rows(500, 576)  # more than one block of rows
    expected = run(native, packed, x, 416, options(native, rows))
    for num_threads in (2, 7):
        opts = options(native, rows, num_threads=num_threads, is_reversed=True)
        assert run(native, packed, x, 416, opts).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
def test_a_nan_stays_in_its_row(native: ModuleType, weight: str, rows: str, source: str) -> None:
    packed, _ = make_weight(native, weight, source, (32, 64))
    for bad in (np.nan, np.inf, -np.inf):
        x = make_rows(5, 64)
        clean = run(native, packed, x, 32, options(native, rows))
        x[3, 40] = bad
        got = run(native, packed, x, 32, options(native, rows))
        assert not np.isfinite(got[3]).any()
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))


def test_no_rows(native: ModuleType) -> None:
    packed, _ = make_weight(native, "bf16", "bf16", (40, 64))
    x = np.zeros((0, 64), np.float32)
    assert run(native, packed, x, 40, options(native, "bf16")).shape == (0, 40)


# ---- Epilogues ----


@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
@pytest.mark.parametrize("num_outputs", [40, 64])
def test_bias_and_residual(
    native: ModuleType, weight: str, rows: str, source: str, num_outputs: int
) -> None:
    packed, _ = make_weight(native, weight, source, (num_outputs, 64))
    bias = np.linspace(-3, 3, num_outputs, dtype=np.float32)
    for num_rows in (1, 13):
        x = make_rows(num_rows, 64)
        plain = run(native, packed, x, num_outputs, options(native, rows))
        biased = run(native, packed, x, num_outputs, options(native, rows, bias=bias))
        np.testing.assert_array_equal(biased, plain + bias)
        residual = make_rows(num_rows, num_outputs)
        out = residual.copy()
        native.gemm.run_to_rows(packed, x, out, options(native, rows, bias=bias, epilogue="add"))
        np.testing.assert_array_equal(out, residual + biased)


@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
@pytest.mark.parametrize("num_outputs", [2, 31, 32, 33, 416])
def test_the_best_of_each_panel(
    native: ModuleType, weight: str, rows: str, source: str, num_outputs: int
) -> None:
    packed, _ = make_weight(native, weight, source, (num_outputs, 64))
    bias = np.linspace(-3, 3, num_outputs, dtype=np.float32)
    for num_rows in (1, 3, 13, 65):
        x = make_rows(num_rows, 64)
        plain = run(native, packed, x, num_outputs, options(native, rows, bias=bias))
        opts = options(native, rows, bias=bias, epilogue="best", num_threads=2)
        greatest, lanes = read_best(run(native, packed, x, num_outputs, opts))
        expected = keep_best(plain)
        np.testing.assert_array_equal(greatest, expected[0])
        np.testing.assert_array_equal(lanes, expected[1])


@pytest.mark.parametrize("num_outputs", [20, 80])
def test_the_best_among_equal_and_strange_outputs(native: ModuleType, num_outputs: int) -> None:
    """An identity: outputs are the inputs. The first of equal ones; NaN wherever there is one."""
    packed = native.gemm.GemmWeight("f32", False, num_outputs, num_outputs)
    identity = np.eye(num_outputs, dtype=np.float32)
    packed.pack("f32", 0, identity.view(np.uint8).ravel())
    rng = np.random.default_rng(num_outputs)
    x = rng.integers(-3, 3, (200, num_outputs)).astype(np.float32)
    x[1] = -5.0
    x[2] = -0.0
    x[2, 7::3] = 0.0
    bias = np.zeros(num_outputs, np.float32)
    greatest, lanes = read_best(run(native, packed, x, num_outputs, best_of_f32(native, bias)))
    np.testing.assert_array_equal(greatest, keep_best(x)[0])
    np.testing.assert_array_equal(lanes, keep_best(x)[1])
    for strange in (np.nan, np.inf, -np.inf):  # in a bias: no sum with other inputs
        bias[:] = np.where(np.arange(num_outputs) % 40 == 19, strange, 0.0)
        greatest, _ = read_best(run(native, packed, x, num_outputs, best_of_f32(native, bias)))
        np.testing.assert_array_equal(greatest, keep_best(x + bias)[0])


def best_of_f32(native: ModuleType, bias: F32) -> object:
    return options(native, "f32", bias=bias, epilogue="best")


def test_one_output_has_no_room_for_a_best(native: ModuleType) -> None:
    packed, _ = make_weight(native, "f32", "f32", (1, 64))
    with pytest.raises(ValueError, match="two outputs"):
        run(native, packed, make_rows(1, 64), 1, options(native, "f32", epilogue="best"))


def activated(name: str, x: F64) -> F64:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return np.vectorize(lambda v: 0.5 * v * math.erfc(-v / math.sqrt(2)))(x)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [16, 40, 64])
def test_gated_activation(native: ModuleType, activation: str, size: int) -> None:
    """The products are taken as they are, from a plain weight; only the activation is judged."""
    data, _ = random_source("f32", (2 * size, 64), seed=size)
    both = [native.gemm.GemmWeight("f32", is_gated, 2 * size, 64) for is_gated in (False, True)]
    for weight in both:
        weight.pack("f32", 0, np.frombuffer(data, np.uint8))
    bias = np.linspace(-1, 1, 2 * size, dtype=np.float32)
    for num_rows in (1, 3, 13):
        x = make_rows(num_rows, 64)
        plain = run(native, both[0], x, 2 * size, options(native, "f32", bias=bias))
        gate, up = np.split(plain.astype(np.float64), 2, axis=1)
        expected = activated(activation, gate) * up
        opts = options(native, "f32", bias=bias, activation=activation, epilogue="gated_store")
        got = run(native, both[1], x, size, opts)
        # 4e-7 of exp2, 1.5e-7 of erfc and a few roundings, relative to gate x up
        assert (np.abs(got - expected) <= 8e-7 * np.abs(gate * up) + 1e-30).all()


@pytest.mark.parametrize("packed_format", ["f32", "bf16", "s8"])
@pytest.mark.parametrize(("weight", "rows", "source"), PAIRS)
def test_gated_values_are_packed_as_rows_are(
    native: ModuleType, weight: str, rows: str, source: str, packed_format: str
) -> None:
    for size in (16, 32, 40, 96):
        packed, _ = make_weight(native, weight, source, (2 * size, 64), is_gated=True)
        for num_rows in (1, 12, 31):
            x = make_rows(num_rows, 64)
            opts = options(native, rows, epilogue="gated_store", num_threads=2)
            gated = run(native, packed, x, size, opts)
            opts.epilogue = "gated_pack"
            got = native.gemm.run_to_packed(packed, x, packed_format, opts)
            assert got == native.gemm.pack_rows(packed_format, gated)


# ---- Refusals ----


def test_wrong_calls_are_errors(native: ModuleType) -> None:
    gemm = native.gemm
    weight = gemm.GemmWeight("q8", False, 40, 64)
    x, out = np.zeros((2, 64), np.float32), np.zeros((2, 40), np.float32)
    for call in (
        lambda: gemm.GemmWeight("q5", False, 32, 32),
        lambda: gemm.GemmWeight("f32", True, 33, 32),
        lambda: gemm.GemmWeight("f32", False, 0, 32),
        lambda: weight.pack("f32", 0, np.zeros(64 * 4, np.uint8)),
        lambda: weight.pack("q8_0", 40, np.zeros(68, np.uint8)),
        lambda: weight.pack("q8_0", -1, np.zeros(68, np.uint8)),
        lambda: weight.pack("q8_0", 0, np.zeros(67, np.uint8)),
        lambda: gemm.run_to_rows(weight, x, out, options(native, "f32")),
        lambda: gemm.run_to_rows(weight, x[:, :32].copy(), out, options(native, "s8")),
        lambda: gemm.run_to_rows(weight, x, out[:1], options(native, "s8")),
        lambda: gemm.run_to_rows(weight, x, out, options(native, "s8", epilogue="gated_store")),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - each text names what is wrong
            call()
