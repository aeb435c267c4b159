"""What a step holds, and what is never scheduled."""

from __future__ import annotations

import pytest

from kvloom.errors import RequestError
from kvloom.step import (
    MAX_EXTRA_LOGITS_ROWS,
    CachedRequestData,
    SchedulerOutput,
    TokenLogprobs,
)


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


def test_rows_of_logits_that_score_prompts_are_bounded(setup, fresh):
    """Each request has one row; those that score prompts share the extra ones."""
    most = MAX_EXTRA_LOGITS_ROWS
    s = setup()
    s.add("a", fresh(most - 1), max_tokens=3, prompt_logprobs=0)
    s.add("b", fresh(9), max_tokens=2, prompt_logprobs=1)
    s.add("c", fresh(9), max_tokens=1)
    s.add("d", fresh(2), max_tokens=1, prompt_logprobs=0)
    assert [output.num_scheduled_tokens for output, _ in s.run_out()] == [
        {"a": most - 1, "b": 3, "c": 9, "d": 1},  # most - 2, 2, none and none of the extra rows
        {"a": 1, "b": 6, "d": 1},
        {"a": 1, "b": 1},
    ]


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
    s = setup(max_num_batched_tokens=4, has_async_stepping=False)
    s.add("r", range(6), max_tokens=3)
    first, second = s.schedule(), s.schedule()
    assert [o.num_scheduled_tokens for o in (first, second)] == [{"r": 4}, {"r": 2}]
    third = s.schedule()
    assert third.num_scheduled_tokens == {}
    assert s.update(first, sampled_token_ids={}) == []
    [event] = s.update(second)
    assert len(event.new_token_ids) == 1
    assert s.update(third) == []


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


def test_stats(setup):
    s = setup(max_num_seqs=1)
    s.add("a", range(3), max_tokens=2)
    s.add("b", range(3), max_tokens=2)
    s.step()
    stats = s.scheduler.stats
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_preemptions, stats.num_lost_tokens) == (0, 0)
