"""The reference's operations, each against a second way to compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from eager_backends import make_ops
from kvloom.dtypes import DType
from kvloom.ops.base import Parameter, PositionScale, Rope, Routing

pytestmark = pytest.mark.usefixtures("each_backend")


def parameter(values: object) -> Parameter:
    array = np.array(values, np.float32)
    return Parameter("weight", array.shape, DType.FLOAT32, (), value=array)


def test_embedding_gives_zeros_for_rows_of_other_ranks() -> None:
    table = parameter([[1, 2], [3, 4], [5, 6]])
    ids = np.array([4, 5, 6, 7, 0])
    out = make_ops().embedding(ids, table, first_row=4)
    np.testing.assert_array_equal(out, [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]])


def test_linear_and_its_bias() -> None:
    weight = parameter([[1, 2], [3, 4], [5, 6]])  # [out = 3, in = 2]
    x = np.array([[1, 10]], np.float32)
    np.testing.assert_array_equal(make_ops().linear(x, weight), [[21, 43, 65]])
    with_bias = make_ops().linear(x, weight, parameter([1, 0, -1]))
    np.testing.assert_array_equal(with_bias, [[22, 43, 64]])


def test_rms_norm_over_the_last_axis() -> None:
    x = np.array([[[3.0, 4.0], [0.0, 0.0]]], np.float32)  # mean square 12.5 and 0
    out = make_ops().rms_norm(x, parameter([1.0, 2.0]), 1e-5)
    root = math.sqrt(12.5 + 1e-5)
    np.testing.assert_allclose(out, [[[3 / root, 8 / root], [0, 0]]], rtol=1e-6)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2.0)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "tanh": math.tanh,
}
GATES = [-30.0, -2.0, -0.5, 0.0, 0.7, 3.0, 6.9, 7.5, 40.0]
UPS = [2.0, -1.0, 4.0, 1.0, 0.5, -7.5, 9.0, 1.0, -1.0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_every_value(name: str) -> None:
    out = make_ops().activation(np.array([GATES], np.float32), name)
    np.testing.assert_allclose(out[0], [ACTIVATIONS[name](g) for g in GATES], atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "tanh"])
def test_gated_activation_applies_to_the_first_half(name: str) -> None:
    out = make_ops().gated_activation(np.array([GATES + UPS], np.float32), name)
    expected = [ACTIVATIONS[name](g) * u for g, u in zip(GATES, UPS, strict=True)]
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


def test_clamped_swiglu_bounds_the_gate_above_and_up_on_both_sides() -> None:
    out = make_ops().gated_activation(np.array([GATES + UPS], np.float32), "swiglu_clamped")
    expected = [
        (max(min(u, 7.0), -7.0) + 1.0) * min(g, 7.0) * sigmoid(1.702 * min(g, 7.0))
        for g, u in zip(GATES, UPS, strict=True)
    ]
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


def test_clamped_swiglu_has_no_form_without_a_gate() -> None:
    with pytest.raises(ValueError, match="needs a gate"):
        make_ops().activation(np.zeros((1, 2), np.float32), "swiglu_clamped")


def test_silu_of_very_negative_values_does_not_overflow() -> None:
    out = make_ops().gated_activation(np.array([[-1e30, 1.0]], np.float32), "silu")
    assert out[0, 0] == 0.0


def test_split_heads_takes_q_then_k_then_v() -> None:
    x = np.arange(2 * 16, dtype=np.float32).reshape(2, 16)
    q, k, v = make_ops().split_heads(x, num_heads=4, num_kv_heads=2, head_size=2)
    np.testing.assert_array_equal(q, x[:, :8].reshape(2, 4, 2))
    np.testing.assert_array_equal(k, x[:, 8:12].reshape(2, 2, 2))
    np.testing.assert_array_equal(v, x[:, 12:].reshape(2, 2, 2))


def test_rope_is_a_rotation_of_complex_pairs() -> None:
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((5, 2, 8)), rng.standard_normal((5, 1, 8))
    positions, rope = np.array([0, 1, 7, 100, 8191]), Rope((1.0, 0.1, 0.003), 1.2)
    rotated = make_ops().rope(q.astype(np.float32), k.astype(np.float32), positions, rope)
    for before, after in zip((q, k), rotated, strict=True):
        pairs = before[..., :3] + 1j * before[..., 3:6]
        turned = 1.2 * pairs * np.exp(1j * np.outer(positions, rope.inv_freq))[:, None]
        np.testing.assert_allclose(after[..., :3], turned.real, atol=1e-5)
        np.testing.assert_allclose(after[..., 3:6], turned.imag, atol=1e-5)
        np.testing.assert_array_equal(after[..., 6:], before[..., 6:].astype(np.float32))


def test_one_step_may_use_several_ropes() -> None:
    ops, x, positions = make_ops(), np.ones((1, 1, 2), np.float32), np.array([1])
    first, _ = ops.rope(x, x, positions, Rope((1.0,)))
    second, _ = ops.rope(x, x, positions, Rope((0.5,)))
    np.testing.assert_allclose(first[0, 0, 0], math.cos(1.0) - math.sin(1.0), rtol=1e-6)
    np.testing.assert_allclose(second[0, 0, 0], math.cos(0.5) - math.sin(0.5), rtol=1e-6)


def test_select_rows_repeats_and_reorders() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(make_ops().select_rows(x, np.array([2, 0, 2])), x[[2, 0, 2]])


@pytest.mark.parametrize("shape", [(5, 12), (5, 3, 4)])
def test_element_wise_operations(shape: tuple[int, ...]) -> None:
    ops, rng = make_ops(), np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    per_row = rng.standard_normal((*shape[:-1], 1)).astype(np.float32)
    weight = parameter(rng.standard_normal(shape[-1]))
    expected = {
        "add": (ops.add(a, b), a.astype(float) + b),
        "multiply": (ops.multiply(a, b), a.astype(float) * b),
        "multiply by one per row": (ops.multiply(a, per_row), a.astype(float) * per_row),
        "multiply_columns": (ops.multiply_columns(a, weight), a.astype(float) * weight.value),
        "multiply all columns": (ops.multiply_columns(a, parameter([0.3])), a * 0.3),
        "scale": (ops.scale(a, -2.5), a * -2.5),
        "soft_cap": (ops.soft_cap(a, 0.7), 0.7 * np.tanh(a / 0.7)),
    }
    for name, (out, wanted) in expected.items():
        assert out.dtype == np.float32, name
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-7, err_msg=name)


def test_rms_norm_without_a_weight() -> None:
    out = make_ops().rms_norm(np.array([[3.0, 4.0]], np.float32), None, 0.5)
    np.testing.assert_allclose(out, [[3 / math.sqrt(13), 4 / math.sqrt(13)]], rtol=1e-6)


def test_layer_norm_centres_and_uses_the_population_variance() -> None:
    x = np.array([[1.0, 2.0, 6.0]], np.float32)  # mean 3; squares of -2, -1, 3 average 14 / 3
    out = make_ops().layer_norm(x, parameter([1.0, 2.0, -1.0]), 0.25)
    root = math.sqrt(14 / 3 + 0.25)
    np.testing.assert_allclose(out, [[-2 / root, -2 / root, -3 / root]], rtol=1e-6)


def test_layer_norm_of_large_equal_values_is_zero() -> None:
    x = np.full((1, 8), 3e4, np.float32)  # a variance as mean of squares less squared mean errs
    np.testing.assert_array_equal(make_ops().layer_norm(x, parameter([1.0] * 8), 1e-5), 0.0)


def test_match_rms_takes_the_size_of_another_value() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0], [0.03, 0.04]], np.float32)
    target = np.array([[6.0, 8.0], [1.0, 2.0], [3.0, -4.0]], np.float32)
    # The last one's size is 0.05 / sqrt(2), which the floor raises to 0.1.
    grown = math.sqrt(12.5) / 0.1
    out = make_ops().match_rms(x, target, 0.1)
    np.testing.assert_allclose(out, [[6, 8], [0, 0], [0.03 * grown, 0.04 * grown]], rtol=1e-6)


def test_gaussian_top_keeps_what_lies_above_the_cutoff() -> None:
    x = np.array([[0.0, 0.0, 4.0, 8.0]], np.float32)  # mean 3, deviation sqrt(11)
    cutoff = 3 + 0.2 * math.sqrt(11)
    out = make_ops().gaussian_top(x, 0.2)
    np.testing.assert_allclose(out, [[0, 0, 4 - cutoff, 8 - cutoff]], atol=1e-6)


def test_head_linear_has_a_matrix_per_head() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((5, 3, 4)), rng.standard_normal((3, 2, 4))
    out = make_ops().head_linear(x.astype(np.float32), parameter(weight))
    for head in range(3):
        np.testing.assert_allclose(out[:, head], x[:, head] @ weight[head].T, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4, 9), (4, 3, 9), (0, 3, 9)])
def test_split_and_concat_are_inverse(shape: tuple[int, ...]) -> None:
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    a, b, c = make_ops().split(x, (2, 6, 1))
    np.testing.assert_array_equal(a, x[..., :2])
    np.testing.assert_array_equal(b, x[..., 2:8])
    np.testing.assert_array_equal(c, x[..., 8:])
    np.testing.assert_array_equal(make_ops().concat([a, b, c]), x)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_heads_and_merge_heads_are_inverse(num_tokens: int) -> None:
    x = np.arange(num_tokens * 12, dtype=np.float32).reshape(num_tokens, 12)
    heads = make_ops().heads(x, 4)
    assert heads.shape == (num_tokens, 4, 3)
    np.testing.assert_array_equal(heads[:, 1], x[:, 3:6])
    np.testing.assert_array_equal(make_ops().merge_heads(heads), x)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotate_is_rope_of_one_value(is_interleaved: bool) -> None:
    ops, rng = make_ops(), np.random.default_rng(3)
    x, positions = rng.standard_normal((5, 2, 8)).astype(np.float32), np.array([0, 1, 7, 9, 8191])
    rope = Rope((1.0, 0.1, 0.003), 1.2, is_interleaved)
    rotated = ops.rotate(x, positions, rope)
    np.testing.assert_array_equal(ops.rope(x, x, positions, rope), [rotated, rotated])
    real, imaginary = (x[..., :6:2], x[..., 1:6:2]) if is_interleaved else (x[..., :3], x[..., 3:6])
    turns = 1.2 * np.exp(1j * np.outer(positions, rope.inv_freq))[:, None]
    turned = (real + 1j * imaginary) * turns
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    if is_interleaved:
        expected = np.stack([turned.real, turned.imag], axis=-1).reshape(5, 2, 6)
    np.testing.assert_allclose(rotated[..., :6], expected, atol=1e-5)
    np.testing.assert_array_equal(rotated[..., 6:], x[..., 6:])


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2)])
def test_scale_by_position_grows_in_steps(shape: tuple[int, ...]) -> None:
    positions = np.array([0, 6, 7, 79])  # (position + 1) / 8 is 1/8, 7/8, 1, 10
    out = make_ops().scale_by_position(
        np.ones(shape, np.float32), positions, PositionScale(0.1, 8.0)
    )
    factors = [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(11)]
    expected = np.array(factors).reshape(4, *[1] * (len(shape) - 1))
    np.testing.assert_allclose(out, np.broadcast_to(expected, shape), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_values_stay_in_their_row(value: float) -> None:
    ops = make_ops()
    x = np.array([[1.0, 2.0, 3.0, 4.0], [value, value, value, value]], np.float32)
    weight = parameter(np.eye(4) - 0.5)
    for out in (
        ops.linear(x, weight),
        ops.rms_norm(x, parameter([1.0] * 4), 1e-5),
        ops.gated_activation(x, "silu"),
        ops.add(x, -x),
        ops.multiply(x, x),
        ops.multiply_columns(x, parameter([2.0] * 4)),
        ops.scale(x, 1e30),
        ops.soft_cap(x, 5.0),
        ops.activation(x, "gelu_tanh"),
        ops.gated_activation(x, "swiglu_clamped"),
        ops.gaussian_top(x, 0.5),
        ops.match_rms(x, x, 1e-5),
        ops.layer_norm(x, parameter([1.0] * 4), 1e-5),
        ops.merge_heads(ops.head_linear(ops.heads(x, 2), parameter(np.ones((2, 2, 2))))),
        ops.merge_heads(ops.rotate(ops.heads(x, 2), np.array([1, 2]), Rope((1.0,)))),
        ops.scale_by_position(x, np.array([1, 2]), PositionScale(1.0, 2.0)),
        ops.route(x, Routing(2, "softmax", is_normalised=True)),
        ops.route(x, Routing(2, "sigmoid", is_normalised=True)),
    ):
        assert np.isfinite(out[0]).all()
        assert out.shape[0] == 2
