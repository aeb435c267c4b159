"""Who gives way, who may pass whom, and what can never come back."""

from __future__ import annotations

import pytest

from kvloom.kv.events import RequestPreempted
from kvloom.request import RequestStatus


def test_the_newest_gives_way_and_comes_back_with_its_tokens(setup, fresh):
    s = setup(num_blocks=7, block_size=2)  # six usable
    old = s.add("old", fresh(4), max_tokens=6)
    new = s.add("new", fresh(4), max_tokens=6)
    for _ in range(3):
        s.step()  # each holds three blocks and six stored tokens
    assert s.manager.num_used_blocks == 6
    output, _ = s.step()
    assert list(output.num_scheduled_tokens) == ["old"]
    assert new.status is RequestStatus.PREEMPTED
    assert (new.num_computed_tokens, new.num_output_tokens, new.num_preemptions) == (0, 3, 1)
    assert output.finished_req_ids == set()  # workers keep what they know of it
    diffs = [output.scheduled_cached_reqs for output, _ in s.run_out()]
    resumed = next(diff for diff in diffs if any(diff.resumed_from_preemption))
    assert old.status is RequestStatus.FINISHED_LENGTH
    # The wire rule: the whole table, and all tokens after the prompt.
    assert resumed.req_ids == ["new"]
    assert resumed.new_token_ids == [new.output_token_ids[:3]]
    [(table,)] = resumed.new_block_ids
    assert len(table) == 4  # all seven known tokens fit
    # Its own full blocks, where they were not taken, are found again.
    assert resumed.num_computed_tokens[0] % 2 == 0
    stats = s.scheduler.stats
    assert (stats.num_preemptions, stats.num_lost_tokens) == (1, 6)


def test_preemption_is_an_event(setup, fresh):
    s = setup(num_blocks=5, block_size=2)
    s.add("old", fresh(3), max_tokens=4)
    s.add("new", fresh(3), max_tokens=4)
    s.finish_all()
    preempted = [e for e in s.events.drain() if isinstance(e, RequestPreempted)]
    assert preempted == [RequestPreempted("new", needed_by="old", num_lost_tokens=4)]


def test_the_newest_gives_way_to_itself(setup, fresh):
    s = setup(num_blocks=6, block_size=2)  # five usable
    s.add("old", fresh(6), max_tokens=2)  # three blocks, then a fourth
    s.add("new", fresh(2), max_tokens=9)
    s.step()
    s.step()  # old takes its fourth block, new its second: none is there for it
    preempted = [e for e in s.events.drain() if isinstance(e, RequestPreempted)]
    assert preempted == [RequestPreempted("new", needed_by="new", num_lost_tokens=2)]


def test_nobody_enters_in_a_step_that_preempts(setup, fresh):
    s = setup(num_blocks=7, block_size=2)
    s.add("old", fresh(4), max_tokens=6)
    s.add("new", fresh(4), max_tokens=6)
    for _ in range(3):
        s.step()
    s.add("tiny", fresh(1))
    assert list(s.step()[0].num_scheduled_tokens) == ["old"]
    # "new" is first in line again; "tiny" passes it only because it does not fit yet.
    assert list(s.step()[0].num_scheduled_tokens) == ["old", "tiny"]


def test_resuming_prefers_arrival_over_bypassing(setup, fresh):
    s = setup(num_blocks=5, block_size=2)
    s.add("holder", fresh(4), max_tokens=1)
    s.add("big", fresh(8))
    s.add("small", fresh(2), max_tokens=1)
    assert list(s.step()[0].num_scheduled_tokens) == ["holder", "small"]
    assert list(s.step()[0].num_scheduled_tokens) == ["big"]


@pytest.mark.parametrize("max_num_bypasses", [0, 1, 3])
def test_the_head_of_the_line_is_passed_a_bounded_number_of_times(setup, fresh, max_num_bypasses):
    s = setup(num_blocks=9, block_size=2, max_num_bypasses=max_num_bypasses)
    s.add("holder", fresh(8), max_tokens=9)  # half of the pool, for nine steps
    s.step()
    big = s.add("big", fresh(16))
    for i in range(6):
        s.add(f"small{i}", fresh(1))
    order = [event.req_id for event in s.finish_all()]
    before_big = order[: order.index("big")]
    assert len([r for r in before_big if r.startswith("small")]) == max_num_bypasses
    assert big.num_bypasses == max_num_bypasses
    assert len(order) == 8


def test_the_scan_past_the_head_is_bounded(setup, fresh):
    s = setup(num_blocks=9, block_size=2, max_num_bypasses=2)
    s.add("holder", fresh(8), max_tokens=9)
    s.step()
    for i in range(3):
        s.add(f"big{i}", fresh(16))
    s.add("small", fresh(1))
    assert list(s.step()[0].num_scheduled_tokens) == ["holder"]  # three were looked at


def test_a_request_that_outgrows_the_whole_pool_ends_with_an_error(setup, fresh):
    s = setup(num_blocks=4, block_size=2, max_model_len=512)  # six slots
    s.add("r", fresh(4), max_tokens=20)
    s.add("waits", fresh(2), max_tokens=1)
    ended = {e.req_id: e for e in s.finish_all()}
    assert ended["r"].finish_reason == "error"
    assert "7 tokens" in ended["r"].error
    assert "lower max_tokens" in ended["r"].error
    assert ended["waits"].finish_reason == "length"
    assert s.manager.num_used_blocks == 0


def test_the_last_failure_is_still_told(setup, fresh):
    s = setup(num_blocks=3, block_size=2)
    s.add("r", fresh(4), max_tokens=3)
    s.step()
    output = s.schedule()
    assert output.num_scheduled_tokens == {}
    assert s.scheduler.has_unfinished_requests()
    [event] = s.update(output)
    assert event.finish_reason == "error"
    assert not s.scheduler.has_unfinished_requests()


def test_a_preempted_request_keeps_its_first_cached_count(setup, fresh):
    s = setup(num_blocks=7, block_size=2)
    s.add("old", fresh(4), max_tokens=6)
    s.add("new", fresh(4), max_tokens=6)
    ended = {e.req_id: e.num_cached_tokens for e in s.finish_all()}
    assert ended == {"old": 0, "new": 0}
    assert s.scheduler.stats.num_preemptions > 0
    assert s.manager.stats.num_queried_tokens == 8
