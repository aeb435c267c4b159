"""Which shapes there are, and what a batch looks like in one of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import CapacityError
from kvloom.kv.spec import FullAttentionSpec, SlidingWindowSpec
from kvloom.ops.base import AttentionMetadata, Batch
from kvloom.runner.static_shapes import StaticShapes, StepShape
from kvloom.shapes import ShapeBuckets

HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": DType.FLOAT32}
FULL = FullAttentionSpec(block_size=4, **HEADS)
WINDOW = SlidingWindowSpec(block_size=2, sliding_window=5, **HEADS)
BUCKETS = ShapeBuckets((4, 16), (2, 4), (16, 40), prefill_segment=8)


def make_batch(requests, num_rows=None):
    """A batch of requests of (computed tokens, new tokens); block ids tell request and column."""
    computed, counts = (np.array(numbers, np.int32) for numbers in zip(*requests, strict=True))
    seq_lens = computed + counts
    num_tokens = int(counts.sum())
    groups = []
    for spec in (FULL, WINDOW):
        width = -(-int(seq_lens.max()) // spec.block_size)
        table = 100 * (1 + np.arange(len(requests)))[:, None] + np.arange(width)
        table[np.arange(width) >= -(-seq_lens[:, None] // spec.block_size)] = 0
        groups.append(
            AttentionMetadata(
                table.astype(np.int32),
                1000 + np.arange(num_tokens),
                np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
                seq_lens,
                computed,
                spec.block_size,
            )
        )
    places = [c + np.arange(n) for c, n in requests]
    rows = np.arange(len(requests) if num_rows is None else num_rows)
    return Batch(1 + np.arange(num_tokens), np.concatenate(places), rows, groups)


def test_padding_belongs_to_nobody_and_is_stored_nowhere():
    """5 tokens of 3 requests become 16 of 4.

    A window of 5 that begins at position 9 sees 5, in column 2 of blocks of 2; at 12 it sees 8, in
    column 4. With a segment of 8 it spans 12 tokens, which touch up to 7 blocks.
    """
    shapes = StaticShapes(BUCKETS, 6, [FULL, WINDOW])
    batch = make_batch([(9, 1), (0, 3), (12, 1)])
    shape = shapes.find(batch)
    assert shape == StepShape(num_tokens=16, num_reqs=4, num_rows=4, num_columns=(4, 7))
    padded = shapes.pad(batch, shape)
    assert padded.token_ids.tolist() == [1, 2, 3, 4, 5] + [0] * 11
    assert padded.positions.tolist() == [9, 0, 1, 2, 12] + [0] * 11
    assert padded.logits_rows.tolist() == [0, 1, 2, 0]
    full, window = padded.attention
    for group in (full, window):
        assert group.slot_mapping.tolist() == [1000, 1001, 1002, 1003, 1004] + [-1] * 11
        assert group.query_start.tolist() == [0, 1, 4, 5, 5]
        assert group.seq_lens.tolist() == [10, 3, 13, 0]
        assert group.num_computed_tokens.tolist() == [9, 0, 12, 0]
    assert full.first_columns.tolist() == [0, 0, 0, 0]
    assert full.block_table.tolist() == [
        [100, 101, 102, 0],
        [200, 0, 0, 0],
        [300, 301, 302, 303],
        [0, 0, 0, 0],
    ]
    assert window.first_columns.tolist() == [2, 0, 4, 0]
    assert window.block_table.tolist() == [
        [102, 103, 104, 0, 0, 0, 0],
        [200, 201, 0, 0, 0, 0, 0],
        [304, 305, 306, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    for array in (full.block_table, full.first_columns, full.query_start, full.seq_lens):
        assert array.dtype == np.int32


def test_a_short_step_reads_fewer_columns():
    """Windows of 5 and up to 4 tokens in flight touch 5 blocks of 2, whatever the context."""
    shapes = StaticShapes(BUCKETS, 6, [FULL, WINDOW])
    widths = {}
    for computed in (1, 30):
        batch = make_batch([(computed, 1), (0, 1)])
        shape = shapes.find(batch)
        assert (shape.num_tokens, shape.num_reqs) == (4, 2)
        padded = shapes.pad(batch, shape)
        widths[computed] = [group.block_table.shape[1] for group in padded.attention]
    assert widths == {1: [4, 5], 30: [10, 5]}


def test_steps_that_score_prompts_have_room_for_the_most_rows():
    shapes = StaticShapes(BUCKETS, 6, [FULL, WINDOW])
    assert shapes.find(make_batch([(0, 8), (0, 8)], num_rows=2)).num_rows == 2
    assert shapes.find(make_batch([(0, 8), (0, 8)], num_rows=3)).num_rows == 6
    assert shapes.find(make_batch([(0, 4)], num_rows=3)).num_rows == 4
    assert shapes.find(make_batch([(0, 4)], num_rows=0)).num_rows == 2


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([(0, 5), (0, 6), (0, 6)], "17 tokens"),
        ([(0, 1)] * 5, "5 requests"),
        ([(40, 1)], "41 tokens of one request"),
        ([(0, 9)], "9 tokens of one request"),
    ],
)
def test_a_step_outside_the_buckets_is_an_error(requests, words):
    with pytest.raises(CapacityError, match=words):
        StaticShapes(BUCKETS, 6, [FULL, WINDOW]).find(make_batch(requests))


@pytest.mark.parametrize(
    "buckets",
    [
        ShapeBuckets((3, 5, 8), (1, 2, 5), (2, 6), 3),
        ShapeBuckets((8,), (3,), (7,), 8),
        ShapeBuckets((1, 2, 4), (1, 2, 4), (4,), 1),
        ShapeBuckets((2, 9), (1, 6), (1, 3, 4), 2),
    ],
)
def test_all_shapes_are_those_that_some_step_has(buckets):
    """Every step of the definition: a token or more of each request, at most a segment."""
    most_rows = 7
    expected = set()
    sizes = itertools.product(
        range(1, buckets.num_tokens[-1] + 1),
        range(1, buckets.num_reqs[-1] + 1),
        range(1, buckets.context_lens[-1] + 1),
    )
    shapes = StaticShapes(buckets, most_rows, [FULL, WINDOW])
    for num_tokens, num_reqs, longest in sizes:
        most_each = min(buckets.prefill_segment, longest)
        if not num_reqs <= num_tokens <= num_reqs * most_each:
            continue
        counts = [1] * num_reqs
        for i in range(num_reqs):
            counts[i] += min(most_each - 1, num_tokens - sum(counts))
        # One request has the longest context, the others none but their new tokens.
        requests = [(0, n) for n in counts]
        requests[0] = (longest - counts[0], counts[0])
        for num_rows in range(min(most_rows, num_tokens) + 1):
            expected.add(shapes.find(make_batch(requests, num_rows)))
    found = shapes.all()
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_shape_can_be_filled_with_padding_alone():
    shapes = StaticShapes(BUCKETS, 6, [FULL, WINDOW])
    for shape in shapes.all():
        batch = shapes.make_padding(shape)
        real = shapes.pad(make_batch([(0, 1)]), shape)
        assert [len(batch.token_ids), len(batch.logits_rows)] == [shape.num_tokens, shape.num_rows]
        for group, other in zip(batch.attention, real.attention, strict=True):
            assert group.block_table.shape == other.block_table.shape
            assert group.block_table.shape[0] == shape.num_reqs
            assert not group.block_table.any()
            assert group.query_start.tolist() == [0] * (shape.num_reqs + 1)
            assert set(group.slot_mapping.tolist()) == {-1}
