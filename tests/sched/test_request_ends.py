"""Every way in which a request ends, and what is told of it."""

from __future__ import annotations

import pytest

from kvloom.errors import RequestError
from kvloom.request import RequestStatus
from kvloom.step import TokenLogprobs


def test_finished_ids_are_told_once(setup):
    s = setup()
    s.add("r", range(3))
    _, [event] = s.step()
    assert (event.req_id, len(event.new_token_ids), event.finish_reason) == ("r", 1, "length")
    assert not s.scheduler.has_unfinished_requests()
    empty = s.schedule()
    assert empty.finished_req_ids == {"r"}
    assert (empty.total_num_scheduled_tokens, empty.num_scheduled_tokens) == (0, {})
    assert empty.num_common_prefix_blocks == [0]
    assert s.update(empty) == []
    assert s.schedule().finished_req_ids == set()


@pytest.mark.parametrize("state", ["waiting", "prefill", "running", "preempted"])
def test_abort_in_every_state(setup, fresh, state):
    s = setup(num_blocks=7, block_size=2, max_num_batched_tokens=6)
    s.add("old", fresh(4), max_tokens=6)
    request = s.add("r", fresh(4), max_tokens=6)
    num_steps = {"waiting": 0, "prefill": 1, "running": 2, "preempted": 4}[state]
    for _ in range(num_steps):
        s.step()
    status = "running" if state == "prefill" else state
    assert request.status.value == status
    assert (request.num_output_tokens == 0) == (state in ("waiting", "prefill"))
    [event] = s.scheduler.finish_requests(["r", "unknown"], RequestStatus.FINISHED_ABORT)
    s.manager.check()
    assert (event.req_id, event.finish_reason, event.new_token_ids) == ("r", "abort", [])
    # Again: it is gone.
    assert s.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORT) == []
    # Workers are told of it if they have seen it.
    output = s.schedule()
    assert output.finished_req_ids == (set() if state == "waiting" else {"r"})
    s.scheduler.finish_requests(["old"], RequestStatus.FINISHED_ABORT)
    assert s.manager.num_used_blocks > 0  # the step in flight may still read them
    assert s.update(output) == []
    assert s.manager.num_used_blocks == 0
    assert not s.scheduler.has_unfinished_requests()


def test_results_of_a_request_that_ended_meanwhile_are_dropped(setup):
    s = setup()
    request = s.add("r", range(3), max_tokens=5)
    output = s.schedule()
    s.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORT)
    with pytest.raises(RequestError, match="req_id"):
        s.add("r", range(3), max_tokens=5)
    assert s.update(output, sampled_token_ids={"r": [7]}) == []
    again = s.add("r", range(3), max_tokens=5)  # the id is free again
    assert request.num_output_tokens == again.num_output_tokens == 0
    output = s.schedule()
    assert output.finished_req_ids == {"r"}
    assert [new.req_id for new in output.scheduled_new_reqs] == ["r"]


def test_a_stop_string_ends_a_request(setup):
    s = setup()
    request = s.add("r", range(3), max_tokens=5)
    s.step()
    [event] = s.scheduler.finish_requests(["r"], RequestStatus.FINISHED_STOP, "END")
    assert (event.finish_reason, event.stop_reason) == ("stop", "END")
    assert request.status is RequestStatus.FINISHED_STOP
    assert request.stop_reason == "END"
    assert s.manager.num_used_blocks == 0


def test_stop_tokens_end_a_request_and_cut_its_step(setup):
    s = setup()
    s.add("eos", range(3), max_tokens=5, eos_token_ids=frozenset({7}))
    s.add("id", range(50, 53), max_tokens=5, stop_token_ids=[8])
    s.add("length", range(60, 63), max_tokens=2)
    logprobs = [TokenLogprobs(t, -1.0, 1, ()) for t in (6, 7, 9)]
    events = s.update(
        s.schedule(),
        sampled_token_ids={"eos": [6, 7, 9], "id": [8], "length": [1, 2]},
        logprobs={"eos": logprobs},
    )
    assert [(e.req_id, e.new_token_ids, e.finish_reason, e.stop_reason) for e in events] == [
        ("eos", [6, 7], "stop", None),
        ("id", [8], "stop", 8),
        ("length", [1, 2], "length", None),
    ]
    assert events[0].logprobs == logprobs[:2]
    assert s.manager.num_used_blocks == 0


def test_an_error_ends_its_request_alone_and_its_blocks_are_not_reused(setup):
    s = setup()
    bad = s.add("bad", range(9), max_tokens=5)
    s.add("good", range(100, 109), max_tokens=5)
    events = s.update(
        s.schedule(), sampled_token_ids={"good": [1]}, errors={"bad": "the logits are NaN"}
    )
    assert [(e.req_id, e.finish_reason, e.error) for e in events] == [
        ("bad", "error", "the logits are NaN"),
        ("good", None, None),
    ]
    assert bad.status is RequestStatus.FINISHED_ERROR
    s.add("retry", range(9))
    s.add("like good", range(100, 109))
    assert {e.req_id: e.num_cached_tokens for e in s.finish_all()} == {
        "retry": 0,
        "like good": 8,
        "good": 0,
    }
