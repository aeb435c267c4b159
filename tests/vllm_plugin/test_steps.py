"""vLLM's SchedulerOutput in kvloom's words."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvloom.step import MAX_EXTRA_LOGITS_ROWS
from kvloom.vllm_plugin.specs import GroupMap
from kvloom.vllm_plugin.steps import StepTranslator

ONE_GROUP = GroupMap((0,), is_identity=True)


def new_request(req_id: str, prompt: list[int], **given: Any) -> NewRequestData:
    fields = {
        "mm_features": [],
        "sampling_params": SamplingParams(temperature=0),
        "pooling_params": None,
        "block_ids": ([1],),
        "num_computed_tokens": 0,
        "lora_request": None,
    }
    return NewRequestData(req_id=req_id, prompt_token_ids=prompt, **(fields | given))


def step(scheduled: dict[str, int], **given: Any) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    for name, value in given.items():
        setattr(output, name, value)
    return output


def cached(req_ids: list[str], blocks: list[Any], computed: list[int], **given: Any) -> Any:
    fields = {"resumed_req_ids": set(), "new_token_ids": [], "all_token_ids": {}}
    return CachedRequestData(
        req_ids=req_ids,
        new_block_ids=blocks,
        num_computed_tokens=computed,
        num_output_tokens=[0] * len(req_ids),
        **(fields | given),
    )


def translator(groups: GroupMap = ONE_GROUP) -> StepTranslator:
    return StepTranslator(groups, vocab_size=100, seed=0)


def test_new_and_cached_requests() -> None:
    steps = translator(GroupMap((1, 0, 1), is_identity=False))
    [first] = steps.translate(
        step({"a": 3}, scheduled_new_reqs=[new_request("a", [5, 6, 7], block_ids=([1], [2]))])
    )
    assert first.scheduled_new_reqs[0].block_ids == ([2], [1], [2])
    assert first.num_scheduled_tokens == {"a": 3}
    [second] = steps.translate(
        step(
            {"a": 1},
            scheduled_cached_reqs=cached(["a"], [None], [3]),
            kv_cache_block_copies=[KVCacheBlockCopy(4, 9)],
            finished_req_ids={"b"},
        )
    )
    assert second.scheduled_cached_reqs.new_block_ids == [([], [], [])]
    assert second.scheduled_cached_reqs.resumed_from_preemption == [False]
    assert second.block_copies == [(4, 9)]
    assert second.finished_req_ids == {"b"}


def test_a_preempted_request_comes_back_in_either_of_vllms_ways() -> None:
    """As a cached one with all of its tokens, or as a new one with those to compute."""
    steps = translator()
    steps.translate(step({"a": 2}, scheduled_new_reqs=[new_request("a", [5, 6])]))
    data = cached(["a"], [([3, 4],)], [0], resumed_req_ids={"a"}, all_token_ids={"a": [5, 6, 7, 8]})
    [as_cached] = steps.translate(step({"a": 4}, scheduled_cached_reqs=data))
    again = new_request("a", [5, 6], prefill_token_ids=[5, 6, 7, 8], block_ids=([3, 4],))
    [as_new] = steps.translate(step({"a": 4}, scheduled_new_reqs=[again]))
    assert as_new == as_cached
    assert as_new.scheduled_new_reqs == []
    assert as_new.scheduled_cached_reqs.resumed_from_preemption == [True]
    assert as_new.scheduled_cached_reqs.new_token_ids == [[7, 8]]


def test_an_id_that_finished_is_new_again() -> None:
    steps = translator()
    steps.translate(step({"a": 2}, scheduled_new_reqs=[new_request("a", [5, 6])]))
    again = new_request("a", [5, 6, 7], prefill_token_ids=[5, 6, 7])
    [found] = steps.translate(step({"a": 3}, scheduled_new_reqs=[again], finished_req_ids={"a"}))
    assert [new.prompt_token_ids for new in found.scheduled_new_reqs] == [[5, 6, 7]]


def test_a_longer_prompt_under_a_running_id_starts_anew() -> None:
    steps = translator()
    steps.translate(step({"a": 2}, scheduled_new_reqs=[new_request("a", [5, 6])]))
    output = step({"a": 3}, scheduled_new_reqs=[new_request("a", [5, 6, 7])])
    [found] = steps.translate(output)
    assert found.finished_req_ids == {"a"}
    assert len(found.scheduled_new_reqs) == 1
    assert output.finished_req_ids == set()  # vLLM's own is left alone


def test_long_prompts_that_are_scored_come_in_parts() -> None:
    room = MAX_EXTRA_LOGITS_ROWS
    scored = SamplingParams(temperature=0, prompt_logprobs=1)
    lengths = {"plain": 5000, "long": 3 * room, "short": 10}
    news = [
        new_request("plain", [1] * 5000),
        new_request("long", [2] * 3 * room, sampling_params=scored, num_computed_tokens=0),
        new_request("short", [3] * 10, sampling_params=scored),
    ]
    steps = translator()
    found = steps.translate(step(lengths, scheduled_new_reqs=news))
    assert len(found[0].scheduled_new_reqs) == 3
    totals = {
        req_id: sum(s.num_scheduled_tokens.get(req_id, 0) for s in found) for req_id in lengths
    }
    assert totals == lengths
    assert set(found[-1].num_scheduled_tokens) == set(lengths)
    computed = dict.fromkeys(lengths, 0)
    for part in found:
        extra = sum(n - 1 for r, n in part.num_scheduled_tokens.items() if r != "plain")
        assert extra <= room
        diffs = part.scheduled_cached_reqs
        for req_id, num_tokens in zip(diffs.req_ids, diffs.num_computed_tokens, strict=True):
            assert num_tokens == computed[req_id]
        for req_id, num_tokens in part.num_scheduled_tokens.items():
            computed[req_id] += num_tokens
    assert not any(part.num_scheduled_tokens.get("plain") for part in found[:-1])


def test_a_cut_prompt_keeps_a_token_for_the_last_step() -> None:
    room = MAX_EXTRA_LOGITS_ROWS
    scored = SamplingParams(temperature=0, prompt_logprobs=1)
    lengths = {"first": room - 50, "second": 100}  # 51 rows are left, and the second wants 99
    news = [new_request(r, [1] * n, sampling_params=scored) for r, n in lengths.items()]
    found = translator().translate(step(lengths, scheduled_new_reqs=news))
    assert [part.num_scheduled_tokens for part in found] == [
        {"second": 99},
        lengths | {"second": 1},
    ]


def test_requests_without_a_seed_get_different_ones() -> None:
    steps = translator()
    news = [new_request(name, [1], sampling_params=SamplingParams()) for name in "ab"]
    news.append(new_request("c", [1], sampling_params=SamplingParams(seed=-5)))
    [found] = steps.translate(step(dict.fromkeys("abc", 1), scheduled_new_reqs=news))
    seeds = [new.sampling_params.seed for new in found.scheduled_new_reqs]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_allowed_tokens_are_bits() -> None:
    params = SamplingParams(allowed_token_ids=[0, 33, 99])
    steps = translator()
    steps.translate(
        step({"a": 1}, scheduled_new_reqs=[new_request("a", [1], sampling_params=params)])
    )
    expected = np.array([1, 1 << 1, 0, 1 << 3], np.uint32)
    np.testing.assert_array_equal(steps.known["a"].allowed, expected)


def test_requests_that_a_mask_may_come_for_are_named() -> None:
    """Of other steps' logits no more than the best may be kept."""
    choice = StructuredOutputsParams(choice=["a", "b"])
    steps = translator()
    params = {
        "free": SamplingParams(temperature=0),
        "bound": SamplingParams(temperature=0, structured_outputs=choice),
        "few": SamplingParams(temperature=0, allowed_token_ids=[1]),
    }
    new = [new_request(name, [5], sampling_params=given) for name, given in params.items()]
    [first] = steps.translate(step(dict.fromkeys(params, 1), scheduled_new_reqs=new))
    assert first.structured_output_request_ids == {"bound": -1, "few": -1}
    later = cached(["free"], [None], [1])
    [second] = steps.translate(step({"free": 1}, scheduled_cached_reqs=later))
    assert second.structured_output_request_ids == {}


def test_drafts_are_computed_but_for_padding() -> None:
    """vLLM pads the drafts of a request that enters beside running ones with -1."""
    steps = translator()
    steps.translate(step({"a": 3}, scheduled_new_reqs=[new_request("a", [5, 6, 7])]))
    [output] = steps.translate(
        step(
            {"a": 4, "b": 4, "c": 3},
            scheduled_new_reqs=[new_request("b", [8]), new_request("c", [9, 10, 11])],
            scheduled_cached_reqs=cached(["a"], [None], [3]),
            scheduled_spec_decode_tokens={"a": [20, 21, -1], "b": [-1, -1, -1]},
        )
    )
    assert output.scheduled_spec_decode_tokens == {"a": [20, 21]}
    assert output.num_scheduled_tokens == {"a": 3, "b": 1, "c": 3}
    assert output.total_num_scheduled_tokens == 7


def test_drafts_have_the_rows_that_scored_prompts_leave() -> None:
    scored = SamplingParams(temperature=0, prompt_logprobs=0)
    steps = translator()
    steps.translate(step({"a": 1}, scheduled_new_reqs=[new_request("a", [5])]))
    prompt = list(range(MAX_EXTRA_LOGITS_ROWS - 1))  # its last row is that of the next token
    outputs = steps.translate(
        step(
            {"a": 6, "s": len(prompt)},
            scheduled_new_reqs=[new_request("s", prompt, sampling_params=scored)],
            scheduled_cached_reqs=cached(["a"], [None], [1]),
            scheduled_spec_decode_tokens={"a": [1, 2, 3, 4, 5]},
        )
    )
    assert [one.num_scheduled_tokens for one in outputs] == [{"a": 3, "s": len(prompt)}]
    assert outputs[0].scheduled_spec_decode_tokens == {"a": [1, 2]}


def test_drafts_come_with_the_last_part_of_a_step() -> None:
    scored = SamplingParams(temperature=0, prompt_logprobs=0)
    steps = translator()
    steps.translate(step({"a": 1}, scheduled_new_reqs=[new_request("a", [5])]))
    prompt = [1] * (MAX_EXTRA_LOGITS_ROWS + 10)
    first, last = steps.translate(
        step(
            {"a": 3, "s": len(prompt)},
            scheduled_new_reqs=[new_request("s", prompt, sampling_params=scored)],
            scheduled_cached_reqs=cached(["a"], [None], [1]),
            scheduled_spec_decode_tokens={"a": [1, 2]},
        )
    )
    assert (first.scheduled_spec_decode_tokens, first.num_scheduled_tokens) == (
        {},
        {"s": MAX_EXTRA_LOGITS_ROWS},
    )
    assert last.scheduled_spec_decode_tokens == {"a": [1, 2]}
    assert last.num_scheduled_tokens == {"a": 3, "s": 10}
