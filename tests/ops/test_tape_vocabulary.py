"""The tape records every operation: its shapes, its views, and what it computes when replayed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.kv.spec import AttentionSpec, FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from kvloom.ops.base import (
    Attention,
    AttentionMetadata,
    Batch,
    Experts,
    KVLayer,
    Ops,
    Parameter,
    PositionScale,
    Rope,
    Routing,
)
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.reference_ops import ReferenceOps
from kvloom.ops.slots import plan_slots
from kvloom.ops.tape import Operation, Tape, TapeValue, _Recorder, record, replay
from kvloom.runner.collectives import SingleRankCommunicator

HIDDEN, VOCAB, NUM_BLOCKS = 24, 11, 9
BLOCK_SIZES = (2, 4)  # of the two KV cache groups


def parameter(*shape: int) -> Parameter:
    rng = np.random.default_rng(shape)
    return Parameter(
        "weight", shape, DType.FLOAT32, (), value=rng.standard_normal(shape).astype(np.float32) / 4
    )


def names_of(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


class Everything:
    """A forward pass that calls every operation of the vocabulary; its layers are bound by hand."""

    def __init__(self) -> None:
        self.window = KVLayer("window", group=0)
        self.shared = KVLayer("shared", group=0)
        self.latent = KVLayer("latent", group=1)
        self.rope = Rope((1.0, 0.1))
        self.interleaved = Rope((0.5,), 1.1, is_interleaved=True)
        self.experts = Experts(
            gate_up=parameter(5, 12, HIDDEN),
            down=parameter(5, HIDDEN, 6),
            activation="swiglu_clamped",
            gate_up_bias=parameter(5, 12),
            down_bias=parameter(5, HIDDEN),
        )

    def bind(self, backend: ReferenceBackend) -> None:
        """New storage for the layers, NaN everywhere."""
        common: dict[str, Any] = {"num_kv_heads": 1, "dtype": DType.FLOAT32}
        window = SlidingWindowSpec(
            block_size=BLOCK_SIZES[0], head_size=6, sliding_window=3, **common
        )
        latent = MLAAttentionSpec(block_size=BLOCK_SIZES[1], head_size=7, head_size_v=5, **common)
        specs: list[tuple[KVLayer, AttentionSpec]] = [(self.window, window), (self.latent, latent)]
        for layer, spec in specs:
            raw = backend.allocate_kv(spec.page_size_bytes * NUM_BLOCKS)
            raw[:] = -1
            layer.spec, layer.storage = spec, backend.view_kv(raw, spec, NUM_BLOCKS)
        self.shared.spec, self.shared.storage = self.window.spec, self.window.storage

    def forward(self, ops: Ops, batch: Batch) -> Any:
        x = ops.scale(ops.embedding(batch.token_ids, parameter(VOCAB, HIDDEN)), 3.0)
        x = ops.add(x, self.window_layers(ops, batch, ops.rms_norm(x, None, 1e-5)))
        x = ops.add(x, self.latent_layer(ops, batch, ops.layer_norm(x, parameter(HIDDEN), 1e-5)))
        x = ops.add(x, self.feed_forward(ops, x))
        logits = ops.linear(ops.select_rows(x, batch.logits_rows), parameter(VOCAB, HIDDEN))
        return ops.all_gather(ops.soft_cap(logits, 2.0))

    def window_layers(self, ops: Ops, batch: Batch, x: Any) -> Any:
        attention = Attention(0.4, soft_cap=1.5, sinks=parameter(3))
        q, k, v = ops.split_heads(ops.linear(x, parameter(30, HIDDEN)), 3, 1, 6)
        q, k = ops.rope(ops.rms_norm(q, parameter(6), 1e-5), k, batch.positions, self.rope)
        a = ops.attention(self.window, q, k, v, attention)
        q = ops.heads(ops.linear(a, parameter(18, 18), parameter(18)), 3)
        q = ops.rotate(q, batch.positions, self.rope)
        q = ops.scale_by_position(q, batch.positions, PositionScale(0.3, 2.0))
        b = ops.shared_attention(self.shared, q, attention)
        return ops.all_reduce(ops.linear(ops.concat([a, b]), parameter(HIDDEN, 36)))

    def latent_layer(self, ops: Ops, batch: Batch, x: Any) -> Any:
        q = ops.heads(ops.linear(x, parameter(2 * 6, HIDDEN)), 2)
        q_plain, q_turning = ops.split(q, (4, 2))
        q_turning = ops.rotate(q_turning, batch.positions, self.interleaved)
        q = ops.concat([ops.head_linear(q_plain, parameter(2, 5, 4)), q_turning])
        latent, k_turning = ops.split(ops.linear(x, parameter(7, HIDDEN)), (5, 2))
        k_turning = ops.rotate(ops.heads(k_turning, 1), batch.positions, self.interleaved)
        latent = ops.heads(ops.rms_norm(latent, parameter(5), 1e-5), 1)
        row = ops.concat([latent, k_turning])
        a = ops.latent_attention(self.latent, q, row, Attention(0.5), 5)
        a = ops.merge_heads(ops.head_linear(a, parameter(2, 4, 5)))
        return ops.all_reduce(ops.linear(a, parameter(HIDDEN, 8)))

    def feed_forward(self, ops: Ops, x: Any) -> Any:
        routing = Routing(2, "sigmoid", is_normalised=True, factor=1.5)
        routes = ops.route(ops.linear(x, parameter(5, HIDDEN)), routing, parameter(5))
        y = ops.experts(x, routes, self.experts)
        gate, up = ops.split(ops.linear(x, parameter(16, HIDDEN)), (8, 8))
        h = ops.multiply(ops.activation(ops.gaussian_top(gate, 0.5), "gelu_tanh"), up)
        h = ops.gated_activation(ops.concat([h, gate]), "silu")
        share = ops.activation(ops.linear(x, parameter(1, HIDDEN)), "tanh")
        h = ops.multiply(ops.linear(h, parameter(HIDDEN, 8)), share)
        return ops.add(y, ops.match_rms(ops.multiply_columns(h, parameter(HIDDEN)), x, 0.1))


def make_batch(first: int, num_tokens: int, rows: list[int]) -> Batch:
    """The next tokens of one request whose blocks of both groups do not lie in order."""
    positions = np.arange(first, first + num_tokens)
    attention = []
    for block_size in BLOCK_SIZES:
        table = np.random.default_rng(block_size).permutation(np.arange(1, NUM_BLOCKS))
        attention.append(
            AttentionMetadata(
                block_table=table[None].astype(np.int32),
                slot_mapping=table[positions // block_size] * block_size + positions % block_size,
                query_start=np.array([0, num_tokens], np.int32),
                seq_lens=np.array([first + num_tokens], np.int32),
                num_computed_tokens=np.array([first], np.int32),
                block_size=block_size,
            )
        )
    return Batch(positions * 7 % VOCAB, positions, np.array(rows), attention)


BATCHES = [make_batch(0, 6, [5]), make_batch(6, 1, [0]), make_batch(7, 5, [0, 4])]


def run(model: Everything, forward: Callable[[Ops, Batch], Any]) -> np.ndarray:
    backend = ReferenceBackend()
    model.bind(backend)
    communicator = SingleRankCommunicator()
    return np.concatenate([forward(backend.ops(b, communicator), b) for b in BATCHES])


def test_the_model_above_calls_every_operation() -> None:
    tape = record(Everything(), world_size=2)
    assert {operation.name for operation in tape.operations} == set(names_of(Ops))


@pytest.mark.parametrize("kind", [ReferenceOps, _Recorder])
def test_every_operation_takes_the_same_arguments(kind: type) -> None:
    for name in names_of(Ops):
        wanted = inspect.signature(getattr(Ops, name)).parameters
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(wanted), name


def test_replay_equals_the_model() -> None:
    model = Everything()
    tape = record(model)
    expected = run(model, model.forward)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(run(model, lambda ops, batch: replay(tape, ops, batch)), expected)


class Watched:
    """The reference's operations, with the results of every call kept in order."""

    def __init__(self, ops: Ops) -> None:
        self.results: list[tuple[Any, ...]] = []
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            returned = getattr(self._ops, name)(*arguments)
            self.results.append(returned if isinstance(returned, tuple) else (returned,))
            return returned

        return call


def watched_values(tape: Tape, model: Everything) -> list[tuple[Operation, TapeValue, np.ndarray]]:
    """Every value of a step, with the operation that it comes from and its array."""
    backend = ReferenceBackend()
    model.bind(backend)
    ops = Watched(backend.ops(BATCHES[0], SingleRankCommunicator()))
    replay(tape, ops, BATCHES[0])
    return [
        (operation, value, array)
        for operation, arrays in zip(tape.operations, ops.results, strict=True)
        for value, array in zip(operation.outputs, arrays, strict=True)
    ]


def test_shapes_and_row_counts_are_those_of_the_arrays() -> None:
    model = Everything()
    batch = BATCHES[0]
    num_rows = {"num_tokens": len(batch.token_ids), "num_rows": len(batch.logits_rows)}
    for operation, value, array in watched_values(record(model), model):
        assert array.shape == (num_rows[value.rows.value], *value.shape), operation.name


def test_views_are_the_named_columns_of_their_base() -> None:
    model = Everything()
    values = watched_values(record(model), model)
    arrays = {value.index: array.reshape(len(array), -1) for _, value, array in values}
    viewing = set()
    for operation, value, _ in values:
        if value.base != value.index:
            viewing.add(operation.name)
            columns = slice(value.first_column, value.first_column + value.width)
            expected = arrays[value.base][:, columns]
            np.testing.assert_array_equal(arrays[value.index], expected, err_msg=operation.name)
    assert viewing == {"split", "split_heads", "heads", "merge_heads"}


def test_split_heads_that_do_not_lie_in_one_run_have_memory() -> None:
    tape = record(Everything())
    of_heads, of_columns = [o for o in tape.operations if o.name == "split"][:2]
    assert [v.base == v.index for v in of_heads.outputs] == [True, True]
    assert [v.base == v.index for v in of_columns.outputs] == [False, False]


def test_values_joined_by_concat_live_until_then() -> None:
    tape = record(Everything())
    concat = next(operation for operation in tape.operations if operation.name == "concat")
    a, b = concat.arguments[0]
    assert list(concat.inputs) == [a, b]
    assert concat in tape.readers()[a.index]
    assert tape.last_reads()[b.base] == tape.operations.index(concat)
    other = TapeValue(999, a.rows, a.shape, 999)
    assert concat.with_inputs({a.index: other}).arguments == ((other, b),)


def test_values_are_in_their_slots_when_they_are_read() -> None:
    """Whoever reads a value finds it in its slot: no other was written there since."""
    tape = record(Everything())
    plan = plan_slots(tape, lambda value: 4 * value.width)
    holder: dict[int, int] = {}  # slot -> base of the value that was written to it last
    for operation in tape.operations:
        for value in operation.inputs:
            assert holder[plan.slot_of[value.base]] == value.base, operation.name
        for value in operation.outputs:
            if value.base == value.index:
                holder[plan.slot_of[value.index]] = value.index


def test_a_full_layer_may_have_other_value_heads() -> None:
    """What `attention` returns is as wide as its value heads."""

    class Narrow:
        def forward(self, ops: Ops, batch: Batch) -> Any:
            x = ops.embedding(batch.token_ids, parameter(VOCAB, 14))
            q, k, v = ops.split(x, (8, 4, 2))
            q, k, v = ops.heads(q, 2), ops.heads(k, 1), ops.heads(v, 1)
            return ops.attention(self.layer, q, k, v, Attention(1.0))

        layer = KVLayer("narrow")

    model = Narrow()
    assert record(model).result.shape == (4,)
    backend = ReferenceBackend()
    spec = FullAttentionSpec(
        block_size=2, num_kv_heads=1, head_size=4, head_size_v=2, dtype=DType.FLOAT32
    )
    raw = backend.allocate_kv(spec.page_size_bytes * NUM_BLOCKS)
    model.layer.spec, model.layer.storage = spec, backend.view_kv(raw, spec, NUM_BLOCKS)
    ops = backend.ops(BATCHES[0], SingleRankCommunicator())
    assert model.forward(ops, BATCHES[0]).shape == (6, 4)
