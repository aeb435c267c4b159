"""Requests that go on from another's tokens: when they enter, with what, and who waits for whom.

`sibling` has its leader's prompt, `branch` its leader's tokens with another last one.
"""

from __future__ import annotations

from typing import Any

import pytest

from drafting import next_token
from kvloom.request import Request, RequestStatus
from kvloom.step import SchedulerOutput
from visibility import Kind


def sibling(setup: Any, leader: Request, req_id: str, max_tokens: int = 4) -> Request:
    prompt = leader.token_ids[: leader.num_prompt_tokens]
    return setup.add(req_id, prompt, max_tokens, leader=leader)


def branch(setup: Any, leader: Request, req_id: str, token_id: int) -> Request:
    return setup.add(req_id, [*leader.token_ids[:-1], token_id], 4, leader=leader)


def entered(output: SchedulerOutput) -> dict[str, int]:
    """Computed tokens of the requests that the step brings, by id."""
    return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}


def table(setup: Any, req_id: str) -> list[int]:
    [blocks] = setup.manager.get_block_ids(req_id)
    return blocks


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_siblings_share_the_prompt_and_copy_its_tail(setup, has_prefix_cache) -> None:
    s = setup(has_prefix_cache=has_prefix_cache)
    leader = s.add("a", range(10), max_tokens=4)
    siblings = [sibling(s, leader, req_id) for req_id in "bc"]
    assert entered(s.step()[0]) == {"a": 0}
    output, events = s.step()
    # All but the last token of the prompt: 0 to 8. Blocks 0 to 3 and 4 to 7 are shared.
    assert entered(output) == {"b": 9, "c": 9}
    assert output.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    shared, own = table(s, "a")[:2], [table(s, req_id)[2] for req_id in "abc"]
    assert len(set(own)) == 3
    assert [table(s, one.req_id)[:2] for one in siblings] == [shared, shared]
    assert output.block_copies == [(own[0], own[1]), (own[0], own[2])]
    assert s.manager.num_used_blocks == 5
    # They sample what the leader sampled a step earlier.
    assert {e.req_id: e.new_token_ids for e in events if e.req_id != "a"} == {
        "b": [next_token(range(10))],
        "c": [next_token(range(10))],
    }
    assert s.step()[0].block_copies == []
    s.finish_all()
    assert [r.output_token_ids for r in siblings] == [leader.output_token_ids] * 2
    assert s.manager.num_used_blocks == 0


def test_a_prompt_of_whole_blocks_has_its_last_one_copied(setup) -> None:
    """The last token is computed again, and nobody writes into a shared block."""
    s = setup()
    leader = s.add("a", range(8), max_tokens=4)
    sibling(s, leader, "b")
    s.step()
    output, _ = s.step()
    assert entered(output) == {"b": 7}
    assert output.block_copies == [(table(s, "a")[1], table(s, "b")[1])]


def test_tokens_before_the_last_in_whole_blocks_need_no_copy(setup) -> None:
    s = setup()
    leader = s.add("a", range(9), max_tokens=4)
    sibling(s, leader, "b")
    s.step()
    output, _ = s.step()
    assert entered(output) == {"b": 8}
    assert output.block_copies == []


def test_hits_of_siblings_are_counted_and_the_leaders_are_reported(setup) -> None:
    s = setup()
    leader = s.add("a", range(10))
    sibling(s, leader, "b")
    s.finish_all()
    assert (s.manager.stats.num_queried_tokens, s.manager.stats.num_hit_tokens) == (20, 9)
    off = setup(has_prefix_cache=False)
    sibling(off, off.add("a", range(10)), "b")
    off.finish_all()
    assert (off.manager.stats.num_queried_tokens, off.manager.stats.num_hit_tokens) == (0, 0)


def test_a_leader_that_ends_with_its_prompt_is_forked_all_the_same(setup) -> None:
    s = setup(has_prefix_cache=False)
    leader = s.add("a", range(10), max_tokens=1)
    siblings = [sibling(s, leader, req_id, 1) for req_id in "bc"]
    s.step()
    assert leader.status is RequestStatus.FINISHED_LENGTH
    assert s.manager.num_used_blocks == 3
    output, _ = s.step()
    assert entered(output) == {"b": 9, "c": 9}
    assert len(output.block_copies) == 2
    assert [r.output_token_ids for r in siblings] == [leader.output_token_ids] * 2
    assert s.manager.num_used_blocks == 0


def test_siblings_wait_while_the_prompt_is_computed_in_chunks(setup) -> None:
    s = setup(max_num_batched_tokens=4)
    leader = s.add("a", range(11), max_tokens=2)
    sibling(s, leader, "b")
    other = s.add("other", [99], max_tokens=1)
    assert [s.step()[0].num_scheduled_tokens for _ in range(2)] == [{"a": 4}, {"a": 4}]
    assert s.scheduler.num_waiting == 2
    # Behind those that wait for something, others enter; nobody is passed.
    assert s.step()[0].num_scheduled_tokens == {"a": 3, "other": 1}
    assert other.status is RequestStatus.FINISHED_LENGTH
    output, _ = s.step()
    assert entered(output) == {"b": 10}


def test_siblings_of_a_leader_that_was_aborted_enter_alone(setup) -> None:
    s = setup(max_num_batched_tokens=4)
    leader = s.add("a", range(11), max_tokens=2)
    siblings = [sibling(s, leader, req_id) for req_id in "bc"]
    s.step()
    s.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORT)
    s.manager.check()
    assert s.manager.num_used_blocks == 0
    output, _ = s.step()
    assert output.num_scheduled_tokens == {"b": 4}
    s.finish_all()
    assert len({tuple(r.output_token_ids) for r in siblings}) == 1
    assert s.manager.num_used_blocks == 0


def test_siblings_of_a_leader_that_was_preempted_do_not_wait_for_it(setup) -> None:
    s = setup(num_blocks=6, max_num_batched_tokens=4, max_num_bypasses=0)
    old = s.add("old", range(100, 103), max_tokens=15)
    leader = s.add("a", range(13), max_tokens=1)
    siblings = [sibling(s, leader, "b", 1)]
    while leader.status is not RequestStatus.PREEMPTED:
        s.step()
        assert siblings[0].status is RequestStatus.WAITING
    s.finish_all()
    assert old.num_output_tokens == 15
    assert siblings[0].output_token_ids == leader.output_token_ids


def test_whatever_ends_leaves_no_block(setup) -> None:
    """Abort leader and follower in either order, before the leader has the prompt, and after."""
    for num_steps in (0, 1, 2):
        for order in ("ab", "ba"):
            s = setup(max_num_batched_tokens=4)
            leader = s.add("a", range(7), max_tokens=3)
            sibling(s, leader, "b")
            for _ in range(num_steps):
                s.step()
            for req_id in order:
                s.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORT)
                s.manager.check()
            assert s.manager.num_used_blocks == 0
            assert not s.scheduler.has_unfinished_requests()
            assert s.scheduler.num_waiting == 0
            assert s.manager.reset_prefix_cache()


def test_a_failed_leader_passes_nothing_on(setup) -> None:
    s = setup()
    leader = s.add("a", range(9), max_tokens=4)
    one = sibling(s, leader, "b")
    output = s.schedule()
    s.update(output, sampled_token_ids={}, errors={"a": "not a number"})
    assert leader.status is RequestStatus.FINISHED_ERROR
    assert entered(s.step()[0]) == {"b": 0}
    s.finish_all()
    assert one.num_output_tokens == 4


def test_one_seat_lets_siblings_in_one_after_another(setup) -> None:
    s = setup(max_num_seqs=1)
    leader = s.add("a", range(10), max_tokens=2)
    siblings = [sibling(s, leader, req_id, 2) for req_id in "bc"]
    steps = [entered(output) for output, _ in s.run_out()]
    # The second one finds the leader gone: whole blocks of the prefix cache are left.
    assert [step for step in steps if step] == [{"a": 0}, {"b": 9}, {"c": 8}]
    assert [r.output_token_ids for r in siblings] == [leader.output_token_ids] * 2


def test_fork_points_give_way_before_any_request_does(setup) -> None:
    """The old request needs a block of those that are kept for a sibling."""
    s = setup(num_blocks=5, has_prefix_cache=False)
    old = s.add("old", range(100, 104), max_tokens=6)
    leader = s.add("a", range(10), max_tokens=1)
    sibling(s, leader, "b", 1)
    s.step()
    assert s.manager.num_used_blocks == 4  # one of the old request, three for the sibling
    assert s.step()[0].num_scheduled_tokens == {"old": 1}
    s.finish_all()
    assert s.scheduler.stats.num_preemptions == 0
    assert old.num_output_tokens == 6


@pytest.mark.parametrize("num_tokens", [6, 7, 8, 9, 12])
@pytest.mark.parametrize("kind", [Kind("window", 4, 4), Kind("window", 2, 5), Kind("chunk", 4, 4)])
def test_a_window_that_moves_on_in_the_same_step_is_forked(setup, kind, num_tokens) -> None:
    s = setup(kinds=[kind, Kind("full", 4)], has_prefix_cache=False, max_model_len=64)
    leader = s.add("a", range(num_tokens), max_tokens=9)
    one = sibling(s, leader, "b", 9)
    s.step()
    output, _ = s.step()
    assert entered(output) == {"b": num_tokens - 1}
    # Columns that the query at the last token of the prompt sees.
    last = num_tokens - 1
    seen = {key // kind.block_size for key in range(num_tokens) if kind.sees(last, key)}
    window, whole = s.manager.get_block_ids("b")
    assert {column for column, block_id in enumerate(window) if block_id} == seen
    assert len(whole) == -(-num_tokens // 4)
    s.finish_all()
    assert one.output_token_ids == leader.output_token_ids


def test_branches_go_on_from_their_leader_when_that_ends(setup) -> None:
    s = setup(has_prefix_cache=False)
    leader = s.add("a", range(5), max_tokens=9)
    for _ in range(3):
        s.step()
    branches = [branch(s, leader, f"b{token}", token) for token in (70, 71)]
    prompts = [list(one.token_ids) for one in branches]
    s.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORT)
    s.manager.check()
    output, _ = s.step()
    assert entered(output) == {"b70": 7, "b71": 7}
    [first, second] = [table(s, one.req_id) for one in branches]
    assert first[0] == second[0]
    source = output.block_copies[0][0]
    assert output.block_copies == [(source, first[1]), (source, second[1])]
    assert source not in first + second
    assert [one.token_ids[-1] for one in branches] == [next_token(p) for p in prompts]
    assert s.manager.stats.num_queried_tokens == 0


def test_branches_ask_the_prefix_cache_nothing(setup) -> None:
    s = setup()
    leader = s.add("a", range(5), max_tokens=9)
    s.step()
    s.step()
    branch(s, leader, "b", 70)
    s.finish_all()
    assert (s.manager.stats.num_queried_tokens, s.manager.stats.num_hit_tokens) == (5, 0)


def test_followers_stand_where_their_leader_does(setup) -> None:
    """A request that came before them but after their leader does not get their seats."""
    s = setup(max_num_seqs=1)
    leader = s.add("a", range(5), max_tokens=9)
    s.step()
    s.step()
    s.add("later", range(50, 55))
    branch(s, leader, "b", 70)
    s.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORT)
    assert entered(s.step()[0]) == {"b": 6}
