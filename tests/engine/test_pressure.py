"""Texts, and all that is told beside them, do not depend on how little memory there is.

Each row of FACTORS is run with a pool that never runs out, and with pools that force one, some and
constant preemption; the answers must be those of every request alone, bit for bit (float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pytest

from kvloom import LLM, SamplingParams, StructuredOutputs
from kvloom.engine.outputs import Generation, RequestOutput, TextDelta
from tiny_folder import make_tiny_folder
from tiny_hybrids import HYBRID_CASES

EOS_ID = 257
MAX_MODEL_LEN = 160
POOLS = {
    # Blocks beyond those of one request, and how many preemptions they mean for the plain row.
    "unlimited": (1000, range(1)),
    "one": (78, range(1, 2)),
    "some": (68, range(2, 11)),
    "constant": (2, range(11, 1000)),
}


@dataclass(frozen=True)
class Factor:
    """Something that must not change what preemption does to texts: nothing.

    Attributes:
        options: of the engine.
        params: of all requests, the undisturbed ones included.
    """

    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


_GRAMMAR = {
    "structured_outputs": StructuredOutputs(regex="([a-d]{3} ){8,}"),
    "ignore_eos": False,
    "min_tokens": 0,
}
FACTORS = {
    "plain": Factor(),
    "no prefix cache": Factor({"has_prefix_cache": False}),
    "chunks": Factor({"max_num_batched_tokens": 24}),
    "two threads": Factor({"num_threads": 2}),
    "in turn": Factor({"has_async_stepping": False}),
    "in turn, chunks": Factor({"has_async_stepping": False, "max_num_batched_tokens": 24}),
    "drafts": Factor({"num_draft_tokens": 4}),
    "grammar": Factor(params=_GRAMMAR),
    "grammar, drafts": Factor({"num_draft_tokens": 4}, params=_GRAMMAR),
    "n = 4": Factor(params={"n": 4, "max_tokens": 42}),
}

_STEM = [7 * i % 251 for i in range(20)]
_PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4}
_CUT = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
# Everything that a preempted request could lose count of.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (_STEM[:17], {"temperature": 0.0}),
    ([3, 1, 4, 1, 5, 9, 2, 6], {"seed": 1}),
    (_STEM + [11] * 9, {"seed": 2, **_CUT}),
    (_STEM[:18] + [12] * 3, {"seed": 3, "logprobs": 2, **_PENALTIES}),
    ([70] * 5, {"seed": 4, "ignore_eos": False, "min_tokens": 30, "logit_bias": {EOS_ID: 6.0}}),
    (_STEM + [99] * 30, {"seed": 5, "prompt_logprobs": 2, "logprobs": 1, "max_tokens": 50}),
    ([8] * 12, {"seed": 16, "bad_words": ["a", "bc"], "stop_token_ids": [65, 66]}),
    ([200, 201], {"seed": 7, "stop": [*ascii_uppercase, "no such"], "min_tokens": 40}),
    (_STEM[:19], {"seed": 8, "logprobs": 1, **_CUT, **_PENALTIES}),
    ([5], {"temperature": 0.0, **_PENALTIES}),
]


def params_of(given: dict[str, Any], more: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 90, "ignore_eos": True, "logprobs": 0, **given, **more})


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with a window of 20 tokens, and one without."""
    changes = HYBRID_CASES["gemma3_pattern"] | {
        "vocab_size": 258,
        "max_position_embeddings": MAX_MODEL_LEN,
        "sliding_window": 20,
        "final_logit_softcapping": 8.0,  # many tokens are likely
    }
    return make_tiny_folder(tmp_path_factory.mktemp("hybrid"), **changes)


@pytest.fixture(scope="module")
def start(hybrid: Path) -> Callable[..., LLM]:
    def make(num_more_blocks: int, options: dict[str, Any]) -> LLM:
        given = {"max_model_len": MAX_MODEL_LEN, "dtype": "float32", "num_threads": 1, **options}
        large = LLM(model=str(hybrid), num_blocks=1000, **given)
        plan = large._core.plan
        large.shutdown()
        num_blocks = 1 + plan.num_reserved_blocks + plan.num_blocks_per_request + num_more_blocks
        return LLM(model=str(hybrid), num_blocks=num_blocks, **given)

    return make


def told(output: RequestOutput) -> RequestOutput:
    """All that must be equal: what the prefix cache saved need not be."""
    return replace(output, num_cached_tokens=0)


@pytest.fixture(scope="module")
def undisturbed(start: Callable[..., LLM]) -> Iterator[Callable[..., list[RequestOutput]]]:
    """Answers of requests that run alone, one after another, in a large pool."""
    llm = start(1000, {"has_prefix_cache": False})
    known: dict[str, list[RequestOutput]] = {}

    def answers(more: dict[str, Any]) -> list[RequestOutput]:
        if repr(more) not in known:
            known[repr(more)] = [
                told(llm.generate([prompt], params_of(given, more))[0])
                for prompt, given in REQUESTS
            ]
        return known[repr(more)]

    yield answers
    assert llm.stats.scheduler.num_preemptions == 0
    llm.shutdown()


def test_the_requests_end_in_every_way(undisturbed) -> None:
    choices = [output.outputs[0] for output in undisturbed({})]
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    eos, stop_id, stop_string = choices[4], choices[6], choices[7]
    assert (eos.finish_reason, eos.stop_reason) == ("stop", None)
    assert 30 < len(eos.token_ids) < 60  # not before min_tokens
    assert stop_id.stop_reason in (65, 66)
    assert stop_string.stop_reason in set(ascii_uppercase)
    assert all(len(choice.logprobs) == len(choice.token_ids) > 10 for choice in choices)
    assert len(undisturbed({})[5].prompt_logprobs) == 49


def finish(llm: LLM) -> int:
    """Prove that nothing is held any more; how many preemptions there were."""
    num_preemptions = llm.stats.scheduler.num_preemptions
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()
    return num_preemptions


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("factor", FACTORS)
def test_answers_are_those_of_each_request_alone(
    start, undisturbed, factor: str, pool: str
) -> None:
    num_blocks, num_preemptions = POOLS[pool]
    more = FACTORS[factor].params
    llm = start(num_blocks, FACTORS[factor].options)
    outputs = llm.generate(
        [prompt for prompt, _ in REQUESTS], [params_of(given, more) for _, given in REQUESTS]
    )
    assert list(map(told, outputs)) == undisturbed(more)
    counted = finish(llm)
    if factor == "plain":
        assert counted in num_preemptions
    elif pool != "one":
        assert (counted > 0) == (pool != "unlimited")


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("options", [{}, {"has_async_stepping": False}], ids=str)
def test_pieces_of_a_stream_are_neither_repeated_nor_missing(
    start, undisturbed, options: dict[str, Any], pool: str
) -> None:
    llm = start(POOLS[pool][0], options)
    generations = []
    for prompt, given in REQUESTS:
        params = params_of(given, {})
        prepared = llm._inputs.prepare(prompt, params)
        requests = llm._make_requests(prepared, params, priority=0)
        generations.append(Generation(llm.tokenizer, prepared, requests))
        llm._submit(generations[-1], requests)
    deltas: list[list[TextDelta]] = [[] for _ in generations]
    while not all(generation.output.is_finished for generation in generations):
        llm._step()
        for got, generation in zip(deltas, generations, strict=True):
            got += generation.take_deltas()
    for got, alone in zip(deltas, undisturbed({}), strict=True):
        [choice] = alone.outputs
        assert "".join(delta.text for delta in got) == choice.text
        assert [token for delta in got for token in delta.token_ids] == choice.token_ids
        assert [entry for delta in got for entry in delta.logprobs] == choice.logprobs
        reasons = [delta.finish_reason for delta in got]
        assert reasons == [None] * (len(got) - 1) + [choice.finish_reason]
        assert all(len(delta.token_ids) <= 1 for delta in got)  # nothing comes in lumps
    assert (finish(llm) > 0) == (pool != "unlimited")


SMOLLM2_PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived",
    "A, B, C, D, A, B, C, D, A, B,",
]


@pytest.mark.full
@pytest.mark.parametrize("factor", FACTORS)
def test_smollm2_under_pressure(smollm2: Path, factor: str) -> None:
    params = [
        SamplingParams(**{"max_tokens": 90, "ignore_eos": True, "logprobs": 1, **more})
        for more in ({"temperature": 0.0}, {"seed": 1}, {"seed": 2, **_CUT}, {"seed": 3})
    ]
    params = [replace(one, **FACTORS[factor].params) for one in params]
    given = {"model": str(smollm2), "dtype": "float32", "max_model_len": 128}
    alone = LLM(num_blocks=1000, has_prefix_cache=False, **given)
    prompts = zip(SMOLLM2_PROMPTS, params, strict=True)
    expected = [told(alone.generate(prompt, one)[0]) for prompt, one in prompts]
    alone.shutdown()
    llm = LLM(num_blocks=14, **given, **FACTORS[factor].options)
    assert list(map(told, llm.generate(SMOLLM2_PROMPTS, params))) == expected
    assert finish(llm) > 1
