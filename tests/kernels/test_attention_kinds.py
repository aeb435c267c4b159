"""Masks, sinks, soft caps, latent rows and layers that share KV, against their numpy twins."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attention_twins import (
    FORMATS,
    LOG2_E,
    Array,
    Scoring,
    Shape,
    Stored,
    empty_queries,
    expected,
    from_bf16,
    no_rotation,
    random_rows,
    read_cache,
    run,
    store,
    to_bf16,
    uniform_rows,
)
from kvloom.dtypes import DType
from kvloom.kv.spec import MLAAttentionSpec

# As in test_attention.py, but for float32 sums over heads of 512 numbers.
TOLERANCE = {"float32": 8e-6, "bfloat16": 6e-3, "int8": 1e-3}

# (first query, end): alone, over the borders of sub-blocks, blocks and splits, prompts and chunks.
STEPS = [(0, 1), (15, 16), (16, 17), (0, 13), (255, 256), (256, 257), (250, 300), (511, 513)]
STEPS += [(0, 70), (600, 601), (100, 147), (900, 901), (530, 600)]

SHAPES = [
    Shape(block_size=16, num_kv_heads=2, heads_per_kv=3, head_size=64, head_size_v=64),
    Shape(block_size=32, num_kv_heads=1, heads_per_kv=4, head_size=256, head_size_v=256),
    Shape(block_size=80, num_kv_heads=1, heads_per_kv=1, head_size=32, head_size_v=96),
    Shape(block_size=64, num_kv_heads=1, heads_per_kv=13, head_size=64, head_size_v=32),
    Shape(block_size=16, num_kv_heads=1, heads_per_kv=2, head_size=512, head_size_v=512),
]
MASKS: list[dict[str, Any]] = [{"window": w} for w in (1, 2, 16, 31, 250, 256, 257, 512, 5000)]
MASKS += [{"chunk": c} for c in (1, 16, 40, 256, 300, 5000)]
MASKED = [
    replace(SHAPES[(i + i // len(MASKS)) % len(SHAPES)], format=format, **mask)
    for i, (format, mask) in enumerate((f, m) for f in FORMATS for m in MASKS)
]


def check_steps(native: ModuleType, stored: Stored, scoring: Scoring | None = None) -> None:
    """A mixed step of all requests equals the definition."""
    steps = STEPS[: len(stored.queries)]
    results = run(native, stored, dict(enumerate(steps)))
    for request, (first, end) in enumerate(steps):
        want = expected(stored, request, first, end, scoring)
        error = np.abs(results[request] - want).max()
        assert error <= TOLERANCE[stored.shape.format], (request, first, end)


def store_steps(native: ModuleType, shape: Shape, num_steps: int = len(STEPS)) -> Stored:
    """A request for each of the first steps, in a pool that was full of NaNs."""
    ends = [end for _, end in STEPS[:num_steps]]
    return store(native, shape, random_rows(shape, ends), fill=0xFF)


# --- masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MASKED, ids=str)
def test_a_masked_step_equals_the_definition(native: ModuleType, shape: Shape) -> None:
    check_steps(native, store_steps(native, shape))


@pytest.mark.parametrize(
    "mask", [{}, {"window": 37}, {"window": 256}, {"window": 300}, {"chunk": 96}]
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_same_bit_for_bit_in_any_step(
    native: ModuleType, format: str, mask: dict[str, Any]
) -> None:
    shape = Shape(format, 32, 2, 3, 64, 64, **mask)
    stored = store(native, shape, random_rows(shape, [700, 90, 300]), fill=0xFF)
    whole = run(native, stored, {0: (0, 700)})[0]
    chunked = [run(native, stored, {0: (a, min(a + 97, 700))})[0] for a in range(0, 700, 97)]
    assert np.array_equal(np.concatenate(chunked), whole)
    for position in (0, 1, 15, 16, 31, 255, 256, 257, 511, 512, 600, 699):
        alone = run(native, stored, {0: (position, position + 1)})[0]
        step = {1: (0, 90), 0: (position, position + 1), 2: (299, 300)}
        mates = run(native, stored, step, shape.layer(native, 3))[0]
        assert np.array_equal(alone[0], whole[position]), position
        assert np.array_equal(mates[0], whole[position]), position


def test_a_window_is_as_much_work_as_its_keys(native: ModuleType) -> None:
    """One query over 3,000 keys is cut into 12 splits; with a window of 300 it has two."""
    shape = Shape("float32", 16, 1, 1, 32, 32)
    for window, num_splits in ((0, 12), (300, 2), (16, 1)):
        masked = replace(shape, window=window)
        stored = store(native, masked, random_rows(masked, [3000]), num_threads=4)
        run(native, stored, {0: (2999, 3000)})
        assert stored.layer.num_items == num_splits


# --- sinks and soft caps ----------------------------------------------------------------------


@pytest.mark.parametrize("mask", [{}, {"window": 128}, {"chunk": 64}])
@pytest.mark.parametrize("format", FORMATS)
def test_sinks_count_once_over_any_number_of_splits(
    native: ModuleType, format: str, mask: dict[str, Any]
) -> None:
    shape = Shape(format, 16, 2, 4, 64, 64, **mask)
    sinks = np.random.default_rng(2).normal(3, 4, shape.num_heads).astype(np.float32)
    for num_threads in (1, 4):
        stored = store(
            native, shape, random_rows(shape, [e for _, e in STEPS]), num_threads=num_threads
        )
        stored.layer.sinks = sinks
        check_steps(native, stored, Scoring(sinks=sinks))
        alone = run(native, stored, {11: STEPS[11]})[11]  # over several items if spread
        assert np.array_equal(alone, run(native, stored, dict(enumerate(STEPS)))[11])


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
@pytest.mark.parametrize("mask", [{}, {"window": 100}])
@pytest.mark.parametrize("format", FORMATS)
def test_scores_are_capped_before_they_are_masked(
    native: ModuleType, format: str, mask: dict[str, Any], soft_cap: float
) -> None:
    shape = Shape(format, 32, 1, 5, 96, 96, **mask)
    stored = store_steps(native, shape)
    stored.layer.soft_cap = soft_cap
    check_steps(native, stored, Scoring(soft_cap=soft_cap))


def test_sinks_beyond_all_scores_take_all_weight_or_none(native: ModuleType) -> None:
    shape = Shape("float32", 16, 1, 2, 32, 32)
    stored = store(native, shape, [uniform_rows(shape, 20)])
    stored.layer.sinks = np.array([1e6, -1e6], np.float32)
    out = run(native, stored, {0: (0, 20)})[0].reshape(20, 2, 32)
    assert np.all(out[:, 0] == 0)
    assert np.allclose(out[:, 1], np.arange(20)[:, None] / 2, rtol=1e-6)


# --- latent rows ------------------------------------------------------------------------------

LATENT = [
    Shape(block_size=16, num_kv_heads=1, heads_per_kv=16, head_size=576, head_size_v=512),
    Shape(block_size=64, num_kv_heads=1, heads_per_kv=5, head_size=48, head_size_v=32),
    Shape(block_size=32, num_kv_heads=1, heads_per_kv=1, head_size=64, head_size_v=64),
]


@pytest.mark.parametrize("format", FORMATS[:2])
@pytest.mark.parametrize("shape", LATENT, ids=str)
def test_latent_rows_are_key_and_value(native: ModuleType, shape: Shape, format: str) -> None:
    shape = replace(shape, format=format, is_latent=True)
    stored = store_steps(native, shape, 7)
    check_steps(native, stored)
    spec = MLAAttentionSpec(
        block_size=shape.block_size, num_kv_heads=1, head_size=shape.head_size,
        head_size_v=shape.head_size_v, dtype=DType(format),
    )  # fmt: skip
    assert stored.layer.block_bytes == spec.page_size_bytes
    keys, _ = read_cache(shape, stored.raw, stored.tables[6], 300)
    rows = random_rows(shape, [end for _, end in STEPS[:7]])[6]
    row = rows[:, None, shape.num_heads * shape.head_size :]
    assert np.array_equal(keys, row if format == "float32" else from_bf16(to_bf16(row)))


@pytest.mark.parametrize("format", FORMATS[:2])
def test_a_latent_row_is_the_same_bit_for_bit_in_any_step(native: ModuleType, format: str) -> None:
    shape = Shape(format, 16, 1, 7, 80, 64, is_latent=True)
    stored = store(native, shape, random_rows(shape, [400]), fill=0xFF, num_threads=2)
    whole = run(native, stored, {0: (0, 400)})[0]
    for position in (0, 15, 16, 255, 256, 399):
        alone = run(native, stored, {0: (position, position + 1)})[0]
        assert np.array_equal(alone[0], whole[position]), position


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape("int8", num_kv_heads=1, is_latent=True), "not int8"),
        (Shape(num_kv_heads=2, is_latent=True), "one latent row"),
        (Shape(num_kv_heads=1, head_size=656, is_latent=True), "up to 640"),
        (Shape(num_kv_heads=1, head_size=64, head_size_v=80, is_latent=True), "multiple of 16"),
        (Shape(num_kv_heads=1, head_size=528), "up to 512"),
    ],
)
def test_latent_layouts_that_are_not_supported_are_named(
    native: ModuleType, shape: Shape, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shape.layer(native)


# --- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_that_shares_kv_writes_queries_alone(native: ModuleType, format: str) -> None:
    shape = Shape(format, 16, 2, 2, 32, 32)
    (rows,) = random_rows(shape, [30])
    stored = store(native, shape, [rows])
    before = stored.raw.copy()
    q = empty_queries(shape, 30)
    at = native.attention.StoredAt(np.arange(30), np.arange(30))
    queries = np.ascontiguousarray(rows[:, : shape.num_heads * 32])
    stored.layer.write(stored.raw, queries, at, no_rotation(), q)
    assert np.array_equal(stored.raw, before)
    assert np.array_equal(q, stored.queries[0])


@pytest.mark.parametrize("num_pairs", [32, 20, 8])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("norms_follow_rope", [False, True])
def test_heads_are_turned_as_their_form_says(
    native: ModuleType, num_pairs: int, is_interleaved: bool, norms_follow_rope: bool
) -> None:
    shape = Shape("float32", 16, 2, 2, 64, 64)
    (rows,) = random_rows(shape, [40])
    rng = np.random.default_rng(3)
    layer = shape.layer(native)
    layer.is_interleaved, layer.norms_follow_rope = is_interleaved, norms_follow_rope
    layer.q_scale, layer.norm_eps = 0.37, 1e-5
    weights = [rng.normal(1, 0.3, 64).astype(np.float32) for _ in range(3)]
    layer.q_norm, layer.k_norm, layer.v_norm = weights
    layer.position_scales = np.linspace(1, 2, 500, dtype=np.float32)
    positions = rng.integers(0, 500, 40)
    angles = np.outer(np.arange(500), 1000.0 ** -(np.arange(num_pairs) / num_pairs))
    rotations = np.hstack((np.cos(angles), np.sin(angles))).astype(np.float32)
    raw = np.zeros((3, layer.block_bytes), np.uint8)
    q = empty_queries(shape, 40)
    layer.write(raw, rows, native.attention.StoredAt(positions, np.arange(40)), rotations, q)
    keys, values = read_cache(shape, raw, np.array([0, 1, 2]), 40)

    def normed(x: Array, weight: Array) -> Array:
        squares: Array = (x * x).mean(-1, keepdims=True)
        result: Array = x / np.sqrt(squares + 1e-5) * weight
        return result

    def rotated(x: Array) -> Array:
        pairs = np.arange(2 * num_pairs)
        at = pairs.reshape(-1, 2) if is_interleaved else pairs.reshape(2, -1).T
        a, b = x[..., at[:, 0]], x[..., at[:, 1]]
        cos, sin = (f(angles[positions])[:, None] for f in (np.cos, np.sin))
        x = x.copy()
        x[..., at[:, 0]], x[..., at[:, 1]] = a * cos - b * sin, b * cos + a * sin
        return x

    def turned(x: Array, weight: Array) -> Array:
        return normed(rotated(x), weight) if norms_follow_rope else rotated(normed(x, weight))

    heads = rows.reshape(40, -1, 64).astype(np.float64)
    factors = 0.37 * np.linspace(1, 2, 500)[positions][:, None, None]
    assert np.allclose(q, turned(heads[:, :4], weights[0]) * factors, atol=4e-6)
    assert np.allclose(keys, turned(heads[:, 4:6], weights[1]), atol=4e-6)
    assert np.allclose(values, normed(heads[:, 6:], weights[2]), atol=4e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_may_lie_anywhere_in_a_block(native: ModuleType, format: str) -> None:
    shape = Shape(format, 16, 1, 2, 32, 32)
    rows = random_rows(shape, [50])
    plain = store(native, shape, rows)
    layer = shape.layer(native)
    layer.q_scale, layer.offset_bytes = 32**-0.5 * LOG2_E, 192
    raw = np.full((len(plain.raw), layer.block_bytes + 320), 0xFF, np.uint8)
    slots = plain.tables[0][np.arange(50) // 16].astype(np.int64) * 16 + np.arange(50) % 16
    q = empty_queries(shape, 50)
    at = native.attention.StoredAt(np.arange(50), slots)
    layer.write(raw, rows[0], at, no_rotation(), q)
    assert np.all(raw[:, :192] == 0xFF)
    assert np.all(raw[:, 192 + layer.block_bytes :] == 0xFF)
    moved = Stored(shape, layer, raw, plain.tables, [q])
    step = {0: (0, 50)}
    assert np.array_equal(run(native, moved, step)[0], run(native, plain, step)[0])
    layer.offset_bytes = 321
    with pytest.raises(ValueError, match="must hold a block"):
        run(native, moved, step)


# --- case 4 of CASES.md -----------------------------------------------------------------------

# kind -> results of queries 0, 3, 4, 5, 7, 8 and 9; a sink's logit is that of natural exponents.
POSITIONS = [0, 3, 4, 5, 7, 8, 9]
CASE_4: list[tuple[dict[str, Any], float | None, list[float]]] = [
    ({}, None, [0, 1.5, 2, 2.5, 3.5, 4, 4.5]),
    ({"window": 4}, None, [0, 1.5, 2.5, 3.5, 5.5, 6.5, 7.5]),
    ({"chunk": 4}, None, [0, 1.5, 4, 4.5, 5.5, 8, 8.5]),
    ({"window": 4}, 0.0, [0, 1.2, 2.0, 2.8, 4.4, 5.2, 6.0]),
    ({"window": 4}, float(np.log(4)), [0, 0.75, 1.25, 1.75, 2.75, 3.25, 3.75]),
]
PARTS = [[(0, 10)], [(i, i + 1) for i in range(10)], [(0, 3), (3, 6), (6, 10)]]


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("mask", "sink", "want"), CASE_4)
def test_case_4_uniform_averages(
    native: ModuleType,
    format: str,
    block_size: int,
    mask: dict[str, Any],
    sink: float | None,
    want: list[float],
) -> None:
    shape = Shape(format, block_size, 2, 2, 32, 32, **mask)
    keys = [0.0] if sink is not None else [0.0, -1e5]
    for key in keys:
        stored = store(native, shape, [uniform_rows(shape, 10, key)], fill=0xFF)
        if sink is not None:
            stored.layer.sinks = np.full(4, sink * LOG2_E, np.float32)
        for steps in PARTS:
            out = np.concatenate([run(native, stored, {0: step})[0] for step in steps])
            assert np.allclose(out[POSITIONS], np.array(want)[:, None], rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("soft_cap", "sink", "want"), [(0, None, 0.880797), (1, None, 0.723927), (1, 2.0, 0.238141)]
)
def test_case_4_soft_cap(
    native: ModuleType, block_size: int, soft_cap: float, sink: float | None, want: float
) -> None:
    shape = Shape("float32", block_size, 1, 1, 16, 16)
    rows = np.zeros((3, 48), np.float32)
    rows[:, 0] = 1  # q
    rows[1, 16] = 2  # the second key's score
    rows[1, 32:], rows[2, 32:] = 1, 100  # values; the third token is in the future
    stored = store(native, shape, [rows], fill=0xFF)
    stored.layer.soft_cap = soft_cap * LOG2_E
    q = empty_queries(shape, 3)
    q[:, 0, 0] = LOG2_E
    if sink is not None:
        stored.layer.sinks = np.array([sink * LOG2_E], np.float32)
    out = run(native, replace(stored, queries=[q]), {0: (0, 3)})[0]
    assert np.allclose(out[1], want, atol=1e-6)


# --- the binding ------------------------------------------------------------------------------


def write_and_attend(native: ModuleType, stored: Stored) -> None:
    """Five tokens."""
    shape = stored.shape
    at = native.attention.StoredAt(np.arange(5), np.arange(5))
    q = empty_queries(shape, 5)
    stored.layer.write(stored.raw, random_rows(shape, [5])[0], at, no_rotation(), q)
    run(native, stored, {0: (0, 5)})


def test_sinks_norms_and_tables_that_do_not_fit_are_errors(native: ModuleType) -> None:
    shape = Shape("float32", 16, 1, 2, 32, 32)
    changes: list[tuple[str, Any]] = [
        ("sinks", np.zeros(3, np.float32)), ("q_norm", np.zeros(31, np.float32)),
        ("v_norm", np.zeros(33, np.float32)), ("position_scales", np.zeros(4, np.float32)),
        ("offset_bytes", -1),
    ]  # fmt: skip
    for name, value in changes:
        stored = store(native, shape, random_rows(shape, [5]))
        setattr(stored.layer, name, value)
        with pytest.raises(ValueError, match=r"one per|of one head|out of range|hold a block"):
            write_and_attend(native, stored)
    masks: list[dict[str, Any]] = [{"window": -1}, {"chunk": -1}]
    for mask in masks:
        with pytest.raises(ValueError, match="negative"):
            replace(shape, **mask).layer(native)
