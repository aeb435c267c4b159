"""Texts with drafts are those without: whatever is asked for, whatever the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from kvloom.engine.outputs import RequestOutput
from kvloom.ops.isa import built_isas
from tiny_folder import EOS, greedy, make_tiny_folder
from tiny_hybrids import HYBRID_CASES

PROMPTS = ["abcabcabcab", "the cat sat on the mat; the cat sat", "x", "0123456789" * 3]
MODELS = ["llama", "gemma3_linear"]  # gemma3: full layers, and windows of 7 tokens
DRAFTS: dict[str, Any] = {"num_draft_tokens": 4, "min_ngram_tokens": 1, "max_ngram_tokens": 3}
# Of each kind of parameter some; temperatures are low, so that texts repeat themselves.
PARAMS = [
    greedy(max_tokens=40),
    greedy(max_tokens=30, logprobs=2, prompt_logprobs=1),
    greedy(max_tokens=30, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=-0.2),
    SamplingParams(temperature=0.0, max_tokens=30, min_tokens=9, logit_bias={257: 4.0}),
    SamplingParams(temperature=0.2, max_tokens=30, n=3, seed=7, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.3, max_tokens=30, seed=8, top_k=5, min_p=0.1, logprobs=0),
]


def make_folder(folder: Path, model: str) -> Path:
    changes = {} if model == "llama" else HYBRID_CASES[model]
    longer = {"vocab_size": 258, "max_position_embeddings": 256, "head_dim": 16}
    return make_tiny_folder(folder, **{**changes, **longer})


def texts_of(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs
    ]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    """All there are, of prompts and choices."""
    rows = [row for o in outputs for row in (o.prompt_logprobs, *(c.logprobs for c in o.outputs))]
    return [v for row in rows for s in row for v in (s.logprob, *(top for _, top in s.top))]


def params_that_end(llm: LLM) -> list[SamplingParams]:
    """Stops and bad words from a text, so that they fall among drafts."""
    [choice] = llm.generate(PROMPTS[0], greedy(max_tokens=40))[0].outputs
    piece = llm.tokenizer.decode(choice.token_ids[20:22], True, True)
    return [
        greedy(max_tokens=40, stop_token_ids=[choice.token_ids[24]], min_tokens=21),
        greedy(max_tokens=40, stop=[piece], min_tokens=5, logprobs=0),
        greedy(max_tokens=40, bad_words=[piece]),
        greedy(max_tokens=40, stop=[piece, EOS], include_stop_str_in_output=True),
    ]


def run_all(llm: LLM, params: list[SamplingParams]) -> tuple[list[Any], list[float]]:
    """All prompts with all parameters, at once: texts and log-probabilities."""
    prompts = [prompt for prompt in PROMPTS for _ in params]
    outputs = llm.generate(prompts, params * len(PROMPTS))
    return texts_of(outputs), logprobs_of(outputs)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module", params=["reference", "native"])
def options(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    if request.param == "native" and not built_isas():
        pytest.skip("the native library is not built")
    return {"model": folder, "backend": request.param, "max_num_batched_tokens": 64}


Expected = tuple[list[SamplingParams], tuple[list[Any], list[float]]]


@pytest.fixture(scope="module")
def expected(options: dict[str, Any]) -> Expected:
    """Parameters, and what comes of them without drafts in a roomy pool."""
    llm = LLM(**options, num_blocks=400)
    params = PARAMS + params_that_end(llm)
    outcome = run_all(llm, params)
    llm.shutdown()
    return params, outcome


def blocks_for(options: dict[str, Any], num_requests: float) -> int:
    """A pool for so many requests of 80 tokens."""
    llm = LLM(**options, max_model_len=80)
    plan = llm._core.plan
    llm.shutdown()
    return int(1 + plan.num_reserved_blocks + num_requests * plan.num_blocks_per_request)


@pytest.mark.parametrize(
    ("num_requests", "further"),
    [
        (None, {}),
        (2.5, {}),
        (2.5, {"has_prefix_cache": False}),
        (2.5, {"has_async_stepping": True}),
    ],
)
def test_texts_are_those_without_drafts(
    options: dict[str, Any],
    expected: Expected,
    num_requests: float | None,
    further: dict[str, Any],
) -> None:
    params, (texts, logprobs) = expected
    num_blocks = 400 if num_requests is None else blocks_for(options, num_requests)
    llm = LLM(**options, **DRAFTS, **further, num_blocks=num_blocks)
    found_texts, found_logprobs = run_all(llm, params)
    assert found_texts == texts
    if options["backend"] == "reference":  # its sums depend on the number of rows
        logprobs = pytest.approx(logprobs, abs=1e-4)
    assert found_logprobs == logprobs
    stats = llm.stats.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (num_requests is not None)
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


@pytest.fixture
def drafting(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=folder, backend="reference", num_blocks=200, **DRAFTS)
    yield llm
    llm.shutdown()


def test_a_stream_has_every_token_once(drafting: LLM) -> None:
    [output] = drafting.generate(PROMPTS[1], greedy(max_tokens=40, logprobs=0))
    deltas = list(drafting.stream(PROMPTS[1], greedy(max_tokens=40, logprobs=0)))
    [choice] = output.outputs
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [t for delta in deltas for t in delta.token_ids] == choice.token_ids
    assert [s.token_id for delta in deltas for s in delta.logprobs] == choice.token_ids
    assert max(len(delta.token_ids) for delta in deltas) > 1


def test_ranks_accept_the_same_drafts(folder: Path, drafting: LLM) -> None:
    expected = drafting.generate(PROMPTS, greedy(max_tokens=40))
    ranks = LLM(model=folder, backend="reference", num_blocks=200, tensor_parallel_size=2, **DRAFTS)
    assert texts_of(ranks.generate(PROMPTS, greedy(max_tokens=40))) == texts_of(expected)
    assert ranks.stats.scheduler == drafting.stats.scheduler
    ranks.shutdown()
