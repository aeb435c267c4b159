"""Windows, chunks, sinks and soft caps of the reference, from definitions.

With q = k = 0 all visible keys weigh the same, so v_j = j gives the mean of the visible j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.kv.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvloom.ops.base import Attention, KVLayer
from reference_cache import (
    BLOCK_SIZES,
    HEAD_SIZE,
    SCHEDULES,
    Cache,
    FirstVisible,
    Piece,
    constant,
    counting,
    dense_attention,
    make_sinks,
    mean_of_visible,
    random_qkv,
    run_counting,
    sees_all,
    sees_chunk,
    sees_window,
)

pytestmark = pytest.mark.usefixtures("each_backend")


@dataclass(frozen=True)
class Kind:
    """A mask of 4 tokens, and what position 0, 3, 4, 5, 7, 8, 9 of a counting request come to."""

    spec_type: type[AttentionSpec]
    options: dict[str, int]
    first_visible: FirstVisible
    expected: list[float]

    def cache(self, block_size: int, **options: object) -> Cache:
        return Cache(block_size, self.spec_type, **self.options, **options)


SOME_POSITIONS = [0, 3, 4, 5, 7, 8, 9]
FULL = [0, 1.5, 2, 2.5, 3.5, 4, 4.5]
WINDOW = [0, 1.5, 2.5, 3.5, 5.5, 6.5, 7.5]
CHUNK = [0, 1.5, 4, 4.5, 5.5, 8, 8.5]
KINDS = {
    "full": Kind(FullAttentionSpec, {}, sees_all, FULL),
    "window": Kind(SlidingWindowSpec, {"sliding_window": 4}, sees_window(4), WINDOW),
    "chunk": Kind(ChunkedLocalAttentionSpec, {"attention_chunk_size": 4}, sees_chunk(4), CHUNK),
    "window kept": Kind(FullAttentionSpec, {"sliding_window": 4}, sees_window(4), WINDOW),
    "chunk kept": Kind(FullAttentionSpec, {"attention_chunk_size": 4}, sees_chunk(4), CHUNK),
}
all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
local_kinds = pytest.mark.parametrize("kind", list(KINDS.values())[1:], ids=list(KINDS)[1:])
all_blocks = pytest.mark.parametrize("block_size", BLOCK_SIZES)
all_schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@all_schedules
@all_blocks
@all_kinds
def test_output_is_the_mean_of_what_is_visible(kind: Kind, block_size: int, schedule: str) -> None:
    out = run_counting(kind.cache(block_size), SCHEDULES[schedule])
    np.testing.assert_allclose(out, mean_of_visible(10, kind.first_visible), atol=1e-6)
    np.testing.assert_allclose(out[SOME_POSITIONS, 0], kind.expected, atol=1e-6)


@pytest.mark.parametrize("fate", ["nulled", "stale", "unreadable"])
@all_schedules
@all_blocks
@local_kinds
def test_blocks_left_of_the_mask_are_not_read(
    kind: Kind, block_size: int, schedule: str, fate: str
) -> None:
    cache = kind.cache(block_size)

    def drop() -> None:
        cache.drop_left(kind.first_visible, fate)

    out = run_counting(cache, SCHEDULES[schedule], before_step=drop)
    np.testing.assert_allclose(out[SOME_POSITIONS, 0], kind.expected, atol=1e-6)


@all_schedules
@all_blocks
@all_kinds
def test_tables_may_begin_with_what_is_visible(kind: Kind, block_size: int, schedule: str) -> None:
    cache = kind.cache(block_size)
    cache.cut = kind.first_visible
    out = run_counting(cache, SCHEDULES[schedule])
    np.testing.assert_allclose(out[SOME_POSITIONS, 0], kind.expected, atol=1e-6)


def test_each_table_is_cut_at_its_own_column() -> None:
    """Windows of 4 in blocks of 2: the one that begins at 10 sees 7, in column 3; at 2 column 0."""
    cache = Cache(2, SlidingWindowSpec, num_requests=2, sliding_window=4)
    cache.cut = sees_window(4)
    for count in (2, 8):
        cache.step([Piece(0, *(constant(count, 0.0),) * 2, counting(cache.num_computed[0], count))])
    cache.step([Piece(1, *(constant(2, 0.0),) * 2, counting(0, 2))])
    pieces = [Piece(r, *(constant(1, 0.0),) * 2, counting(n, 1)) for r, n in ((0, 10), (1, 2))]
    out = cache.step(pieces)
    np.testing.assert_allclose(out[:, 0, 0], [(7 + 8 + 9 + 10) / 4, (0 + 1 + 2) / 3], atol=1e-6)


@pytest.mark.parametrize("num_tokens", [9, 10, 16])
@pytest.mark.parametrize("block_size", [4, 8])
@all_kinds
def test_last_block_partial_or_full(kind: Kind, block_size: int, num_tokens: int) -> None:
    for chunks in ([num_tokens], [num_tokens - 1, 1], [5, num_tokens - 5]):
        out = run_counting(kind.cache(block_size), chunks)
        np.testing.assert_allclose(out, mean_of_visible(num_tokens, kind.first_visible), atol=1e-6)


@all_schedules
@all_blocks
@all_kinds
def test_very_negative_scores_are_not_masked(kind: Kind, block_size: int, schedule: str) -> None:
    # q . k = 2 x 100 x -500 = -100000 for every key: a finite mask constant would show through.
    out = run_counting(kind.cache(block_size), SCHEDULES[schedule], qk=(100.0, -500.0))
    np.testing.assert_allclose(out[SOME_POSITIONS, 0], kind.expected, atol=1e-5)


@all_schedules
@all_blocks
@all_kinds
def test_query_heads_share_the_kv_head_of_their_group(
    kind: Kind, block_size: int, schedule: str
) -> None:
    cache = kind.cache(block_size, num_kv_heads=2)
    for count in SCHEDULES[schedule]:
        k = constant(count, 0.0, num_heads=2)
        v = np.stack([constant(count, 0.0)[:, 0], constant(count, 10.0)[:, 0]], axis=1)
        out = cache.step([Piece(0, constant(count, 0.0, num_heads=4), k, v)])
        expected = np.broadcast_to(np.array([0, 0, 10, 10])[:, None], (count, 4, HEAD_SIZE))
        np.testing.assert_allclose(out, expected, rtol=1e-6)


SINKS = {
    0.0: [0, 1.2, 2.0, 2.8, 4.4, 5.2, 6.0],
    math.log(4.0): [0, 0.75, 1.25, 1.75, 2.75, 3.25, 3.75],
}


@pytest.mark.parametrize("sink", SINKS)
@all_schedules
@all_blocks
@pytest.mark.parametrize("kind", ["window", "window kept"])
def test_a_sink_weighs_like_keys_without_value(
    kind: str, block_size: int, schedule: str, sink: float
) -> None:
    attention = Attention(1.0, sinks=make_sinks([sink]))
    cache = KINDS[kind].cache(block_size)
    out = run_counting(cache, SCHEDULES[schedule], attention=attention)
    np.testing.assert_allclose(out[SOME_POSITIONS, 0], SINKS[sink], atol=1e-6)


def test_a_sink_counts_once_however_long_the_context_is() -> None:
    attention = Attention(1.0, sinks=make_sinks([math.log(8.0)]))
    out = run_counting(Cache(16), [300, 5], attention=attention)
    i = np.arange(305)
    np.testing.assert_allclose(out[:, 0], i * (i + 1) / 2 / (i + 1 + 8), rtol=1e-5)


def test_sinks_are_per_query_head() -> None:
    cache = Cache(4, num_kv_heads=2)
    qk = constant(1, 0.0, num_heads=4), constant(1, 0.0, num_heads=2)
    piece = Piece(0, *qk, constant(1, 1.0, num_heads=2))
    out = cache.step([piece], Attention(1.0, sinks=make_sinks(np.log([1, 2, 3, 4]).tolist())))
    np.testing.assert_allclose(out[0, :, 0], [1 / 2, 1 / 3, 1 / 4, 1 / 5], rtol=1e-6)


def test_a_sink_far_above_or_below_the_scores_is_exact() -> None:
    for sink, expected in ((1e5, 0.0), (-1e5, 3.0)):
        attention = Attention(1.0, sinks=make_sinks([sink]))
        out = run_counting(Cache(4), [7], attention=attention)
        np.testing.assert_allclose(out[6, 0], expected, atol=1e-6)


CAPPED = {
    "no cap": (Attention(1.0), 0.880797),
    "cap": (Attention(1.0, soft_cap=1.0), 0.723927),
    "cap and sink": (Attention(1.0, soft_cap=1.0, sinks=make_sinks([2.0])), 0.238141),
    "cap of scaled scores": (Attention(0.5, soft_cap=1.0), 1 / (1 + math.exp(-math.tanh(1.0)))),
}


@pytest.mark.parametrize("case", CAPPED)
@pytest.mark.parametrize("chunks", [[3], [1, 2], [1, 1, 1]])
@all_blocks
def test_scores_are_capped_before_masking(block_size: int, chunks: list[int], case: str) -> None:
    # q = (1, 1), k = (0, 0), (1, 1), (1, 1); v = 0, 1, 100: scores 0, 2, and 2 in the future.
    attention, expected = CAPPED[case]
    q, k, v = constant(3, 1.0), constant(3, 1.0), constant(3, 0.0)
    k[0], v[1], v[2] = 0.0, 1.0, 100.0
    cache, out, first = Cache(block_size), [], 0
    for count in chunks:
        part = slice(first, first + count)
        out.append(cache.step([Piece(0, q[part], k[part], v[part])], attention))
        first += count
    np.testing.assert_allclose(np.concatenate(out)[1, 0], expected, atol=1e-6)


def test_a_long_prompt_through_a_small_window_crosses_tiles_of_queries() -> None:
    kind = KINDS["window"]
    for chunks in ([300, 5], [64] * 4 + [49]):
        out = run_counting(kind.cache(16), chunks)
        np.testing.assert_allclose(out, mean_of_visible(305, kind.first_visible), rtol=1e-5)


def draw_mask(rng: np.random.Generator) -> tuple[type[AttentionSpec], dict[str, int], FirstVisible]:
    size = int(rng.choice([1, 2, 3, 4, 7, 8, 16, 33]))
    window, chunk = {"sliding_window": size}, {"attention_chunk_size": size}
    masks = [
        (FullAttentionSpec, {}, sees_all),
        (FullAttentionSpec, window, sees_window(size)),
        (FullAttentionSpec, chunk, sees_chunk(size)),
        (SlidingWindowSpec, window, sees_window(size)),
        (ChunkedLocalAttentionSpec, chunk, sees_chunk(size)),
    ]
    return masks[rng.integers(len(masks))]


def draw_attention(rng: np.random.Generator, num_heads: int) -> Attention:
    sinks = make_sinks(rng.standard_normal(num_heads).tolist()) if rng.random() < 0.5 else None
    soft_cap = float(rng.uniform(0.5, 3.0)) if rng.random() < 0.5 else None
    return Attention(float(rng.uniform(0.2, 1.5)), soft_cap, sinks)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_equal_a_dense_computation(seed: int) -> None:
    """Several requests advance by random chunks; what they leave behind cannot be read."""
    rng = np.random.default_rng(seed)
    spec_type, options, first_visible = draw_mask(rng)
    num_kv_heads, sizes = int(rng.choice([1, 2, 3])), (int(rng.choice([4, 6])), 4)
    heads = (num_kv_heads * int(rng.choice([1, 2, 5])), num_kv_heads)
    attention = draw_attention(rng, heads[0])
    cache = Cache(
        int(rng.choice(BLOCK_SIZES)),
        spec_type,
        num_requests=3,
        num_kv_heads=num_kv_heads,
        head_size=sizes[0],
        head_size_v=sizes[1],
        **options,
    )
    requests = [random_qkv(length, heads, sizes) for length in rng.integers(1, 40, 3)]
    expected = [dense_attention(*qkv, attention, first_visible) for qkv in requests]
    while any(n < len(qkv[0]) for n, qkv in zip(cache.num_computed, requests, strict=True)):
        cache.drop_left(first_visible, rng.choice(["nulled", "stale", "unreadable"]))
        pieces, wanted = [], []
        for request in rng.permutation(3):
            first = cache.num_computed[request]
            part = slice(first, first + int(rng.choice([0, 1, 1, 3, 16])))
            pieces.append(Piece(request, *(x[part] for x in requests[request])))
            wanted.append(expected[request][part])
        out = cache.step(pieces, attention)
        np.testing.assert_allclose(out, np.concatenate(wanted), atol=5e-6)


@all_schedules
@all_kinds
def test_a_shared_layer_reads_what_its_target_stored(kind: Kind, schedule: str) -> None:
    q, k, v = random_qkv(10, (2, 1), (HEAD_SIZE, HEAD_SIZE))
    shared_q, attention = np.flip(q, axis=1).copy(), Attention(0.6, soft_cap=2.0)
    cache = kind.cache(4)
    shared = KVLayer("layers.1.self_attn", cache.spec, cache.layer.group, cache.layer.storage)
    out, first = [], 0
    for count in SCHEDULES[schedule]:
        part = slice(first, first + count)
        ops, *qkv = cache.begin([Piece(0, q[part], k[part], v[part])])
        ops.attention(cache.layer, *qkv, Attention(1.0))
        stored = np.asarray(cache.raw).copy()
        out.append(ops.shared_attention(shared, shared_q[part], attention))
        np.testing.assert_array_equal(cache.raw, stored)
        first += count
    expected = dense_attention(shared_q, k, v, attention, kind.first_visible)
    np.testing.assert_allclose(np.concatenate(out), expected.reshape(10, -1), atol=2e-6)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@all_schedules
@all_blocks
def test_latent_rows_are_keys_and_values(block_size: int, schedule: str, dtype: DType) -> None:
    rng = np.random.default_rng(block_size)
    # Eighths up to 2 have no more than 5 bits, so bfloat16 stores them exactly.
    q, row = (rng.integers(-16, 17, (10, h, 6)).astype(np.float32) / 8 for h in (4, 1))
    attention = Attention(0.5)
    options = {"head_size": 6, "head_size_v": 4, "dtype": dtype}
    cache = Cache(block_size, MLAAttentionSpec, **options)
    out, first = [], 0
    for count in SCHEDULES[schedule]:
        part = slice(first, first + count)
        ops, piece_q, piece_row, _ = cache.begin([Piece(0, q[part], row[part], row[part])])
        out.append(ops.latent_attention(cache.layer, piece_q, piece_row, attention, 4))
        first += count
    expected = dense_attention(q, row, row[..., :4], attention)
    np.testing.assert_allclose(np.concatenate(out), expected, atol=2e-6)


def test_a_window_that_is_one_too_long_would_show() -> None:
    cache = Cache(4, SlidingWindowSpec, sliding_window=5)
    out = cache.step([Piece(0, constant(10, 0.0), constant(10, 0.0), counting(0, 10))])
    np.testing.assert_allclose(out[SOME_POSITIONS, 0, 0], [0, 1.5, 2, 3, 5, 6, 7], atol=1e-6)
