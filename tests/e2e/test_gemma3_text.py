"""Gemma 3 270M's greedy text equals transformers', below its window of 512 tokens and beyond it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from kvloom.ops.isa import built_isas

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "gemma3_greedy.json").read_text(encoding="utf-8")
)
CASES = GOLDEN["cases"]
NUM_NEW_TOKENS = GOLDEN["num_new_tokens"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
LENGTHS = [len(case["prompt_token_ids"]) for case in CASES]
BOS = 2


@dataclass(frozen=True)
class Setup:
    """A backend in float32, and the most tokens of a step: whole prompts, or chunks of 64."""

    backend: str
    token_budget: int
    lengths: tuple[int, ...] = (10, 500, 513, 1100, 4000)

    @property
    def cases(self) -> list[dict[str, Any]]:
        return [case for case in CASES if len(case["prompt_token_ids"]) in self.lengths]


NATIVE = [Setup("native", 8192), Setup("native", 64)]
# The longest prompt in chunks is part of a batch in every run, and alone in the long ones.
NATIVE_ALONE = [
    NATIVE[0],
    Setup("native", 64, (10, 500, 513, 1100)),
    pytest.param(NATIVE[1], marks=pytest.mark.full),
]


def test_prompts_begin_with_one_bos() -> None:
    assert LENGTHS == [10, 500, 513, 1100, 4000]
    for case in CASES:
        assert case["prompt_token_ids"][0] == BOS
        assert case["prompt_token_ids"].count(BOS) == 1


def make_llm(setup: Setup, folder: Path, **options: Any) -> LLM:
    path = folder / GOLDEN["model"]
    if not path.exists():
        pytest.skip(f"{path.name} is not there; run scripts/fetch_models")
    if setup.backend == "native" and not built_isas():
        pytest.skip("the native library is not built")
    return LLM(
        model=str(path),
        backend=setup.backend,
        dtype="float32",
        max_model_len=max(setup.lengths) + NUM_NEW_TOKENS,
        max_num_batched_tokens=setup.token_budget,
        num_threads=1,  # tests run beside each other, one for each core
        kv_cache_bytes=2 << 30,
        **options,
    )


def check(llm: LLM, cases: Sequence[dict[str, Any]]) -> None:
    """Generate from all at once."""
    outputs = llm.generate([case["prompt_token_ids"] for case in cases], PARAMS)
    for case, output in zip(cases, outputs, strict=True):
        length = len(case["prompt_token_ids"])
        assert output.outputs[0].token_ids == case["token_ids"], f"{length} prompt tokens"
    llm._core.manager.check()


# The reference takes long over long prompts: one on each side of the window is enough.
@pytest.mark.parametrize("setup", [*NATIVE, Setup("reference", 2048, (10, 513))], ids=str)
def test_in_one_batch(setup: Setup, models_dir: Path) -> None:
    llm = make_llm(setup, models_dir, has_prefix_cache=False)
    check(llm, setup.cases)
    [of_text] = llm.generate(["The keeper counted the steps."], SamplingParams(max_tokens=1))
    assert of_text.prompt_token_ids[0] == BOS
    assert of_text.prompt_token_ids.count(BOS) == 1
    llm.shutdown()


@pytest.mark.parametrize("setup", NATIVE_ALONE, ids=str)
def test_alone_and_after_a_prefix_hit(setup: Setup, models_dir: Path) -> None:
    llm = make_llm(setup, models_dir)
    for case in setup.cases:
        check(llm, [case])
    num_hit_tokens = llm.stats.cache.num_hit_tokens
    check(llm, setup.cases)
    assert llm.stats.cache.num_hit_tokens > num_hit_tokens
    llm.shutdown()
