"""Every operation of the vocabulary on the native backend: what the reference computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvloom.ops.base import PositionScale, Rope
from kvloom.ops.isa import built_isas, can_run
from kvloom.runner.collectives import SingleRankCommunicator
from native_runner import make_backend
from op_models import SIZES, OpModel, make_parameter, make_step, run_native, run_reference

ISAS = [isa for isa in built_isas() if can_run(isa)]


@dataclass(frozen=True)
class Case:
    """Shapes of inputs (a row's) and of weights, and the operations."""

    inputs: dict[str, int]
    weights: dict[str, tuple[int, ...]]
    compute: Callable[..., Any]


def _views(ops: Any, v: Any) -> Any:
    """Columns of columns, put together in another order."""
    a, b = ops.split(v["x"], (24, 31))
    first, second = ops.split(a, (5, 19))
    return ops.concat([second, b, first])


def _split_of_heads(ops: Any, v: Any) -> Any:
    a, b, c = ops.split(ops.heads(v["x"], 3), (4, 1, 6))
    scaled = ops.multiply(a, b)
    return ops.merge_heads(ops.concat([c, scaled, b]))


def _broadcast_of_view(ops: Any, v: Any) -> Any:
    x, column = ops.split(v["x"], (32, 1))
    return ops.multiply(x, column)


def _norm_of_view(ops: Any, v: Any) -> Any:
    _, x = ops.split(v["x"], (7, 33))
    return ops.linear(ops.rms_norm(x, v["norm"], 1e-5), v["w"])


def _projected_view(ops: Any, v: Any) -> Any:
    _, x = ops.split(v["x"], (7, 33))
    return ops.linear(x, v["w"])


def _product_of_own_column(ops: Any, v: Any) -> Any:
    """The result may not be written where the column that scales it lies."""
    doubled = ops.scale(v["x"], 2.0)
    column, _ = ops.split(doubled, (1, 39))
    return ops.multiply(doubled, column)


def _residuals(ops: Any, v: Any) -> Any:
    x = ops.add(v["x"], ops.rms_norm(v["y"], v["norm"], 1e-6))
    return ops.add(x, ops.rms_norm(ops.linear(x, v["w"]), None, 1e-6))


CASES: dict[str, Case] = {
    "add": Case({"x": 37, "y": 37}, {}, lambda o, v: o.add(v["x"], v["y"])),
    "add_itself": Case({"x": 37}, {}, lambda o, v: o.add(v["x"], v["x"])),
    "multiply": Case({"x": 5000, "y": 5000}, {}, lambda o, v: o.multiply(v["x"], v["y"])),
    "multiply_rows": Case({"x": 9001, "y": 1}, {}, lambda o, v: o.multiply(v["x"], v["y"])),
    "multiply_heads": Case(
        {"x": 3 * 20, "y": 3},
        {},
        lambda o, v: o.merge_heads(o.multiply(o.heads(v["x"], 3), o.heads(v["y"], 3))),
    ),
    "multiply_columns": Case(
        {"x": 45}, {"w": (45,)}, lambda o, v: o.multiply_columns(v["x"], v["w"])
    ),
    "multiply_one": Case({"x": 45}, {"w": (1,)}, lambda o, v: o.multiply_columns(v["x"], v["w"])),
    "scale": Case({"x": 8193}, {}, lambda o, v: o.scale(v["x"], -1.7)),
    "soft_cap": Case({"x": 41}, {}, lambda o, v: o.soft_cap(o.scale(v["x"], 30.0), 20.0)),
    "tanh": Case({"x": 41}, {}, lambda o, v: o.activation(v["x"], "tanh")),
    "silu": Case({"x": 41}, {}, lambda o, v: o.activation(v["x"], "silu")),
    "gelu": Case({"x": 41}, {}, lambda o, v: o.activation(v["x"], "gelu")),
    "gelu_tanh": Case({"x": 41}, {}, lambda o, v: o.activation(v["x"], "gelu_tanh")),
    "gated": Case({"x": 70}, {}, lambda o, v: o.gated_activation(v["x"], "gelu_tanh")),
    "gated_clamped": Case(
        {"x": 70}, {}, lambda o, v: o.gated_activation(o.scale(v["x"], 9.0), "swiglu_clamped")
    ),
    "gated_linear_clamped": Case(
        {"x": 70},
        {"w": (90, 70), "b": (90,)},
        lambda o, v: o.gated_activation(o.linear(v["x"], v["w"], v["b"]), "swiglu_clamped"),
    ),
    "rms_norm": Case({"x": 61}, {"w": (61,)}, lambda o, v: o.rms_norm(v["x"], v["w"], 1e-5)),
    "rms_norm_without_weight": Case({"x": 61}, {}, lambda o, v: o.rms_norm(v["x"], None, 1e-5)),
    "rms_norm_of_heads": Case(
        {"x": 60},
        {"w": (20,)},
        lambda o, v: o.merge_heads(o.rms_norm(o.heads(v["x"], 3), v["w"], 1e-5)),
    ),
    "layer_norm": Case({"x": 61}, {"w": (61,)}, lambda o, v: o.layer_norm(v["x"], v["w"], 1e-5)),
    "layer_norm_far_from_zero": Case(
        {"x": 61, "y": 1},
        {"w": (61,), "one": (61, 1)},
        lambda o, v: o.layer_norm(o.add(v["x"], o.linear(v["y"], v["one"])), v["w"], 1e-5),
    ),
    "gaussian_top": Case({"x": 61}, {}, lambda o, v: o.gaussian_top(v["x"], 0.4)),
    "match_rms": Case({"x": 61, "y": 61}, {}, lambda o, v: o.match_rms(v["x"], v["y"], 1e-3)),
    "match_rms_floor": Case({"x": 61, "y": 61}, {}, lambda o, v: o.match_rms(v["x"], v["y"], 9.0)),
    "views": Case({"x": 55}, {}, _views),
    "split_of_heads": Case({"x": 33}, {}, _split_of_heads),
    "broadcast_of_view": Case({"x": 33}, {}, _broadcast_of_view),
    "norm_of_view": Case({"x": 40}, {"norm": (33,), "w": (20, 33)}, _norm_of_view),
    "projected_view": Case({"x": 40}, {"w": (20, 33)}, _projected_view),
    "product_of_own_column": Case({"x": 40}, {}, _product_of_own_column),
    "residuals": Case({"x": 37, "y": 37}, {"norm": (37,), "w": (37, 37)}, _residuals),
    "head_linear": Case(
        {"x": 3 * 21},
        {"w": (3, 35, 21)},
        lambda o, v: o.merge_heads(o.head_linear(o.heads(v["x"], 3), v["w"])),
    ),
}


def make_arrays(case: Case, num_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(7)

    def draw(shape: tuple[int, ...]) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    inputs = {name: draw((num_tokens, width)) for name, width in case.inputs.items()}
    return inputs, {name: draw(shape) for name, shape in case.weights.items()}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_equals_the_reference(
    name: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_ISA", isa)
    case, num_tokens = CASES[name], 37

    def compute(ops: Any, values: Any, _batch: Any) -> Any:
        return case.compute(ops, values)

    inputs, weights = make_arrays(case, num_tokens)
    backend = make_backend()
    batches = [make_step(n) for n in (num_tokens, 1)] + [make_step(num_tokens, [5, 36, 0, 5])]
    results = run_native(backend, inputs, weights, compute, *batches)
    for result, batch in zip(results, batches, strict=True):
        expected = run_reference(inputs, weights, compute, batch)
        bound = 4e-6 * np.abs(expected).max()
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=bound)
    # The same rows, whatever is computed beside them.
    np.testing.assert_array_equal(results[1], results[0][:1])
    np.testing.assert_array_equal(results[2], results[0][[5, 36, 0, 5]])


ROPES = {
    "halves": Rope((1.0, 0.3, 0.01)),
    "neighbours": Rope((1.0, 0.3, 0.01), attention_factor=1.3, is_interleaved=True),
    "all": Rope(tuple(0.5**i for i in range(10))),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotations_that_nothing_takes_over(rope: Rope) -> None:
    inputs = {"x": np.random.default_rng(3).standard_normal((37, 60)).astype(np.float32)}

    def compute(ops: Any, values: Any, batch: Any) -> Any:
        q, k = ops.split(values["x"], (40, 20))
        q, k = ops.rope(ops.heads(q, 2), ops.heads(k, 1), batch.positions, rope)
        again = ops.rotate(q, batch.positions, rope)
        return ops.concat([ops.merge_heads(again), ops.merge_heads(k)])

    batch = make_step(37)
    [result] = run_native(make_backend(), inputs, {}, compute, batch)
    expected = run_reference(inputs, {}, compute, batch)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)


def test_a_factor_by_position() -> None:
    inputs = {"x": np.ones((37, 33), np.float32)}
    scale = PositionScale(scale=0.1, floor_scale=4.0)

    def compute(ops: Any, values: Any, batch: Any) -> Any:
        return ops.scale_by_position(values["x"], batch.positions, scale)

    [result] = run_native(make_backend(), inputs, {}, compute, make_step(37))
    factors = 1 + 0.1 * np.log1p(np.floor((np.arange(37) + 1) / 4.0))
    np.testing.assert_allclose(result, np.repeat(factors[:, None], 33, axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["soft_cap", "layer_norm", "gaussian_top", "match_rms", "gated"])
def test_what_is_no_number_stays_none(name: str) -> None:
    case = CASES[name]
    inputs, weights = make_arrays(case, 4)
    inputs["x"][2, 40] = np.nan

    def compute(ops: Any, values: Any, _batch: Any) -> Any:
        return case.compute(ops, values)

    batch = make_step(4)
    [result] = run_native(make_backend(), inputs, weights, compute, batch)
    expected = run_reference(inputs, weights, compute, batch)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    assert np.isnan(result[2]).any()


def test_a_program_that_is_bound_again_computes_with_what_is_there_then() -> None:
    backend, batch = make_backend(), make_step(4)
    x = np.arange(4 * 32, dtype=np.float32).reshape(4, 32)
    model = OpModel(
        {"x": x},
        {"w": make_parameter("w", np.empty((5, 32), np.float32))},
        lambda ops, values, _: ops.linear(values["x"], values["w"]),
    )
    program = backend.compile(model, SingleRankCommunicator(), SIZES)
    model.tables["x"].value = backend.pack(model.tables["x"], x)
    for factor in (1.0, 2.0):
        weight = np.full((5, 32), factor, np.float32)
        model.weights["w"].value = backend.pack(model.weights["w"], weight)
        program.bind()
        np.testing.assert_array_equal(backend.to_host(program.forward(batch)), x @ weight.T)
