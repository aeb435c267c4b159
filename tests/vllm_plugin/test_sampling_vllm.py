"""What requests ask of sampling is honoured under vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

import kvloom
from float32_folder import MAX_SCORED, NUM_NEW_TOKENS, read_cases

pytestmark = pytest.mark.xdist_group("one engine")

CASES = [case for case in read_cases("smollm2") if len(case.prompt) <= MAX_SCORED]
LONGEST = max(read_cases("smollm2"), key=lambda case: len(case.prompt)).prompt
NEAR = 1e-3
NUM_TOKENS = 48


def generate(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def tokens(llm: Any, prompt: list[int], **params: Any) -> list[int]:
    limits = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    [output] = generate(llm, [prompt], SamplingParams(**limits, **params))
    return list(output.outputs[0].token_ids)


def test_logprobs_are_transformers(llm: Any) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    for case, output in zip(CASES, generate(llm, [c.prompt for c in CASES], params), strict=True):
        choice = output.outputs[0]
        assert list(choice.token_ids) == case.tokens
        for token, expected, scores in zip(
            case.tokens, case.logprobs, choice.logprobs, strict=True
        ):
            assert scores[token].logprob == pytest.approx(expected, abs=NEAR)
            assert scores[token].rank == 1
            assert len(scores) == 3  # the token is the first of the three
        first, *rest = output.prompt_logprobs
        assert first is None
        assert len(rest) == len(case.prompt) - 1
        for token, expected, scores in zip(
            case.prompt[1:], case.prompt_logprobs, rest, strict=True
        ):
            assert scores[token].logprob == pytest.approx(expected, abs=NEAR)
            best = sorted(scores.values(), key=lambda score: -score.logprob)
            assert [score.rank for score in best][:2] == [1, 2]


def test_a_long_prompt_is_scored_in_parts(llm: Any) -> None:
    """The beginning of a prompt scores as it does alone: 1,100 rows are more than a step has."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [LONGEST, LONGEST[:40], LONGEST[:700]]
    scored = [output.prompt_logprobs for output in generate(llm, prompts, params)]
    values = [
        [scores[token].logprob for token, scores in zip(p[1:], s[1:], strict=True)]
        for p, s in zip(prompts, scored, strict=True)
    ]
    assert values[0][:39] == pytest.approx(values[1], abs=NEAR)
    assert values[0][:699] == pytest.approx(values[2], abs=NEAR)


GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 1.5, "presence_penalty": 2.0},
    {"logit_bias": {1000: 100.0}},
    {"bad_words": [" the", " and", "."]},
]


def test_what_changes_logits_does_so_as_in_our_own_engine(llm: Any, smollm2_float32: Path) -> None:
    prompt = CASES[-1].prompt
    own = kvloom.LLM(
        model=str(smollm2_float32),
        dtype="float32",
        num_threads=1,
        max_model_len=1200,
        kv_cache_bytes=1 << 26,
    )
    plain = tokens(llm, prompt, temperature=0)
    for changes in GREEDY:
        limits = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        params = kvloom.SamplingParams(temperature=0, **limits, **changes)
        [output] = own.generate([prompt], params)
        found = tokens(llm, prompt, temperature=0, **changes)
        assert found == output.outputs[0].token_ids, changes
        assert found != plain, changes
    own.shutdown()


def test_min_tokens_keeps_stop_tokens_away(llm: Any) -> None:
    prompt = CASES[-1].prompt
    plain = tokens(llm, prompt, temperature=0)
    params = {"temperature": 0, "max_tokens": 12, "stop_token_ids": plain[2:3]}
    [early] = generate(llm, [prompt], SamplingParams(**params))
    assert list(early.outputs[0].token_ids) == plain[: plain.index(plain[2]) + 1]
    [late] = generate(llm, [prompt], SamplingParams(min_tokens=8, **params))
    assert plain[2] not in list(late.outputs[0].token_ids)[:8]


def test_only_allowed_tokens_come(llm: Any) -> None:
    allowed = [5, 31, 32, 700, 49151]
    params = {"temperature": 1.0, "seed": 3, "allowed_token_ids": allowed}
    assert set(tokens(llm, CASES[3].prompt, **params)) <= set(allowed)


def test_a_seed_repeats_whatever_runs_beside_it(llm: Any) -> None:
    seeded = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=11)
    free = SamplingParams(temperature=1.3)
    [alone] = generate(llm, [CASES[4].prompt], seeded)
    mixed = generate(llm, [CASES[4].prompt] * 4, [free, seeded, free, free])
    assert mixed[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(output.outputs[0].token_ids) for output in mixed}) > 1
    [choices] = generate(llm, [CASES[4].prompt], SamplingParams(temperature=1.3, n=4))
    assert len({tuple(choice.token_ids) for choice in choices.outputs}) > 1


def test_json_schema_gives_valid_json(llm: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "boolean"}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=0.8,
        seed=5,
        max_tokens=64,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    free = SamplingParams(temperature=0.0, max_tokens=5)
    outputs = llm.generate(["Describe a city: "] * 4, [params, free, params, params])
    for i in (0, 2, 3):
        answer = json.loads(outputs[i].outputs[0].text)
        assert set(answer) == {"city", "size"}
        assert answer["city"] in ("Paris", "Rome")
        assert isinstance(answer["size"], bool)


def test_tokens_that_leave_nothing_end_one_request_alone(llm: Any) -> None:
    """Only a stop token is allowed, and none may come before the third token."""
    nothing = SamplingParams(
        temperature=0, max_tokens=4, min_tokens=2, stop_token_ids=[7], allowed_token_ids=[7]
    )
    plain = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    bad, good = generate(llm, [CASES[2].prompt, CASES[3].prompt], [nothing, plain])
    assert list(good.outputs[0].token_ids) == CASES[3].tokens
    # No token can be drawn twice: what the worker goes on with, then, as two tokens are enough, the
    # first of those that end a request: EOS.
    assert list(bad.outputs[0].token_ids) == [0, 2]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"repetition_penalty": 200.0}, "repetition_penalty"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused_by_name(
    llm: Any, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(VLLMValidationError, match=named):
        generate(llm, [[1, 2]], SamplingParams(**params))
    assert generate(llm, [[1, 2]], SamplingParams(max_tokens=1))
