"""Attention of the reference, from definitions: what a query sees is the mean of what is visible.

With q = k = 0 all visible keys weigh the same, so v_j = j gives the mean of the visible j.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.ops.base import Attention
from reference_cache import (
    BLOCK_SIZES,
    HEAD_SIZE,
    NAN_BITS,
    Cache,
    Piece,
    constant,
    counting,
    dense_attention,
    mean_of_visible,
    random_qkv,
    run_counting,
)

pytestmark = pytest.mark.usefixtures("each_backend")


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("num_tokens", [9, 10, 16])
@pytest.mark.parametrize("block_size", [4, 8])
def test_last_block_partial_or_full(block_size: int, num_tokens: int, dtype: DType) -> None:
    out = run_counting(Cache(block_size, dtype=dtype), [num_tokens - 1, 1])
    np.testing.assert_allclose(out, mean_of_visible(num_tokens), atol=1e-6)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_equals_the_textbook_formula(block_size: int, heads: tuple[int, int]) -> None:
    q, k, v = random_qkv(37, heads, (6, 4))
    cache = Cache(block_size, num_kv_heads=heads[1], head_size=6, head_size_v=4)
    parts = [slice(0, 1), slice(1, 20), slice(20, 36), slice(36, 37)]
    scoring = Attention(0.7)
    out = np.concatenate([cache.step([Piece(0, q[p], k[p], v[p])], scoring) for p in parts])
    np.testing.assert_allclose(out, dense_attention(q, k, v, scoring), atol=2e-6)


def test_long_prompts_cross_tiles_of_queries() -> None:
    out = run_counting(Cache(16), [300, 5])
    np.testing.assert_allclose(out, mean_of_visible(305), rtol=1e-5)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_requests_of_one_batch_do_not_see_each_other(block_size: int) -> None:
    together = Cache(block_size, num_requests=3)
    alone = Cache(block_size, num_requests=3)
    steps = [[(0, 5), (2, 1)], [(2, 3), (1, 7), (0, 1)], [(0, 1), (1, 1), (2, 4)]]
    q, k, v = random_qkv(40, (2, 1), (HEAD_SIZE, HEAD_SIZE))
    for number, step in enumerate(steps):
        pieces = []
        for request, count in step:
            part = slice(10 * request + number, 10 * request + number + count)
            pieces.append(Piece(request, q[part], k[part], v[part]))
        mixed = together.step(pieces)
        single = np.concatenate([alone.step([piece]) for piece in pieces])
        np.testing.assert_allclose(mixed, single, atol=1e-6)
    assert together.num_computed == [7, 8, 8]


def test_requests_of_one_step_may_share_blocks_that_the_step_fills() -> None:
    cache = Cache(4, num_requests=2)
    cache.tables[0, 0] = cache.tables[1, 0]  # request 0 reads the block that request 1 fills
    first = Piece(0, constant(1, 0.0), constant(1, 0.0), constant(1, 100.0))
    second = Piece(1, constant(4, 0.0), constant(4, 0.0), counting(0, 4))
    cache.num_computed[0] = 4
    out = cache.step([first, second])  # the reader comes first in the batch
    np.testing.assert_allclose(out[0, 0], (0 + 1 + 2 + 3 + 100) / 5)


def test_padding_writes_nothing_and_changes_nothing() -> None:
    plain, padded = Cache(4), Cache(4)
    piece = Piece(0, constant(6, 0.0), constant(6, 0.0), counting(0, 6))
    expected = plain.step([piece])
    out = padded.step([piece], num_padding=3)
    np.testing.assert_array_equal(out[:6], expected)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(padded.raw, plain.raw)


def test_a_request_without_tokens_and_an_empty_batch() -> None:
    cache = Cache(4, num_requests=2)
    none = Piece(1, constant(0, 0.0), constant(0, 0.0), constant(0, 0.0))
    some = Piece(0, constant(3, 0.0), constant(3, 0.0), counting(0, 3))
    np.testing.assert_allclose(cache.step([none, some])[:, 0], mean_of_visible(3), atol=1e-6)
    assert cache.step([none]).shape == (0, 1, HEAD_SIZE)


def test_blocks_of_a_wider_tensor_need_not_be_adjacent() -> None:
    cache = Cache(4)
    expected = run_counting(Cache(4), [10])
    raw = cache.backend.allocate_kv(2 * len(cache.raw))
    raw[:] = NAN_BITS
    cache.layer.storage = cache.backend.view_kv(raw, cache.spec, cache.num_blocks)
    np.testing.assert_array_equal(run_counting(cache, [10]), expected)
    page = cache.spec.page_size_bytes
    between = raw.reshape(cache.num_blocks, 2 * page)[:, page:]
    assert (between == NAN_BITS).all()
