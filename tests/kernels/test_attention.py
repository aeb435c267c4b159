"""Attention and the KV cache of the native library against their numpy twins in float64."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attention_twins import (
    FORMATS,
    Array,
    Shape,
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
from kvloom.kv.spec import FullAttentionSpec

# Rounding of weights to bf16 (2^-9 each way) or 14 bits, against values of about 1; float32 sums.
TOLERANCE = {"float32": 4e-6, "bfloat16": 6e-3, "int8": 1e-3}


# --- layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("format", FORMATS)
def test_block_bytes_are_those_of_the_spec(native: ModuleType, format: str, head_size: int) -> None:
    shape = Shape(format, 32, 3, 2, head_size, 64)
    spec = FullAttentionSpec(
        block_size=32, num_kv_heads=3, head_size=head_size, head_size_v=64, dtype=DType(format)
    )
    assert shape.layer(native).block_bytes == spec.page_size_bytes


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(block_size=8), "multiple of 16"),
        (Shape(head_size=40), "multiples of 16"),
        (Shape("int8", head_size=80), "multiples of 32"),
        (Shape(head_size_v=528), "up to 512"),
        (Shape(num_kv_heads=0), "KV head"),
    ],
)
def test_what_is_not_supported_is_named(native: ModuleType, shape: Shape, words: str) -> None:
    assert words in shape.layout(native).problem
    with pytest.raises(ValueError, match=words):
        native.attention.AttentionLayer(shape.layout(native), 6, 1, 4096)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_keys_and_values_lie_where_the_layout_says(
    native: ModuleType, format: str, block_size: int
) -> None:
    shape = Shape(format, block_size, 2, 2, 64, 32)
    (rows,) = random_rows(shape, [75])
    stored = store(native, shape, [rows])
    keys, values = read_cache(shape, stored.raw, stored.tables[0], 75)
    k = rows[:, shape.num_heads * 64 : (shape.num_heads + 2) * 64].reshape(75, 2, 64)
    v = rows[:, (shape.num_heads + 2) * 64 :].reshape(75, 2, 32)
    for got, want in ((keys, k), (values, v)):
        if format == "float32":
            assert np.array_equal(got, want)
        elif format == "bfloat16":
            assert np.array_equal(got, from_bf16(to_bf16(want)))
        else:
            largest = np.abs(want.reshape(75, 2, -1, 32)).max(-1, keepdims=True)
            error = np.abs(got - want).reshape(75, 2, -1, 32) / largest
            # Half a step of 127, and the greatest codes cut where bf16 rounded the scale down.
            assert error.max() <= 0.5 / 127 * 1.004 + 0.0021


@pytest.mark.parametrize("format", FORMATS)
def test_writing_touches_its_slots_and_nothing_else(native: ModuleType, format: str) -> None:
    shape = Shape(format, 16, 2, 1, 32, 32)
    layer = shape.layer(native)
    (rows,) = random_rows(shape, [3])
    q = empty_queries(shape, 3)
    raw = np.zeros((4, layer.block_bytes), np.uint8)
    slots = np.array([37, -1, 63])
    at = native.attention.StoredAt(np.array([5, 6, 15]), slots)
    layer.write(raw, rows, at, no_rotation(), q)
    keys, values = read_cache(shape, raw, np.array([0, 1, 2, 3]), 64)
    is_written = np.abs(keys).sum((1, 2)) > 0
    assert np.flatnonzero(is_written).tolist() == [37, 63]
    assert np.flatnonzero(np.abs(values).sum((1, 2)) > 0).tolist() == [37, 63]
    filled = np.full_like(raw, 0xA5)
    layer.write(filled, rows, at, no_rotation(), q)
    # Bytes that differ are those of two tokens.
    assert np.count_nonzero(filled != 0xA5) <= 2 * layer.block_bytes // 16


def test_neighbours_written_by_different_threads_keep_their_halves(native: ModuleType) -> None:
    shape = Shape("bfloat16", 16, 1, 1, 64, 64)
    rows = random_rows(shape, [63, 62, 61, 50])
    one, two = store(native, shape, rows), store(native, shape, rows, num_threads=2)
    assert np.array_equal(one.raw, two.raw)


@pytest.mark.parametrize("num_pairs", [32, 20, 8])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normed_then_rotated_and_queries_scaled(
    native: ModuleType, num_pairs: int, has_norm: bool
) -> None:
    shape = Shape("float32", 16, 2, 2, 64, 64)
    (rows,) = random_rows(shape, [40])
    rng = np.random.default_rng(3)
    layer = shape.layer(native)
    layer.q_scale = 0.37
    weights = [rng.normal(1, 0.3, 64).astype(np.float32) for _ in range(2)]
    if has_norm:
        layer.q_norm, layer.k_norm, layer.norm_eps = *weights, 1e-5
    positions = rng.integers(0, 500, 40)
    angles = np.outer(np.arange(500), 1000.0 ** -(np.arange(num_pairs) / num_pairs))
    rotations = np.hstack((np.cos(angles), np.sin(angles))).astype(np.float32)
    raw = np.zeros((3, layer.block_bytes), np.uint8)
    q = empty_queries(shape, 40)
    layer.write(raw, rows, native.attention.StoredAt(positions, np.arange(40)), rotations, q)
    keys, _ = read_cache(shape, raw, np.array([0, 1, 2]), 40)

    def turned(x: Array, weight: Array) -> Array:
        x = x.astype(np.float64)
        if has_norm:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
        a, b = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
        cos, sin = (f(angles[positions])[:, None] for f in (np.cos, np.sin))
        return np.concatenate((a * cos - b * sin, b * cos + a * sin, x[..., 2 * num_pairs :]), -1)

    heads = rows.reshape(40, -1, 64)
    assert np.allclose(q, turned(heads[:, :4], weights[0]) * 0.37, atol=3e-6)
    assert np.allclose(keys, turned(heads[:, 4:6], weights[1]), atol=3e-6)


# --- attention ----------------------------------------------------------------------------------

GRID = [
    Shape(block_size=16, num_kv_heads=3, heads_per_kv=3, head_size=64, head_size_v=64),
    Shape(block_size=16, num_kv_heads=2, heads_per_kv=1, head_size=32, head_size_v=32),
    Shape(block_size=32, num_kv_heads=1, heads_per_kv=2, head_size=96, head_size_v=96),
    Shape(block_size=64, num_kv_heads=1, heads_per_kv=4, head_size=128, head_size_v=128),
    Shape(block_size=128, num_kv_heads=2, heads_per_kv=7, head_size=64, head_size_v=64),
    Shape(block_size=16, num_kv_heads=1, heads_per_kv=8, head_size=256, head_size_v=256),
    Shape(block_size=32, num_kv_heads=1, heads_per_kv=16, head_size=32, head_size_v=128),
    Shape(block_size=48, num_kv_heads=1, heads_per_kv=5, head_size=160, head_size_v=32),
]
CASES = [replace(shape, format=f) for f in FORMATS for shape in GRID]
CASES += [
    replace(GRID[0], format=f, head_size=80, head_size_v=v) for f in FORMATS[:2] for v in (80, 112)
]

# (first query, end): alone, over the borders of sub-blocks, blocks and splits, prompts and chunks.
STEPS = [
    (0, 1),
    (15, 16),
    (16, 17),
    (0, 13),
    (255, 256),
    (256, 257),
    (250, 300),
    (511, 513),
    (0, 70),
]
STEPS += [(600, 601), (100, 147), (1023, 1024)]


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_a_mixed_step_equals_the_definition(native: ModuleType, shape: Shape) -> None:
    stored = store(native, shape, random_rows(shape, [end for _, end in STEPS]))
    results = run(native, stored, dict(enumerate(STEPS)))
    for request, (first, end) in enumerate(STEPS):
        want = expected(stored, request, first, end)
        error = np.abs(results[request] - want).max()
        assert error <= TOLERANCE[shape.format], (request, first, end)


@pytest.mark.parametrize("format", FORMATS)
def test_threads_and_parts_change_no_bit(native: ModuleType, format: str) -> None:
    shape = Shape(format, 32, 2, 2, 64, 64)
    stored = store(native, shape, random_rows(shape, [1500, 40]))
    step = {0: (1499, 1500), 1: (0, 40)}
    one = run(native, stored, step)
    for num_threads in (2, 3, 8):
        # The countdown of parts starts anew for each of three layers.
        results = run(native, stored, step, shape.layer(native, num_threads), num_layers=3)
        assert all(np.array_equal(results[r], one[r]) for r in step)


def test_a_long_request_alone_is_spread_over_items(native: ModuleType) -> None:
    shape = Shape("bfloat16", 16, 3, 3, 64, 64)
    stored = store(native, shape, random_rows(shape, [1100]), num_threads=2)
    run(native, stored, {0: (1099, 1100)})
    assert stored.layer.num_items == 3 * 5


@pytest.mark.parametrize("format", FORMATS)
def test_what_lies_in_unused_slots_changes_nothing(native: ModuleType, format: str) -> None:
    shape = Shape(format, 32, 2, 3, 64, 64)
    seq_lens = [1, 2, 15, 16, 17, 33, 255, 257, 300]
    rows = random_rows(shape, seq_lens)
    zeroed, poisoned = (store(native, shape, rows, fill=fill) for fill in (0, 0xFF))
    decode = {r: (n - 1, n) for r, n in enumerate(seq_lens)}
    prefill = {r: (0, n) for r, n in enumerate(seq_lens)}
    for step in (decode, prefill):
        want, got = run(native, zeroed, step), run(native, poisoned, step)
        for r in step:
            assert np.isfinite(got[r]).all()
            assert np.array_equal(got[r], want[r])


@pytest.mark.parametrize("key", [0.0, -1e5, 1e5])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("format", FORMATS)
def test_equal_scores_average_the_visible_values(
    native: ModuleType, format: str, block_size: int, key: float
) -> None:
    shape = Shape(format, block_size, 2, 2, 32, 32)
    stored = store(native, shape, [uniform_rows(shape, 33, key)], fill=0xFF)
    chunks = [[(0, 33)], [(i, i + 1) for i in range(33)], [(0, 3), (3, 6), (6, 10), (10, 33)]]
    for steps in chunks:
        out = np.concatenate([run(native, stored, {0: step})[0] for step in steps])
        want = np.arange(33)[:, None] / 2
        assert np.allclose(out, np.broadcast_to(want, out.shape), rtol=4e-3, atol=1e-6)


def test_query_heads_read_the_kv_head_of_their_group(native: ModuleType) -> None:
    shape = Shape("bfloat16", 16, 2, 2, 32, 32)
    rows = uniform_rows(shape, 20)
    rows[:, -2 * 32 : -32], rows[:, -32:] = 0, 10
    out = run(native, store(native, shape, [rows]), {0: (0, 20)})[0].reshape(20, 4, 32)
    assert np.allclose(out[:, :2], 0)
    assert np.allclose(out[:, 2:], 10, rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_request_with_nan_harms_itself_only(native: ModuleType, format: str) -> None:
    shape = Shape(format, 16, 1, 3, 64, 64)
    rows = random_rows(shape, [40, 40])
    clean = run(native, store(native, shape, rows), {0: (39, 40), 1: (39, 40)})
    rows[0][20] = np.nan
    results = run(native, store(native, shape, rows), {0: (39, 40), 1: (39, 40)})
    assert np.isnan(results[0]).all()
    assert np.array_equal(results[1], clean[1])


@pytest.mark.parametrize("num_nans", [1, 4, 8, 16, 20, 40])
def test_a_split_that_holds_nothing_but_nans_is_not_lost(native: ModuleType, num_nans: int) -> None:
    shape = Shape("float32", 16, 1, 3, 32, 32)
    rows = random_rows(shape, [256 + num_nans])
    rows[0][256:, -2 * 32 :] = np.nan  # keys and values; the query of the last token is one of 0
    rows[0][:, : -2 * 32] = 0
    out = run(native, store(native, shape, rows), {0: (255 + num_nans, 256 + num_nans)})[0]
    assert np.isnan(out).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_request_without_tokens_in_the_step_is_passed_over(
    native: ModuleType, format: str
) -> None:
    shape = Shape(format, 16, 1, 3, 64, 64)
    stored = store(native, shape, random_rows(shape, [40, 30, 20]))
    with_gap = run(native, stored, {0: (39, 40), 1: (30, 30), 2: (5, 20)})
    without = run(native, stored, {0: (39, 40), 2: (5, 20)})
    assert all(np.array_equal(with_gap[r], without[r]) for r in (0, 2))


# --- the binding --------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_errors(native: ModuleType) -> None:
    shape = Shape("bfloat16", 16, 2, 2, 32, 32)
    layer = shape.layer(native)
    raw = np.zeros((3, layer.block_bytes), np.uint8)
    q = empty_queries(shape, 1)
    out = np.zeros((1, shape.num_heads * 32), np.float32)

    def attend_with(**changes: Any) -> None:
        arrays = {"starts": [0, 1], "lens": [20], "table": [[1, 2]], "raw": raw, "q": q, "out": out}
        a = arrays | changes
        step = native.attention.AttentionStep(
            np.array(a["starts"], np.int32), np.array(a["lens"], np.int32),
            np.array(a["table"], np.int32),
        )  # fmt: skip
        layer.attend(a["raw"][None], a["q"], step, a["out"])

    attend_with()
    hostile: list[dict[str, Any]] = [
        {"starts": [0, 2]}, {"starts": [1, 1]}, {"starts": [0, -1]}, {"lens": [0]}, {"lens": [33]},
        {"lens": [2**31 - 1]}, {"table": [[1, 3]]}, {"table": [[-1, 1]]},
        {"table": [[1, 2], [1, 2]]},
        {"raw": raw[:, :-1].copy()}, {"q": q.astype(np.float32)}, {"q": q[:, :, :16].copy()},
        {"out": out[:, :-1].copy()}, {"out": np.zeros((2, 128), np.float32)},
    ]  # fmt: skip
    for changes in hostile:
        with pytest.raises(ValueError, match=r"must|too|has|out of range"):
            attend_with(**changes)


def test_places_out_of_range_are_errors(native: ModuleType) -> None:
    shape = Shape("bfloat16", 16, 2, 2, 32, 32)
    layer = shape.layer(native)
    raw = np.zeros((3, layer.block_bytes), np.uint8)
    (rows,) = random_rows(shape, [1])
    for position, slot, width in ((0, 48, 0), (0, -2, 0), (4, 0, 8), (-1, 0, 8), (0, 0, 34)):
        at = native.attention.StoredAt(np.array([position]), np.array([slot]))
        with pytest.raises(ValueError, match=r"out of range|wider"):
            layer.write(raw, rows, at, np.zeros((4, width), np.float32), empty_queries(shape, 1))
