"""A step that is scheduled while another runs: what it names, and what it must not touch."""

from __future__ import annotations

import pytest

from kvloom.kv.events import BlockStored
from kvloom.request import RequestStatus


@pytest.fixture
def ahead(setup):
    """A setup that steps asynchronously."""
    return lambda **options: setup(has_async_stepping=True, **options)


def held_blocks(s) -> set[int]:
    """Ids of the blocks of all that run."""
    tables = [s.manager.get_block_ids(r.req_id) for r in s.scheduler._running]
    return {block_id for table in tables for ids in table for block_id in ids}


def test_a_step_names_the_token_that_the_step_in_flight_samples(ahead):
    s = ahead()
    s.add("r", range(6), max_tokens=9)
    first, second = s.schedule(), s.schedule()
    assert [o.num_scheduled_tokens for o in (first, second)] == [{"r": 6}, {"r": 1}]
    cached = second.scheduled_cached_reqs
    assert (cached.num_computed_tokens, cached.new_token_ids) == ([6], [[]])
    # One ahead and no more: two tokens are not known by now.
    third = s.schedule()
    assert third.num_scheduled_tokens == {}
    assert s.update(first, sampled_token_ids={"r": [7]})[0].new_token_ids == [7]
    assert s.schedule().num_scheduled_tokens == {"r": 1}


def test_a_prompt_goes_on_chunk_by_chunk(ahead):
    s = ahead(max_num_batched_tokens=4)
    s.add("r", range(6), max_tokens=2)
    outputs = [s.schedule() for _ in range(3)]
    assert [o.num_scheduled_tokens for o in outputs] == [{"r": 4}, {"r": 2}, {"r": 1}]


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 512), (9, 9)])
def test_nothing_is_computed_behind_a_last_token_that_is_known_ahead(
    ahead, max_tokens, max_model_len
):
    s = ahead(max_model_len=max_model_len)
    s.add("r", range(6), max_tokens=max_tokens)
    steps, tokens = [s.schedule()], []
    while s.scheduler.has_unfinished_requests():
        steps.append(s.schedule())
        tokens += s.update(steps[-2], sampled_token_ids={"r": [7]})[0].new_token_ids
    assert tokens == [7] * 3
    # The prompt, then two of the three tokens: the last one is never read.
    assert [o.num_scheduled_tokens for o in steps] == [{"r": 6}, {"r": 1}, {"r": 1}, {}]


@pytest.mark.parametrize("how", ["eos", "abort", "stop string", "error"])
def test_who_ends_under_a_step_keeps_its_blocks_until_that_is_over(ahead, fresh, how):
    s = ahead(num_blocks=9, block_size=2, max_num_seqs=2)  # eight usable
    request = s.add("r", fresh(5), max_tokens=9, eos_token_ids=frozenset({0}))
    first, second = s.schedule(), s.schedule()
    held = held_blocks(s)
    s.update(first, sampled_token_ids={"r": [7]})
    third = s.schedule()
    held |= held_blocks(s)
    if how in ("eos", "error"):
        result = {"errors": {"r": "NaN"}} if how == "error" else {"sampled_token_ids": {"r": [0]}}
        [event] = s.update(second, **result)
    else:
        status = {"abort": RequestStatus.FINISHED_ABORT, "stop string": RequestStatus.FINISHED_STOP}
        s.update(second, sampled_token_ids={"r": [7]})
        [event] = s.scheduler.finish_requests(["r"], status[how], "x")
    assert event.finish_reason == {"eos": "stop", "stop string": "stop"}.get(how, how)
    s.manager.check()
    s.add("next", fresh(10), max_tokens=1)
    fourth = s.schedule()  # five of its blocks are free, but four are held
    assert s.manager.num_used_blocks == len(held) == 4
    assert fourth.finished_req_ids == {"r"}
    assert fourth.num_scheduled_tokens == {}
    num_known = request.num_tokens
    assert s.update(third, sampled_token_ids={"r": [8]}) == []  # sampled in vain
    assert request.num_tokens == num_known
    assert s.manager.num_used_blocks == 0
    s.update(fourth)
    assert s.schedule().num_scheduled_tokens == {"next": 10}


@pytest.mark.parametrize("state", ["waiting", "prefill", "running", "preempted"])
def test_abort_in_every_state_with_a_step_in_flight(ahead, fresh, state):
    s = ahead(num_blocks=7, block_size=2, max_num_batched_tokens=6)
    s.add("old", fresh(4), max_tokens=6)
    request = s.add("r", fresh(4), max_tokens=6)
    in_flight = [s.schedule()] if state != "waiting" else []
    for _ in range({"waiting": 0, "prefill": 0, "running": 2, "preempted": 4}[state]):
        in_flight.append(s.schedule())
        s.update(in_flight.pop(0))
    assert request.status.value == ("running" if state == "prefill" else state)
    s.scheduler.finish_requests(["r", "old"], RequestStatus.FINISHED_ABORT)
    s.manager.check()
    for output in in_flight:
        assert s.update(output) == []
    assert s.manager.num_used_blocks == 0
    assert not s.scheduler.has_unfinished_requests()


def test_a_token_that_arrives_after_its_request_gave_way_is_kept(ahead, fresh):
    s = ahead(num_blocks=7, block_size=2)
    s.add("old", fresh(4), max_tokens=6)
    new = s.add("new", fresh(4), max_tokens=6)
    in_flight = [s.schedule()]
    while new.status is not RequestStatus.PREEMPTED:
        in_flight.append(s.schedule())
        if new.status is RequestStatus.PREEMPTED:
            break
        s.update(in_flight.pop(0), sampled_token_ids={"old": [1], "new": [2]})
    num_known = new.num_output_tokens
    assert "new" in in_flight[0].num_scheduled_tokens
    events = s.update(in_flight.pop(0), sampled_token_ids={"old": [1], "new": [3]})
    assert [e.new_token_ids for e in events if e.req_id == "new"] == [[3]]
    while not any((output := s.schedule()).scheduled_cached_reqs.resumed_from_preemption):
        in_flight.append(output)
        s.update(in_flight.pop(0), sampled_token_ids={"old": [1]})
    assert output.scheduled_cached_reqs.new_token_ids == [[2] * num_known + [3]]


@pytest.mark.parametrize(("token", "reason"), [(0, "stop"), (7, "error")])
def test_who_may_be_too_large_to_come_back_hears_its_last_token_first(ahead, fresh, token, reason):
    s = ahead(num_blocks=4, block_size=2)  # six slots
    request = s.add("r", fresh(4), max_tokens=20, eos_token_ids=frozenset({0}))
    first, second = s.schedule(), s.schedule()
    s.update(first, sampled_token_ids={"r": [7]})
    third = s.schedule()
    s.update(second, sampled_token_ids={"r": [7]})
    # Six tokens are known, stored and fit; a seventh is on its way and finds no block.
    fourth = s.schedule()
    assert request.status is RequestStatus.PREEMPTED
    events = s.update(third, sampled_token_ids={"r": [token]})
    events += s.update(fourth)
    assert [t for e in events for t in e.new_token_ids] == [token]
    assert [e.finish_reason for e in events if e.finish_reason] == [reason]
    assert s.manager.num_used_blocks == 0


def test_a_block_is_published_once_all_of_its_tokens_are_known(ahead):
    s = ahead(block_size=2)
    s.add("r", range(3), max_tokens=9)
    first, second = s.schedule(), s.schedule()  # the second fills block 2 with a token to come
    assert s.manager.num_used_blocks == 2
    assert len([e for e in s.events.drain() if isinstance(e, BlockStored)]) == 1
    s.update(first, sampled_token_ids={"r": [7]})
    third = s.schedule()
    [stored] = [e for e in s.events.drain() if isinstance(e, BlockStored)]
    s.update(second, sampled_token_ids={"r": [8]})
    s.update(third, sampled_token_ids={"r": [9]})
    again = s.add("again", [0, 1, 2, 7, 8])
    s.schedule()
    assert again.num_cached_tokens == 4
    assert stored.block_id in s.manager.get_block_ids("again")[0]


def test_a_failed_step_takes_along_the_one_behind_it(ahead):
    s = ahead(block_size=2, max_num_seqs=2)
    s.add("a", range(5), max_tokens=9)
    first = s.schedule()
    s.add("b", range(100, 105), max_tokens=9)
    s.add("c", range(200, 205), max_tokens=1)
    second = s.schedule()
    for output in (first, second):
        s.scheduler.fail_step(output, "broken")
        s.manager.check()
    assert s.manager.num_used_blocks == 0
    s.add("a again", range(5), max_tokens=1)
    s.add("b again", range(100, 105), max_tokens=1)
    ended = {e.req_id: (e.finish_reason, e.num_cached_tokens) for e in s.finish_all()}
    assert ended == {
        "a": ("error", 0),
        "b": ("error", 0),
        "c": ("length", 0),
        "a again": ("length", 0),  # nothing of the failed steps is found
        "b again": ("length", 0),
    }


def test_steps_are_updated_in_order(ahead):
    s = ahead()
    s.add("r", range(6), max_tokens=9)
    s.schedule()
    second = s.schedule()
    with pytest.raises(AssertionError, match="order"):
        s.scheduler.update(second, None)


def test_one_step_runs_and_one_is_made_ready(ahead):
    s = ahead()
    s.add("r", range(6), max_tokens=9)
    assert s.scheduler.may_schedule
    first = s.schedule()
    assert s.scheduler.may_schedule
    s.schedule()
    assert not s.scheduler.may_schedule
    s.update(first, sampled_token_ids={"r": [7]})
    assert s.scheduler.may_schedule


def test_no_step_is_scheduled_ahead_for_nobody(ahead):
    """The only token left is in flight: whoever waits enters once its seat is free."""
    s = ahead(max_num_seqs=1)
    s.add("r", range(6), max_tokens=1)
    s.add("next", range(3), max_tokens=1)
    first = s.schedule()
    assert not s.scheduler.may_schedule
    s.update(first, sampled_token_ids={"r": [7]})
    assert s.schedule().num_scheduled_tokens == {"next": 3}


def test_nobody_runs_ahead_of_one_that_cannot(ahead):
    """It would be in every other step, and the others in all of them."""
    s = ahead()
    s.add("r", range(6), max_tokens=9)
    s.add("beam", range(3), max_tokens=9).runs_ahead = False
    first = s.schedule()
    assert not s.scheduler.may_schedule
    s.update(first, sampled_token_ids={"r": [7], "beam": [8]})
    assert s.schedule().num_scheduled_tokens == {"r": 1, "beam": 1}
    s.scheduler.finish_requests(["beam"], RequestStatus.FINISHED_ABORT)
    assert s.scheduler.may_schedule


def test_steps_in_turn_are_scheduled_when_the_last_one_is_updated(setup):
    s = setup(has_async_stepping=False)
    s.add("r", range(6), max_tokens=9)
    first = s.schedule()
    assert not s.scheduler.may_schedule
    s.update(first, sampled_token_ids={"r": [7]})
    assert s.scheduler.may_schedule
