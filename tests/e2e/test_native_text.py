"""SmolLM2 on the native backend: exact text in float32, sensible text in every other format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvloom import LLM, SamplingParams
from kvloom.errors import ConfigError
from kvloom.ops.isa import built_isas
from tiny_folder import make_tiny_folder

pytestmark = pytest.mark.skipif(not built_isas(), reason="the native library is not built")

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text(encoding="utf-8")
)
CASES = GOLDEN["cases"]
PROMPTS = [case["prompt_token_ids"] for case in CASES]
GREEDY = {"temperature": 0.0, "max_tokens": GOLDEN["num_new_tokens"], "ignore_eos": True}
LARGEST = max(map(len, PROMPTS)) + GOLDEN["num_new_tokens"]


BFLOAT16 = json.loads(
    (Path(__file__).parent.parent / "golden" / "smollm2_bfloat16.json").read_text(encoding="utf-8")
)
NEAR_TIE = 0.1  # logits: the best token's lead over the second


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(
        model=str(model),
        **{"backend": "native", "max_model_len": LARGEST, "num_blocks": 1200, **options},
    )


def texts(llm: LLM, prompts: list[list[int]]) -> Iterator[list[int]]:
    for output in llm.generate(prompts, SamplingParams(**GREEDY)):
        yield output.outputs[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 48, "num_threads": 1},
        {"block_size": 128, "has_prefix_cache": False},
        {
            "num_blocks": 1 + -(-(LARGEST + 16) // 16),
            "max_num_batched_tokens": 256,
            "num_draft_tokens": 5,
        },
    ],
    ids=str,
)
def test_float32_text_is_transformers(options: dict[str, Any], smollm2: Path) -> None:
    llm = make_llm(smollm2, dtype="float32", **options)
    # The longest first: it holds most of a tight pool while shorter ones enter beside it and grow.
    cases = CASES[::-1]
    for case, token_ids in zip(cases, texts(llm, PROMPTS[::-1]), strict=True):
        assert token_ids == case["token_ids"], f"{len(case['prompt_token_ids'])} prompt tokens"
    llm._core.manager.check()
    llm.shutdown()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_text_that_quotes_comes_in_fewer_steps(dtype: str, smollm2: Path) -> None:
    sentence = "The ferry to the island leaves at seven, and whoever misses it waits until noon."
    chat = [{"role": "user", "content": f"Repeat this word for word: {sentence} {sentence}"}]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outcomes = []
    for options in ({}, {"num_draft_tokens": 8}):
        llm = make_llm(smollm2, dtype=dtype, **options)
        [output] = llm.chat(chat, params)
        outcomes.append((output.outputs[0].token_ids, llm.stats.steps.num_steps))
        llm.shutdown()
    (plain, num_plain_steps), (drafted, num_steps) = outcomes
    assert drafted == plain
    assert num_plain_steps == 40
    assert num_steps < 20


def test_bfloat16_leaves_the_exact_text_at_near_ties_alone(smollm2: Path) -> None:
    cases = BFLOAT16["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=len(cases[0]["token_ids"]), ignore_eos=True)
    llm = make_llm(smollm2, dtype="bfloat16")
    outputs = llm.generate([case["prompt_token_ids"] for case in cases], params)
    llm.shutdown()
    num_equal = 0
    for case, output in zip(cases, outputs, strict=True):
        pairs = zip(output.outputs[0].token_ids, case["token_ids"], strict=True)
        parted = next((i for i, (ours, exact) in enumerate(pairs) if ours != exact), None)
        num_equal += parted is None
        assert parted is None or case["leads"][parted] < NEAR_TIE, f"parted at {parted}"
    assert len(cases) == 20
    assert num_equal >= 18


PART = CASES[::3]  # every third prompt, from 1 token to 600


def mean_logprobs(judge: LLM, outputs: list[list[int]]) -> np.ndarray:
    """Mean log-probability of each output's tokens after its prompt of PART."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    whole = [case["prompt_token_ids"] + out for case, out in zip(PART, outputs, strict=True)]
    means = []
    for scored, output in zip(judge.generate(whole, params), outputs, strict=True):
        means.append(np.mean([row.logprob for row in scored.prompt_logprobs[-len(output) :]]))
    return np.array(means)


@pytest.fixture(scope="module")
def judge(smollm2: Path) -> Iterator[LLM]:
    """The exact model, which scores what others write."""
    llm = make_llm(smollm2, dtype="float32", max_model_len=LARGEST + 1, num_threads=1)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "auto"},
        {"dtype": "auto", "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_other_formats_write_text_as_likely(
    options: dict[str, Any], judge: LLM, smollm2: Path
) -> None:
    llm = make_llm(smollm2, num_threads=1, **options)
    outputs = list(texts(llm, [case["prompt_token_ids"] for case in PART]))
    llm.shutdown()
    ours = mean_logprobs(judge, outputs)
    theirs = mean_logprobs(judge, [case["token_ids"] for case in PART])
    assert ours.mean() > theirs.mean() - 0.1
    assert (ours > theirs - 0.6).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_do_not_depend_on_the_schedule(dtype: str, smollm2: Path) -> None:
    params = SamplingParams(**GREEDY, logprobs=2)
    prompts = PROMPTS[::5]

    def scores(outputs: list[Any]) -> list[Any]:
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    llm = make_llm(smollm2, dtype=dtype)
    together = scores(llm.generate(prompts, params))
    again = scores(llm.generate(prompts, params))  # now with prefixes in the cache
    assert llm.stats.cache.num_hit_tokens > 0
    llm.shutdown()
    llm = make_llm(smollm2, dtype=dtype, max_num_batched_tokens=37, has_prefix_cache=False)
    alone = [score for prompt in prompts for score in scores(llm.generate([prompt], params))]
    llm.shutdown()
    assert together == again == alone


def test_nan_weights_are_an_error_of_the_request(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, head_dim=16)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = np.nan
    save_file(weights, folder / "model.safetensors")
    llm = LLM(model=str(folder), backend="native", num_blocks=40)
    bad, good = llm.generate(
        [[65, 7], [66]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )
    assert "NaN" in (bad.outputs[0].error or "")
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].finish_reason == "length"
    llm.shutdown()


def test_a_block_size_the_kernels_do_not_take(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, head_dim=16)
    with pytest.raises(ConfigError, match="multiples of 16"):
        LLM(model=str(folder), backend="native", block_size=8, num_blocks=40)
    llm = LLM(model=str(folder), block_size=8, num_blocks=40)
    assert llm._core.executor._workers[0]._backend.name == "reference"
    llm.shutdown()
    llm = LLM(model=str(folder), block_size=32, num_blocks=40)
    assert llm._core.executor._workers[0]._backend.name == "native"
    llm.shutdown()


def test_two_ranks_write_the_same_text(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, head_dim=16)
    texts = []
    for size in (1, 2):
        llm = LLM(model=str(folder), backend="native", tensor_parallel_size=size, num_blocks=40)
        outputs = llm.generate(["abc", "x"], SamplingParams(**GREEDY))
        texts.append([o.outputs[0].token_ids for o in outputs])
        llm.shutdown()
    assert texts[0] == texts[1]
