"""Beam search finds what transformers finds, whatever the cache does meanwhile."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beam_models import BEAM_MODELS, Case, make_beam_folder
from kvloom import LLM, BeamSearchOutput, SamplingParams
from kvloom.engine.beam_search import BeamOptions, BeamRanking, Candidate
from kvloom.errors import RequestError
from kvloom.ops.isa import built_isas
from kvloom.step import ModelRunnerOutput

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "beams.json").read_text())
PROMPT = list(range(40, 50))

# Blocks of 4 tokens end within prompts and at their ends.
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {"block_size": 4, "num_blocks": 600},
    "no prefix cache": {"block_size": 4, "num_blocks": 600, "has_prefix_cache": False},
    "chunks": {"block_size": 4, "num_blocks": 600, "max_num_batched_tokens": 7},
    "few seats": {"block_size": 4, "num_blocks": 600, "max_num_seqs": 3},
    "ahead": {"block_size": 4, "num_blocks": 600, "has_async_stepping": True},
    "drafts": {"block_size": 4, "num_blocks": 600, "num_draft_tokens": 3},
    "two ranks": {"block_size": 4, "num_blocks": 600, "tensor_parallel_size": 2},
}


def make_llm(folder: Path, options: dict[str, Any]) -> LLM:
    fitting = {"max_model_len": 48, "max_num_batched_tokens": 64, "backend": "reference"}
    return LLM(model=str(folder), **(fitting | options))


def cases_of(name: str) -> Iterator[tuple[Case, list[tuple[list[int], float]]]]:
    for stored in GOLDEN[name]:
        fields = {key: value for key, value in stored.items() if key != "sequences"}
        yield Case(**fields), stored["sequences"]


def search(llm: LLM, case: Case) -> BeamSearchOutput:
    [output] = llm.beam_search(
        case.prompt_token_ids, case.width, case.max_tokens, case.length_penalty
    )
    return output


def verify(output: BeamSearchOutput, case: Case, expected: list[tuple[list[int], float]]) -> None:
    assert output.error is None
    assert output.prompt_token_ids == case.prompt_token_ids
    assert [one.token_ids for one in output.sequences] == [token_ids for token_ids, _ in expected]
    for one, (token_ids, score) in zip(output.sequences, expected, strict=True):
        assert one.score == pytest.approx(score, abs=1e-3, rel=1e-5)
        length = len(token_ids)
        assert one.logprob == pytest.approx(one.score * length**case.length_penalty)
        has_ended = token_ids[-1] in case.eos_token_ids
        assert one.finish_reason == ("stop" if has_ended else "length")


def texts(output: BeamSearchOutput) -> list[tuple[str, list[int]]]:
    """Numpy's sums depend on batch mates in their last bits: scores are not compared."""
    assert len(output.sequences) > 0
    return [(one.text, one.token_ids) for one in output.sequences]


def end(llm: LLM) -> None:
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    assert llm._running == {}
    llm.shutdown()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "roomy") for name in BEAM_MODELS),
        *(("windows", o) for o in OPTIONS if o != "roomy"),
    ],
)
def test_sequences_and_scores_are_those_of_transformers(name, options, tmp_path):
    llm = make_llm(make_beam_folder(name, tmp_path), OPTIONS[options])
    for case, expected in cases_of(name):
        verify(search(llm, case), case, expected)
    end(llm)


@pytest.mark.parametrize("name", BEAM_MODELS)
def test_a_pool_that_is_too_small_for_all_beams_changes_nothing(name, tmp_path):
    roomy = make_llm(make_beam_folder(name, tmp_path), OPTIONS["roomy"])
    plan = roomy._core.plan
    num_blocks = 1 + plan.num_blocks_per_request + plan.num_reserved_blocks
    tight = make_llm(tmp_path, {"block_size": 4, "num_blocks": num_blocks})
    for case, expected in cases_of(name):
        verify(search(roomy, case), case, expected)
        verify(search(tight, case), case, expected)
    # Where beams find no room, they are computed again.
    computed = [llm.stats.steps.num_scheduled_tokens for llm in (tight, roomy)]
    assert computed[0] > computed[1]
    end(roomy)
    end(tight)


def test_beams_compute_one_token_each(tmp_path):
    """The prompt once, then a token per beam and step; no prefix cache helps."""
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["no prefix cache"])
    llm.beam_search(PROMPT, 3, 6, ignore_eos=True)
    assert llm.stats.steps.num_steps == 6
    assert llm.stats.steps.num_scheduled_tokens == len(PROMPT) + 5 * 3
    # 15 tokens in blocks of 4: two whole blocks of the prompt are shared, the rest is not.
    assert llm.stats.cache.num_peak_blocks <= 2 + 2 * 3 * 2
    end(llm)


def test_a_user_s_query_of_the_prefix_cache_is_the_prompt(tmp_path):
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["roomy"])
    for _ in range(2):
        llm.beam_search(PROMPT, 3, 6)
    assert llm.stats.cache.num_queried_tokens == 2 * len(PROMPT)
    assert llm.stats.cache.num_hit_tokens == 8
    end(llm)


def test_one_beam_is_greedy(tmp_path):
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["roomy"])
    [output] = llm.beam_search("ab", 1, 9)
    [greedy] = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=9, logprobs=0))
    [one] = output.sequences
    assert (one.text, one.token_ids) == (greedy.outputs[0].text, greedy.outputs[0].token_ids)
    assert one.logprob == pytest.approx(sum(t.logprob for t in greedy.outputs[0].logprobs))
    end(llm)


def test_many_prompts_are_searched_together(tmp_path):
    """Five prompts of two beams on seats for four: two at once, each as if alone."""
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["roomy"] | {"max_num_seqs": 4})
    prompts = ["one", "two", "three", "four", "five"]
    alone = [llm.beam_search(prompt, 2, 7)[0] for prompt in prompts]
    num_steps = llm.stats.steps.num_steps
    together = llm.beam_search(prompts, 2, 7)
    assert list(map(texts, together)) == list(map(texts, alone))
    assert llm.stats.steps.num_steps - num_steps < num_steps * 0.7
    end(llm)


def test_streams_go_on_beside_it(tmp_path):
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["roomy"])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    [alone] = llm.generate("abc", params)
    expected = texts(llm.beam_search("xyz", 3, 6)[0])
    stream = llm.stream("abc", params)
    first = next(stream).token_ids
    assert texts(llm.beam_search("xyz", 3, 6)[0]) == expected
    rest = [token_id for delta in stream for token_id in delta.token_ids]
    assert first + rest == alone.outputs[0].token_ids
    end(llm)


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["roomy"])
    step, num_steps = llm._core.step, iter(range(3))

    def interrupted() -> Any:
        if next(num_steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search([PROMPT, PROMPT[:5]], 3, 9)
    end(llm)


def test_a_beam_that_fails_ends_its_search_alone(tmp_path, monkeypatch):
    llm = make_llm(make_beam_folder("full", tmp_path), OPTIONS["roomy"])
    [expected] = llm.beam_search("abc", 2, 5)
    sample = llm._core.executor.sample_tokens

    def failing(handle: Any, grammar: Any = None) -> ModelRunnerOutput:
        result = sample(handle, grammar)
        of_prompt = [r for r, s in llm._running.items() if s.output.prompt_token_ids == PROMPT]
        if len(of_prompt) < 2:
            return result
        del result.sampled_token_ids[of_prompt[0]]
        return replace(result, errors={of_prompt[0]: "not a number"})

    monkeypatch.setattr(llm._core.executor, "sample_tokens", failing)
    failed, fine = llm.beam_search([PROMPT, "abc"], 2, 5)
    assert (failed.error, failed.sequences) == ("not a number", [])
    assert texts(fine) == texts(expected)
    end(llm)


@pytest.mark.parametrize(
    ("field", "width", "max_tokens", "penalty"),
    [
        ("width", 0, 5, 1.0),
        ("width", True, 5, 1.0),
        ("width", 2.0, 5, 1.0),
        ("width", 26, 5, 1.0),
        ("max_tokens", 2, 0, 1.0),
        ("max_tokens", 2, None, 1.0),
        ("max_tokens", 2, 39, 1.0),
        ("length_penalty", 2, 5, math.nan),
        ("length_penalty", 2, 5, "1"),
    ],
)
def test_what_cannot_be_searched_is_refused(llm_of_48, field, width, max_tokens, penalty):
    with pytest.raises(RequestError) as caught:
        llm_of_48.beam_search(PROMPT, width, max_tokens, penalty)
    assert caught.value.field == field
    if width == 26:  # two log-probabilities per beam, of 50
        assert "up to 25" in str(caught.value)


@pytest.fixture(scope="module")
def llm_of_48(tmp_path_factory) -> Iterator[LLM]:
    folder = make_beam_folder("full", tmp_path_factory.mktemp("full"))
    llm = make_llm(folder, OPTIONS["roomy"])
    yield llm
    llm.shutdown()


def test_the_widest_search_and_the_longest_are_taken(llm_of_48):
    [wide] = llm_of_48.beam_search(PROMPT, 25, 2)
    assert len(wide.sequences) == 25
    [long] = llm_of_48.beam_search(PROMPT, 2, 38, ignore_eos=True)
    assert [len(one.token_ids) for one in long.sequences] == [38, 38]


@pytest.mark.parametrize("seed", range(5))
def test_a_search_wide_enough_finds_the_best_of_all(seed):
    """Three tokens, one of them the end, up to four tokens long: 31 sequences, tried one by one."""

    def logprobs(prefix: tuple[int, ...]) -> list[float]:
        weights = random.Random(f"{seed} {prefix}").choices(range(1, 100), k=3)
        return [math.log(weight / sum(weights)) for weight in weights]

    expected = []
    for length in range(1, 5):
        for tokens in itertools.product(range(3), repeat=length):
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == 4):
                steps = [logprobs(tokens[:i])[token] for i, token in enumerate(tokens)]
                expected.append((sum(steps), tokens))
    expected.sort(reverse=True)
    assert len(expected) == 31
    # Scores only fall without a length penalty, so that no early end is a guess.
    ranking = BeamRanking(BeamOptions(31, 4, 0.0), frozenset({0}))
    beams = [Candidate((), 0.0)]
    while beams:
        top = [sorted(enumerate(logprobs(b.token_ids)), key=lambda p: -p[1]) for b in beams]
        beams = ranking.advance(list(zip(beams, top, strict=True)))
    assert [c.token_ids for _, c in ranking.finished] == [tokens for _, tokens in expected]
    scores = [score for score, _ in ranking.finished]
    assert scores == pytest.approx([score for score, _ in expected])


def test_smollm2_finds_what_transformers_finds(smollm2: Path):
    if not built_isas():
        pytest.skip("the native library is not built")
    llm = LLM(
        model=str(smollm2), backend="native", dtype="float32", num_threads=1, num_blocks=60,
        max_model_len=128,
    )  # fmt: skip
    for case, expected in cases_of("smollm2"):
        output = search(llm, case)
        verify(output, case, expected)
    # The last case is a chat: its answers end, and their text is without the end.
    assert output.sequences[0].text.strip() == "The capital of France is Paris."
    end(llm)
