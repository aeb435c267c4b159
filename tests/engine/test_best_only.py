"""Which steps keep the best of their logits only, and that nobody can tell by the texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams, StructuredOutputs
from kvloom.ops import native_lowering
from kvloom.ops.base import Batch
from kvloom.ops.native_program import NativeProgram
from tiny_folder import greedy, make_tiny_folder

PROMPTS = [[1, 2, 3], [4] * 70, list(range(40)), [7, 8] * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether it wanted the best only."""
    steps: list[bool] = []
    forward = NativeProgram.forward

    def noting(self: NativeProgram, batch: Batch, late_tokens: Any = None) -> Any:
        steps.append(batch.wants_best_only)
        return forward(self, batch, late_tokens)

    monkeypatch.setattr(NativeProgram, "forward", noting)
    return steps


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(folder), num_blocks=200, backend="native", max_num_batched_tokens=64)
    yield llm
    llm.shutdown()


def texts_of(llm: LLM, params: Any) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params)
    return [output.outputs[0].token_ids for output in outputs]


MORE = [
    {"temperature": 0.7, "seed": 1},
    {"logprobs": 1},
    {"prompt_logprobs": 0},
    {"min_tokens": 3},
    {"frequency_penalty": 0.2},
    {"logit_bias": {3: 1.0}},
    {"structured_outputs": StructuredOutputs(regex="[ab]{4,8}"), "ignore_eos": False},
]


@pytest.mark.parametrize("given", MORE, ids=str)
def test_one_request_that_asks_for_more_is_given_all_logits(
    llm: LLM, seen: list[bool], given: dict[str, Any]
) -> None:
    """The others run with it or without: their texts are the same."""
    alone = texts_of(llm, greedy())
    assert set(seen) == {True}
    seen.clear()
    asking = greedy(**given)
    mixed = texts_of(llm, [greedy(), asking, greedy(), greedy()])
    assert False in seen
    assert [mixed[i] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]
    seen.clear()
    assert llm.generate(PROMPTS[1], asking)[0].outputs[0].token_ids == mixed[1]
    if "prompt_logprobs" not in given:  # whose steps are greedy once the prompt is scored
        assert True not in seen[1:]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_async_stepping": False},
        {"num_draft_tokens": 3},
        {"num_threads": 1},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "num_draft_tokens": 3},
    ],
    ids=str,
)
def test_texts_are_those_of_all_logits(
    folder: Path, seen: list[bool], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head in bfloat16 a screen finds the best."""
    monkeypatch.setattr(native_lowering, "MIN_SCREENED_SIZE", 0)
    llm = LLM(model=str(folder), num_blocks=200, backend="native", **options)
    found = texts_of(llm, greedy(max_tokens=40))
    assert set(seen) == {True}
    seen.clear()
    assert texts_of(llm, greedy(max_tokens=40, logprobs=0)) == found
    assert True not in seen[1:]


def test_one_that_cannot_be_sampled_fails_alone(folder: Path, llm: LLM) -> None:
    """Seen by the greatest of each panel: a logit that is NaN ends its request."""
    broken = make_tiny_folder(folder.parent / "broken", head_dim=16)
    _spoil(broken)
    bad = LLM(model=str(broken), num_blocks=200, backend="native")
    wrong, right = bad.generate([[9, 9], [1, 2]], SamplingParams(temperature=0.0, max_tokens=4))
    assert "NaN" in (wrong.outputs[0].error or "")
    assert right.outputs[0].error is None
    assert right.outputs[0].token_ids


def _spoil(folder: Path) -> None:
    """The embedding of token 9 is NaN."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = np.nan
    save_file(tensors, folder / "model.safetensors")
