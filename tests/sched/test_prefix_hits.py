"""Blocks of a prefix that was computed before are not computed again."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (range(3), range(3), 0),
        (range(4), range(4), 0),
        (range(5), range(5), 4),
        (range(7), range(7), 4),
        (range(8), range(8), 4),
        (range(9), range(9), 8),
        (range(12), range(12), 8),
        (range(12), [*range(12), 99], 12),
        (range(12), [*range(5), *range(90, 97)], 4),
        (range(12), [*range(4), *range(90, 98)], 4),
        (range(12), [*range(3), *range(90, 99)], 0),
        ([1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 2, 2, 2, 2, 9], 0),
        ([65] * 9, [321] * 9, 0),
    ],
)
def test_case_5_hits_at_block_edges(setup, first, second, expected):
    s = setup(block_size=4)
    s.add("first", first)
    [cold] = s.finish_all()
    assert cold.num_cached_tokens == 0
    s.add("second", second)
    [warm] = s.finish_all()
    assert warm.num_cached_tokens == expected
    assert warm.num_cached_tokens <= len(list(second)) - 1
    alone = setup(block_size=4)
    alone.add("second", second)
    assert alone.finish_all()[0].new_token_ids == warm.new_token_ids


def test_case_5_the_third_run_hits_as_the_second(setup):
    s = setup(block_size=4)
    cached = []
    for i in range(3):
        s.add(str(i), range(8))
        cached += [event.num_cached_tokens for event in s.finish_all()]
    assert cached == [0, 4, 4]


def test_case_5_counters(setup):
    s = setup(block_size=4)
    for i in range(3):
        s.add(str(i), range(9))
        s.finish_all()
    assert (s.manager.stats.num_queried_tokens, s.manager.stats.num_hit_tokens) == (27, 16)


def test_case_5_blocks_filled_by_output_are_reusable(setup):
    s = setup(block_size=4)
    request = s.add("first", range(8), max_tokens=5)
    s.finish_all()
    s.add("second", [*range(8), *request.output_token_ids[:4], 99_999])
    assert s.finish_all()[0].num_cached_tokens == 12


def test_case_5_concurrent_twins(setup):
    s = setup(block_size=4)
    s.add("a", range(9))
    s.add("b", range(9))
    output, events = s.step()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 8]
    assert [new.block_ids for new in output.scheduled_new_reqs] == [([1, 2, 3],), ([1, 2, 4],)]
    assert output.num_common_prefix_blocks == [2]
    assert events[0].new_token_ids == events[1].new_token_ids
    assert s.manager.num_used_blocks == 0
