"""Who goes first, who gives way, and how long the others wait: by priority, then by arrival."""

from __future__ import annotations

import pytest

from kvloom.errors import RequestError
from kvloom.kv.events import RequestPreempted
from kvloom.request import MAX_PRIORITY, Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched import queue


def finished(steps) -> list[str]:
    return [e.req_id for _, events in steps for e in events if e.finish_reason is not None]


def test_lower_numbers_run_first_and_equal_ones_by_arrival(setup, fresh):
    s = setup(max_num_seqs=1)
    for req_id, priority in [("a", 2), ("b", 0), ("c", -1), ("d", 0), ("e", -1), ("f", 2)]:
        s.add(req_id, fresh(3), priority=priority)
    assert finished(s.run_out()) == ["c", "e", "b", "d", "a", "f"]


def test_the_tokens_of_a_step_go_to_the_lowest_number_first(setup, fresh):
    s = setup(max_num_batched_tokens=8)
    s.add("late", fresh(6), priority=1)
    s.add("soon", fresh(6), priority=0)
    assert s.step()[0].num_scheduled_tokens == {"soon": 6, "late": 2}
    s.add("now", fresh(6), max_tokens=9, priority=-1)
    # Whoever runs goes on, in order; who enters takes what is left.
    assert list(s.step()[0].num_scheduled_tokens) == ["late", "now"]


def test_the_last_in_the_order_gives_way_even_to_a_newer_one(setup, fresh):
    s = setup(num_blocks=7, block_size=2)  # six usable
    low = s.add("low", fresh(4), max_tokens=6, priority=1)
    s.add("high", fresh(4), max_tokens=6, priority=0)
    steps = [s.step() for _ in range(4)]
    assert low.status is RequestStatus.PREEMPTED
    preempted = [e for e in s.events.drain() if isinstance(e, RequestPreempted)]
    assert preempted == [RequestPreempted("low", needed_by="high", num_lost_tokens=6)]
    assert finished(steps + s.run_out()) == ["high", "low"]


def test_a_preempted_request_waits_behind_lower_numbers_and_before_its_equals(setup, fresh):
    s = setup(num_blocks=7, block_size=2)
    s.add("low", fresh(4), max_tokens=6, priority=1)
    s.add("high", fresh(4), max_tokens=6, priority=0)
    for _ in range(4):
        s.step()
    s.add("equal", fresh(10), priority=1)
    s.add("lower", fresh(10), priority=0)
    assert finished(s.run_out()) == ["high", "lower", "low", "equal"]


def test_nobody_passes_a_lower_number_more_often_than_allowed(setup, fresh):
    s = setup(num_blocks=9, block_size=2, max_num_bypasses=2)
    s.add("holder", fresh(8), max_tokens=9)
    s.step()
    big = s.add("big", fresh(16), priority=-1)
    for i in range(6):
        s.add(f"small{i}", fresh(1), priority=i % 2)
    order = finished(s.run_out())
    assert order[: order.index("big")] == ["small0", "small2", "holder"]
    assert big.num_bypasses == 2


def test_a_stream_of_lower_numbers_does_not_starve_a_request(setup, fresh, monkeypatch):
    monkeypatch.setattr(queue, "PLACES_PER_PRIORITY", 5)
    s = setup(max_num_seqs=1)
    low = s.add("low", fresh(2), priority=2)
    num_before = 0
    while low.status is RequestStatus.WAITING:
        s.add(f"high{num_before}", fresh(2), priority=0)
        s.step()
        num_before += low.status is RequestStatus.WAITING
        assert num_before < 100
    # Arrivals 1 to 9 have a place below 0 + 2 * 5; the tenth has the same number and came later.
    assert num_before == 9


@pytest.mark.parametrize("priority", [0.0, True, None, "1", MAX_PRIORITY + 1, -MAX_PRIORITY - 1])
def test_what_is_no_priority_is_refused(priority):
    params = ResolvedSamplingParams(seed=0, max_tokens=1)
    with pytest.raises(RequestError, match="priority"):
        Request("r", [1], params, priority=priority)
