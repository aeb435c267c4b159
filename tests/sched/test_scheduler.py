from __future__ import annotations

import pytest

from kvloom.errors import RequestError
from kvloom.kv.events import RequestPreempted
from kvloom.request import RequestStatus
from kvloom.step import CachedRequestData, SchedulerOutput, TokenLogprobs


def test_golden_2(setup):
    s = setup(block_size=16)
    request = s.add("r", range(8), max_tokens=4)
    output = s.schedule()
    [new] = output.scheduled_new_reqs
    assert new.req_id == "r"
    assert new.prompt_token_ids == list(range(8))
    assert new.sampling_params is request.sampling_params
    assert new.block_ids == ([1],)
    assert new.num_computed_tokens == 0
    assert (new.mm_features, new.lora_request, new.prompt_embeds_shape) == ([], None, None)
    assert output == SchedulerOutput(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens={"r": 8},
        total_num_scheduled_tokens=8,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[1],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        structured_output_request_ids={},
        grammar_bitmask=None,
        kv_connector_metadata=None,
        block_copies=[],
    )


def test_a_running_request_is_a_diff(setup):
    s = setup(block_size=4)
    s.add("r", range(3), max_tokens=8)
    s.step()
    diffs = [s.step()[0].scheduled_cached_reqs for _ in range(3)]
    assert [d.num_computed_tokens for d in diffs] == [[3], [4], [5]]
    assert [d.new_block_ids for d in diffs] == [[([],)], [([2],)], [([],)]]
    for diff in diffs:
        assert diff.req_ids == ["r"]
        assert diff.resumed_from_preemption == [False]
        assert diff.new_token_ids == [[]]  # the worker sampled them


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


def test_case_2_step_5_r1_at_a_block_edge(setup):
    s = setup(block_size=4, max_model_len=17)
    request = s.add("r", range(10), max_tokens=7)
    s.finish_all()
    assert request.num_output_tokens == 7
    assert s.manager.stats.num_peak_blocks == 4
    # The pool that is just large enough runs it; R1: 10 + 7 - 1 = 16 slots.
    s = setup(block_size=4, max_model_len=17, num_blocks=5)
    s.add("r", range(10), max_tokens=7)
    [event] = s.finish_all()
    assert event.finish_reason == "length"
    assert s.scheduler.stats.num_preemptions == 0


def test_prompts_are_cut_to_the_budget(setup):
    s = setup(max_num_batched_tokens=6)
    s.add("long", range(14), max_tokens=2)
    s.add("short", range(50, 53), max_tokens=2)
    steps = [s.step() for _ in range(4)]
    assert [output.num_scheduled_tokens for output, _ in steps] == [
        {"long": 6},
        {"long": 6},
        {"long": 2, "short": 3},
        {"long": 1, "short": 1},
    ]
    # Tokens come only when all known ones are computed.
    assert [len(events) for _, events in steps] == [0, 0, 2, 2]
    assert steps[1][0].scheduled_cached_reqs.num_computed_tokens == [6]
    # A chunk takes blocks for its own tokens.
    assert steps[0][0].scheduled_new_reqs[0].block_ids == ([1, 2],)
    assert steps[1][0].scheduled_cached_reqs.new_block_ids == [([3],)]


def test_a_budget_smaller_than_the_running_requests_serves_the_oldest(setup):
    s = setup(max_num_batched_tokens=1)
    s.add("a", [1], max_tokens=3)
    s.add("b", [2], max_tokens=2)
    order = [req_id for output, _ in s.run_out() for req_id in output.num_scheduled_tokens]
    assert order == ["a", "a", "a", "b", "b"]


def test_max_num_seqs(setup):
    s = setup(max_num_seqs=2)
    for name in "abc":
        s.add(name, [1, 2, 3], max_tokens=2)
    assert list(s.schedule().num_scheduled_tokens) == ["a", "b"]
    assert (s.scheduler.num_running, s.scheduler.num_waiting) == (2, 1)


def test_nothing_is_scheduled_twice_before_its_token_is_known(setup):
    s = setup(max_num_batched_tokens=4)
    s.add("r", range(6), max_tokens=3)
    first, second = s.schedule(), s.schedule()
    assert [o.num_scheduled_tokens for o in (first, second)] == [{"r": 4}, {"r": 2}]
    assert s.schedule().num_scheduled_tokens == {}
    assert s.update(first, sampled_token_ids={}) == []
    [event] = s.update(second)
    assert len(event.new_token_ids) == 1


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
    assert s.schedule().finished_req_ids == (set() if state == "waiting" else {"r"})
    s.scheduler.finish_requests(["old"], RequestStatus.FINISHED_ABORT)
    assert s.manager.num_used_blocks == 0
    assert not s.scheduler.has_unfinished_requests()


def test_results_of_a_request_that_ended_meanwhile_are_dropped(setup):
    s = setup()
    request = s.add("r", range(3), max_tokens=5)
    output = s.schedule()
    s.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORT)
    again = s.add("r", range(3), max_tokens=5)  # the id is free again
    assert s.update(output, sampled_token_ids={"r": [7]}) == []
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


def test_prompt_logprobs_pass_through_chunk_by_chunk(setup):
    s = setup(max_num_batched_tokens=4)
    s.add("r", range(6), max_tokens=1, prompt_logprobs=0)
    entries = [TokenLogprobs(t, -1.0, 1, ()) for t in range(5)]
    [first] = s.update(s.schedule(), prompt_logprobs={"r": entries[:4]})
    assert (first.prompt_logprobs, first.new_token_ids) == (entries[:4], [])
    assert first.finish_reason is None
    [last] = s.update(
        s.schedule(), prompt_logprobs={"r": entries[4:]}, sampled_token_ids={"r": [9]}
    )
    assert (last.prompt_logprobs, last.finish_reason) == (entries[4:], "length")


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


def test_what_can_never_run_is_refused_when_it_comes(setup):
    s = setup(num_blocks=9, block_size=2, max_model_len=18)  # 16 slots
    s.add("fits", range(16))
    for prompt, message in [
        (range(17), "17 tokens need more blocks than the KV cache has .* shorten the prompt"),
        (range(18), "its 18 tokens leave no room .* max_model_len 18; shorten it to 17 tokens"),
        ([], "empty"),
    ]:
        with pytest.raises(RequestError, match=message) as caught:
            s.add("r", prompt)
        assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match="req_id"):
        s.add("fits", range(3))
    assert s.scheduler.num_waiting == 1
    assert [e.req_id for e in s.finish_all()] == ["fits"]


def test_a_preempted_request_keeps_its_first_cached_count(setup, fresh):
    s = setup(num_blocks=7, block_size=2)
    s.add("old", fresh(4), max_tokens=6)
    s.add("new", fresh(4), max_tokens=6)
    ended = {e.req_id: e.num_cached_tokens for e in s.finish_all()}
    assert ended == {"old": 0, "new": 0}
    assert s.scheduler.stats.num_preemptions > 0
    assert s.manager.stats.num_queried_tokens == 8


def test_stats(setup):
    s = setup(max_num_seqs=1)
    s.add("a", range(3), max_tokens=2)
    s.add("b", range(3), max_tokens=2)
    s.step()
    stats = s.scheduler.stats
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_preemptions, stats.num_lost_tokens) == (0, 0)
