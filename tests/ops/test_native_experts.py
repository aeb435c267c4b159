"""Routing and experts on the native backend: the reference's choices, dense layers' results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gemm_twins import random_source
from kvloom.ops.base import Activation, Experts, Routing, StoredRows
from kvloom.ops.isa import built_isas, can_run
from kvloom.runner.collectives import SingleRankCommunicator
from native_runner import make_backend
from op_models import SIZES, OpModel, make_parameter, make_step, run_native, run_reference

ISAS = [isa for isa in built_isas() if can_run(isa)]
NUM_EXPERTS = 12
ROUTINGS = {
    "softmax": Routing(3, "softmax"),
    "softmax_normalised": Routing(3, "softmax", is_normalised=True, factor=2.5),
    "softmax_of_chosen": Routing(4, "softmax_of_chosen"),
    "sigmoid": Routing(1, "sigmoid"),
    "sigmoid_normalised": Routing(3, "sigmoid", is_normalised=True),
    "best_groups": Routing(3, "softmax", num_groups=4, num_chosen_groups=2),
    "groups_of_two_best": Routing(
        4, "sigmoid", True, 1.5, num_groups=3, num_chosen_groups=2, group_score="sum_of_two"
    ),
    "all": Routing(NUM_EXPERTS, "softmax"),
}


def normal(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_equal_the_reference(
    name: str, has_bias: bool, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_ISA", isa)
    routing = ROUTINGS[name]
    logits = normal((37, NUM_EXPERTS), 1)
    logits[3] = 0.0  # of equals the first
    logits[4] = np.repeat([0.5, 1.0, 1.0, -2.0], 3)
    weights = {"choice": normal((NUM_EXPERTS,), 2)} if has_bias else {}

    def compute(ops: Any, values: Any, _batch: Any) -> Any:
        return ops.route(values["logits"], routing, values.get("choice"))

    batch = make_step(37)
    [result] = run_native(make_backend(), {"logits": logits}, weights, compute, batch)
    expected = run_reference({"logits": logits}, weights, compute, batch)
    count = routing.num_experts_per_token
    np.testing.assert_array_equal(result[:, :count], expected[:, :count])
    np.testing.assert_allclose(result[:, count:], expected[:, count:], rtol=2e-6)


def test_logits_that_are_no_numbers_choose_different_experts() -> None:
    logits = normal((4, NUM_EXPERTS), 1)
    logits[1, 5], logits[2], logits[3, :6] = np.nan, np.nan, np.inf
    routing = ROUTINGS["softmax"]

    def compute(ops: Any, values: Any, _batch: Any) -> Any:
        return ops.route(values["logits"], routing)

    [result] = run_native(make_backend(), {"logits": logits}, {}, compute, make_step(4))
    for ids in result[:, :3]:
        assert len(set(ids)) == 3
        assert set(ids) <= set(range(NUM_EXPERTS))
    assert np.isnan(result[1:, 3:]).all()


EXPERTS = [
    {"activation": "silu", "num_choices": 2},
    {"activation": "gelu_tanh", "num_choices": 5, "has_scales": True},
    {"activation": "silu", "num_choices": 1, "weighs_input": True},
    {"activation": "swiglu_clamped", "num_choices": 3, "has_biases": True},
]


def expert_arrays(hidden_size: int, inner_size: int) -> dict[str, Any]:
    return {
        "router": normal((NUM_EXPERTS, hidden_size), 1),
        "gate_up": normal((NUM_EXPERTS, 2 * inner_size, hidden_size), 2) / hidden_size**0.5,
        "down": normal((NUM_EXPERTS, hidden_size, inner_size), 3) / inner_size**0.5,
        "scales": 1 + normal((NUM_EXPERTS,), 4) / 4,
        "gate_up_bias": normal((NUM_EXPERTS, 2 * inner_size), 5),
        "down_bias": normal((NUM_EXPERTS, hidden_size), 6),
    }


def make_compute(
    activation: Activation,
    num_choices: int,
    has_scales: bool = False,
    has_biases: bool = False,
    weighs_input: bool = False,
) -> Any:
    routing = Routing(num_choices, "softmax", is_normalised=True)

    def compute(ops: Any, values: Any, _batch: Any) -> Any:
        experts = Experts(
            values["gate_up"],
            values["down"],
            activation,
            gate_up_bias=values["gate_up_bias"] if has_biases else None,
            down_bias=values["down_bias"] if has_biases else None,
            weighs_input=weighs_input,
            scales=values["scales"] if has_scales else None,
        )
        routes = ops.route(ops.linear(values["x"], values["router"]), routing)
        return ops.experts(values["x"], routes, experts)

    return compute


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", EXPERTS)
def test_experts_equal_the_reference(
    options: dict[str, Any], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_ISA", isa)
    compute = make_compute(**options)
    arrays = expert_arrays(40, 24)
    inputs = {"x": normal((37, 40), 9)}
    batches = [make_step(n) for n in (37, 1, 8)] + [make_step(37, [36, 2])]
    results = run_native(make_backend(), inputs, arrays, compute, *batches)
    for result, batch in zip(results, batches, strict=True):
        expected = run_reference(inputs, arrays, compute, batch)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
    # A token's result does not depend on those beside it.
    np.testing.assert_array_equal(results[1], results[0][:1])
    np.testing.assert_array_equal(results[2], results[0][:8])
    np.testing.assert_array_equal(results[3], results[0][[36, 2]])


FORMATS = {"F32": "f32", "BF16": "bf16", "Q8": "q8_0", "Q4": "q4_1"}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("packed", FORMATS)
def test_an_expert_computes_what_a_dense_layer_does(
    packed: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each format, bit for bit, since all weight lies on one expert of each token."""
    monkeypatch.setenv("KVLOOM_ISA", isa)
    hidden_size, inner_size, num_experts, num_tokens = 96, 64, 3, 21
    backend, batch = make_backend(), make_step(num_tokens)
    x = normal((num_tokens, hidden_size), 9)
    stacks = {
        "gate_up": _stored(packed, (num_experts, 2 * inner_size, hidden_size)),
        "down": _stored(packed, (num_experts, hidden_size, inner_size)),
    }
    chosen = np.arange(num_tokens) % num_experts
    routes = np.stack([chosen, np.ones(num_tokens)], axis=1).astype(np.float32)

    def run(compute: Any, expert: int | None = None) -> Any:
        parameters = {}
        for name, (shape, rows) in stacks.items():
            own = rows if expert is None else rows.reshape(shape[0], shape[1], -1)[expert]
            array = np.empty(shape if expert is None else shape[1:], np.float32)
            parameters[name] = (make_parameter(name, array), np.ascontiguousarray(own))
        inputs = {"x": x, "routes": routes}
        model = OpModel(inputs, {name: p for name, (p, _) in parameters.items()}, compute)
        program = backend.compile(model, SingleRankCommunicator(), SIZES)
        for name, table in model.tables.items():
            table.value = backend.pack(table, inputs[name])
        for parameter, rows in parameters.values():
            stored = StoredRows(FORMATS[packed].upper(), parameter.shape[-1], rows)
            parameter.value = backend.pack_rows(parameter, packed, [stored])
        program.bind()
        return np.array(backend.to_host(program.forward(batch)))

    def compute_experts(ops: Any, v: Any, _batch: Any) -> Any:
        return ops.experts(v["x"], v["routes"], Experts(v["gate_up"], v["down"], "silu"))

    def compute_dense(ops: Any, v: Any, _batch: Any) -> Any:
        return ops.linear(ops.gated_activation(ops.linear(v["x"], v["gate_up"]), "silu"), v["down"])

    result = run(compute_experts)
    for expert in range(num_experts):
        is_own = chosen == expert
        np.testing.assert_array_equal(result[is_own], run(compute_dense, expert)[is_own])


def _stored(packed: str, shape: tuple[int, int, int]) -> tuple[tuple[int, int, int], Any]:
    """Rows of a stack as a checkpoint stores them: shape, bytes [num_rows, row_bytes]."""
    raw, _ = random_source(FORMATS[packed], (shape[0] * shape[1], shape[2]), sum(shape))
    return shape, np.frombuffer(raw, np.uint8).reshape(shape[0] * shape[1], -1)


def test_a_stack_is_packed_part_by_part_in_any_order() -> None:
    backend = make_backend()
    array = normal((3, 10, 5), 1)
    inputs = {"x": normal((4, 15), 2)}
    model = OpModel(
        inputs,
        {"w": make_parameter("w", array)},
        lambda ops, v, _: ops.head_linear(ops.heads(v["x"], 3), v["w"]),
    )
    program = backend.compile(model, SingleRankCommunicator(), SIZES)
    model.tables["x"].value = backend.pack(model.tables["x"], inputs["x"])
    rows = array.reshape(30, 5).view(np.uint8)
    cuts = [0, 4, 13, 27, 30]  # some parts hold rows of two matrices
    parts = [StoredRows("F32", 5, rows[a:b], a) for a, b in itertools.pairwise(cuts)]
    weight = model.weights["w"]
    weight.value = backend.pack_rows(weight, "F32", reversed(parts))
    program.bind()
    expected = np.einsum("thi,hoi->tho", inputs["x"].reshape(4, 3, 5), array)
    result = backend.to_host(program.forward(make_step(4)))
    np.testing.assert_allclose(result, expected.reshape(4, 30), rtol=0, atol=1e-5)
