"""What vLLM gets of drafts, and what it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from drafting import Listed
from float32_folder import LENGTHS, NUM_NEW_TOKENS, read_cases
from kvloom.request import ResolvedSamplingParams
from kvloom.runner.step_handle import StepHandle
from kvloom.step import ModelRunnerOutput, TokenLogprobs
from kvloom.vllm_plugin.drafts import Drafter
from kvloom.vllm_plugin.outputs import StartedStep, to_vllm, token_mask
from kvloom.vllm_plugin.steps import KnownRequest

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
PARAMS = ResolvedSamplingParams(seed=0, max_tokens=9)


def known(prompt: list[int], allowed: Any = None) -> KnownRequest:
    return KnownRequest(len(prompt), list(prompt), PARAMS, None, allowed)


def test_drafts_follow_all_known_tokens_and_are_taken_once() -> None:
    class Echo(Listed):
        def propose(self, req_id: str, token_ids: Any, max_num_tokens: int) -> list[int]:
            return list(token_ids)[:max_num_tokens]

    drafter = Drafter(Echo(), 5)
    requests = {"a": known([1, 2]), "b": known([3])}
    drafter.propose({"a": [7, 8], "b": [9]}, requests)
    drafts = drafter.take()
    assert dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True)) == {
        "a": [1, 2, 7, 8],
        "b": [3, 9],
    }
    assert drafter.take().req_ids == []
    drafter.propose({"a": [5]}, requests)
    assert drafter.take().draft_token_ids == [[1, 2, 7, 8, 5]]


def test_masks_have_a_row_for_each_draft_that_was_asked_for() -> None:
    """Of b's two drafts none is computed: its rows keep their places all the same."""
    bits = np.arange(7, dtype=np.int32).reshape(7, 1) + 8
    grammar = SimpleNamespace(structured_output_request_ids=["b", "a"], grammar_bitmask=bits)
    requests = {"a": known([1], np.array([9], np.uint32)), "b": known([1])}
    requests["c"] = known([1], np.array([4], np.uint32))
    step = StartedStep(["a", "b", "c"], {"a": 3, "b": 2, "c": 1}, StepHandle())
    mask = token_mask(grammar, step, requests)
    assert mask is not None
    assert mask.rows == {"b": 0, "a": 3, "c": 7}
    assert mask.bits[:, 0].tolist() == [8, 9, 10, 11 & 9, 12 & 9, 13 & 9, 14 & 9, 4, 4]


def test_log_probabilities_of_several_tokens_lie_side_by_side() -> None:
    scores = [TokenLogprobs(t, -0.1 * t, t, ((t, -0.1 * t),)) for t in range(1, 4)]
    result = ModelRunnerOutput(
        {"a": [1, 2], "none": [5, 6], "c": [3]}, {"a": scores[:2], "c": scores[2:]}
    )
    output = to_vllm(
        ["a", "middle of a prompt", "none", "c"],
        result,
        {n: known([1]) for n in result.sampled_token_ids},
    )
    assert output.sampled_token_ids == [[1, 2], [], [5, 6], [3]]
    for index, expected in ((0, [1, 2]), (3, [3])):
        part = output.logprobs.slice_request(index, len(expected))
        assert part.logprob_token_ids[:, 0].tolist() == expected
        assert part.sampled_token_ranks.tolist() == expected


def test_texts_are_transformers_and_grammars_are_obeyed(
    make_llm: Callable[..., Any], smollm2_float32: Path
) -> None:
    cases = read_cases("smollm2")
    llm = make_llm(
        smollm2_float32,
        max_model_len=max(LENGTHS) + NUM_NEW_TOKENS,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        dtype="float32",
        speculative_config=NGRAMS,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        disable_log_stats=False,
    )
    greedy = {"temperature": 0.0, "max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    outputs = llm.generate(
        [{"prompt_token_ids": case.prompt} for case in cases], SamplingParams(**greedy, logprobs=1)
    )
    for case, output in zip(cases, outputs, strict=True):
        [choice] = output.outputs
        assert list(choice.token_ids) == case.tokens, f"{len(case.prompt)} tokens"
        assert all(t in scores for t, scores in zip(case.tokens, choice.logprobs, strict=True))

    names = [f"name_{i}" for i in range(3)]
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["yes, of course", "no, of course"]} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=0.0,
        max_tokens=80,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    [output] = llm.generate(['{"name_0":"no, of course","name_1":"no, of course"} '], params)
    assert sorted(json.loads(output.outputs[0].text)) == names

    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    num_drafts = counts["vllm:spec_decode_num_draft_tokens"]
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < num_drafts
