"""Routing and experts of the reference, token by token from their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from eager_backends import make_ops
from kvloom.dtypes import DType
from kvloom.ops.base import Activation, Experts, Parameter, Routing

pytestmark = pytest.mark.usefixtures("each_backend")

# Logarithms, so that softmax gives exact tenths: 0.4, 0.1, 0.3, 0.2.
TENTHS = np.log(np.array([[4.0, 1.0, 3.0, 2.0]])).astype(np.float32)


def parameter(values: object) -> Parameter:
    array = np.array(values, np.float32)
    return Parameter("weight", array.shape, DType.FLOAT32, (), value=array)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_softmax_is_over_all_experts() -> None:
    out = make_ops().route(TENTHS, Routing(2, "softmax"))
    np.testing.assert_allclose(out, [[0, 2, 0.4, 0.3]], rtol=1e-6)


def test_weights_may_be_normalised_and_multiplied() -> None:
    out = make_ops().route(TENTHS, Routing(2, "softmax", is_normalised=True, factor=2.5))
    np.testing.assert_allclose(out, [[0, 2, 2.5 * 4 / 7, 2.5 * 3 / 7]], rtol=1e-6)


def test_softmax_of_the_chosen_alone() -> None:
    out = make_ops().route(TENTHS, Routing(3, "softmax_of_chosen"))
    np.testing.assert_allclose(out, [[0, 2, 3, 4 / 9, 3 / 9, 2 / 9]], rtol=1e-6)


def test_sigmoid_weights_and_a_bias_that_only_chooses() -> None:
    logits = np.array([[2.0, -1.0, 0.5, 0.0]], np.float32)
    bias = parameter([0.0, 0.9, 0.0, 0.3])  # merits 0.88, 1.17, 0.62, 0.8
    out = make_ops().route(logits, Routing(2, "sigmoid"), bias)
    np.testing.assert_allclose(out, [[1, 0, sigmoid(-1), sigmoid(2)]], rtol=1e-6)
    normal = make_ops().route(logits, Routing(2, "sigmoid", is_normalised=True), bias)
    total = sigmoid(-1) + sigmoid(2)
    np.testing.assert_allclose(normal[0, 2:], [sigmoid(-1) / total, sigmoid(2) / total], rtol=1e-6)


def test_sigmoids_that_are_all_zero_are_not_divided_by_zero() -> None:
    logits = np.full((1, 4), -200.0, np.float32)
    out = make_ops().route(logits, Routing(2, "sigmoid", is_normalised=True))
    np.testing.assert_array_equal(out, [[0, 1, 0, 0]])


def test_small_sigmoids_keep_their_ratio() -> None:
    logits = np.array([[-30.0, -31.0]], np.float32)
    out = make_ops().route(logits, Routing(2, "sigmoid", is_normalised=True))
    np.testing.assert_allclose(out[0, 2:], [sigmoid(1.0), sigmoid(-1.0)], rtol=1e-4)


def test_of_equal_experts_the_first_is_taken() -> None:
    out = make_ops().route(np.zeros((1, 5), np.float32), Routing(3, "softmax"))
    np.testing.assert_array_equal(out[0, :3], [0, 1, 2])


# Three groups of two experts. Probabilities: the best expert is in group 1, the best pair is 2.
GROUPED = np.log(np.array([[10.0, 11.0, 30.0, 1.0, 24.0, 24.0]])).astype(np.float32)


@pytest.mark.parametrize(
    ("num_chosen_groups", "group_score", "expected"),
    [
        (1, "max", [2, 3]),
        (1, "sum_of_two", [4, 5]),
        (2, "max", [2, 4]),
        (2, "sum_of_two", [2, 4]),
        (3, "max", [2, 4]),
    ],
)
def test_experts_come_from_the_best_groups(
    num_chosen_groups: int, group_score: Any, expected: list[int]
) -> None:
    routing = Routing(2, "softmax", False, 1.0, 3, num_chosen_groups, group_score)
    out = make_ops().route(GROUPED, routing)
    np.testing.assert_array_equal(out[0, :2], expected)
    np.testing.assert_allclose(out[0, 2:], np.exp(GROUPED[0, expected]) / 100, rtol=1e-5)


def test_the_bias_takes_part_in_choosing_groups() -> None:
    routing = Routing(1, "sigmoid", num_groups=2, num_chosen_groups=1, group_score="sum_of_two")
    logits = np.array([[3.0, 3.0, 0.0, 0.1]], np.float32)
    out = make_ops().route(logits, routing, parameter([0.0, 0.0, 0.0, 1.5]))
    np.testing.assert_allclose(out, [[3, sigmoid(0.1)]], rtol=1e-6)


def brute_route(
    logits: np.ndarray, routing: Routing, bias: np.ndarray | None
) -> list[dict[int, float]]:
    """Weight by expert of each token, by sorting lists of Python floats."""
    result = []
    for row in logits.astype(float):
        exps = [math.exp(x) for x in row]
        scores = {
            "softmax": [e / sum(exps) for e in exps],
            "softmax_of_chosen": list(row),
            "sigmoid": [sigmoid(x) for x in row],
        }[routing.score]
        merits = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        size = len(row) // routing.num_groups
        groups = [list(range(g * size, (g + 1) * size)) for g in range(routing.num_groups)]
        counted = 1 if routing.group_score == "max" else 2

        def group_merit(group: list[int], merits=merits, counted=counted) -> float:
            return sum(sorted((merits[e] for e in group), reverse=True)[:counted])

        groups = sorted(groups, key=group_merit, reverse=True)[: routing.num_chosen_groups]
        candidates = [e for group in groups for e in group]
        chosen = sorted(candidates, key=lambda e: merits[e], reverse=True)
        chosen = chosen[: routing.num_experts_per_token]
        weights = [scores[e] for e in chosen]
        if routing.score == "softmax_of_chosen":
            weights = [math.exp(w) for w in weights]
        if routing.is_normalised or routing.score == "softmax_of_chosen":
            weights = [w / sum(weights) for w in weights]
        result.append({e: w * routing.factor for e, w in zip(chosen, weights, strict=True)})
    return result


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("group_score", ["max", "sum_of_two"])
@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_random_routes(score: Any, group_score: Any, num_groups: int, is_biased: bool) -> None:
    rng = np.random.default_rng(num_groups)
    logits = (2 * rng.standard_normal((50, 16))).astype(np.float32)
    bias = rng.standard_normal(16).astype(np.float32) * 0.3 if is_biased else None
    for is_normalised, count, factor in ((False, 4, 1.0), (True, 6, 16.0), (True, 1, 1.0)):
        chosen_groups = 1 if num_groups == 1 else 2
        routing = Routing(
            count, score, is_normalised, factor, num_groups, chosen_groups, group_score
        )
        out = make_ops().route(logits, routing, None if bias is None else parameter(bias))
        assert out.shape == (50, 2 * count)
        assert out.dtype == np.float32
        for row, expected in zip(out, brute_route(logits, routing, bias), strict=True):
            assert row[:count].tolist() == list(expected)
            np.testing.assert_allclose(row[count:], list(expected.values()), rtol=1e-5)


def random_experts(
    activation: Activation, *, has_bias: bool, weighs_input: bool, sizes: tuple[int, int, int]
) -> Experts:
    num_experts, hidden_size, inner_size = sizes
    rng = np.random.default_rng(5)

    def random(*shape: int) -> Parameter:
        return parameter(rng.standard_normal(shape))

    return Experts(
        gate_up=random(num_experts, 2 * inner_size, hidden_size),
        down=random(num_experts, hidden_size, inner_size),
        activation=activation,
        gate_up_bias=random(num_experts, 2 * inner_size) if has_bias else None,
        down_bias=random(num_experts, hidden_size) if has_bias else None,
        weighs_input=weighs_input,
    )


def brute_expert(x: np.ndarray, expert: int, experts: Experts) -> np.ndarray:
    gate_up = experts.gate_up.value[expert].astype(float) @ x
    if experts.gate_up_bias is not None:
        gate_up = gate_up + experts.gate_up_bias.value[expert]
    gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
    if experts.activation == "silu":
        inner = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    y: np.ndarray = experts.down.value[expert].astype(float) @ inner
    return y if experts.down_bias is None else y + experts.down_bias.value[expert]


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_experts_are_summed_by_weight(
    num_tokens: int, activation: Activation, has_bias: bool, weighs_input: bool
) -> None:
    experts = random_experts(
        activation, has_bias=has_bias, weighs_input=weighs_input, sizes=(6, 8, 5)
    )
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, 8)).astype(np.float32)
    ids = np.array([rng.permutation(6)[:3] for _ in range(num_tokens)]).reshape(num_tokens, 3)
    weights = rng.uniform(0.1, 2.0, (num_tokens, 3))
    routes = np.concatenate([ids, weights], axis=-1).astype(np.float32)
    expected = np.zeros((num_tokens, 8))
    for token in range(num_tokens):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if weighs_input:
                expected[token] += brute_expert(weight * x[token], expert, experts)
            else:
                expected[token] += weight * brute_expert(x[token], expert, experts)
    out = make_ops().experts(x, routes, experts)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-4)


def test_a_non_finite_token_stays_alone() -> None:
    ops = make_ops()
    experts = random_experts("silu", has_bias=True, weighs_input=False, sizes=(4, 3, 2))
    x = np.array([[1.0, 2.0, 3.0], [np.nan, np.inf, -np.inf]], np.float32)
    logits = np.array([[0.1, 0.2, 0.3, 0.4], [np.nan, np.inf, 0.0, -np.inf]], np.float32)
    out = ops.experts(x, ops.route(logits, Routing(2, "softmax", is_normalised=True)), experts)
    assert np.isfinite(out[0]).all()
    assert not np.isfinite(out[1]).any()
