"""SmolLM2's greedy text equals transformers' under every configuration of the cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text(encoding="utf-8")
)
CASES = GOLDEN["cases"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=GOLDEN["num_new_tokens"], ignore_eos=True)
LARGEST = max(len(case["prompt_token_ids"]) for case in CASES) + GOLDEN["num_new_tokens"]

FACTORS: dict[str, tuple[Any, ...]] = {
    "block_size": (1, 16, 128),
    "token_budget": (16, 64, 2048),
    "has_prefix_cache": (True, False),
    "has_batch_mates": (True, False),
    "is_pool_tight": (True, False),
}


@dataclass(frozen=True)
class Setup:
    block_size: int
    token_budget: int
    has_prefix_cache: bool
    has_batch_mates: bool
    is_pool_tight: bool

    @property
    def num_blocks(self) -> int:
        """Room for the largest request and little else, or for all of them; and block 0."""
        num_tokens = LARGEST + 16 if self.is_pool_tight else len(CASES) * LARGEST
        return 1 + -(-num_tokens // self.block_size)


FULL_CROSS = [Setup(*values) for values in itertools.product(*FACTORS.values())]


def value_pairs(setup: Setup) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every pair of factor values that the setup brings together."""
    values = [(name, getattr(setup, name)) for name in FACTORS]
    return set(itertools.combinations(values, 2))


# Any two values of two factors meet in one of these; chosen to take few steps in all.
COVER = [
    Setup(1, 16, has_prefix_cache=False, has_batch_mates=True, is_pool_tight=False),
    Setup(1, 64, has_prefix_cache=False, has_batch_mates=False, is_pool_tight=True),
    Setup(1, 2048, has_prefix_cache=True, has_batch_mates=False, is_pool_tight=False),
    Setup(16, 16, has_prefix_cache=True, has_batch_mates=False, is_pool_tight=False),
    Setup(16, 64, has_prefix_cache=False, has_batch_mates=False, is_pool_tight=False),
    Setup(16, 2048, has_prefix_cache=True, has_batch_mates=True, is_pool_tight=True),
    Setup(128, 16, has_prefix_cache=False, has_batch_mates=False, is_pool_tight=True),
    Setup(128, 64, has_prefix_cache=True, has_batch_mates=True, is_pool_tight=True),
    Setup(128, 2048, has_prefix_cache=False, has_batch_mates=False, is_pool_tight=False),
]


def test_cover_is_pairwise() -> None:
    assert len(COVER) <= 12
    every_pair = set().union(*map(value_pairs, FULL_CROSS))
    assert set().union(*map(value_pairs, COVER)) == every_pair


def generate(llm: LLM, setup: Setup, cases: list[dict[str, Any]]) -> Iterator[list[int]]:
    prompts = [case["prompt_token_ids"] for case in cases]
    batches = [prompts] if setup.has_batch_mates else [[prompt] for prompt in prompts]
    for batch in batches:
        for output in llm.generate(batch, PARAMS):
            yield output.outputs[0].token_ids


def check_setup(setup: Setup, model: Path, cases: list[dict[str, Any]]) -> None:
    llm = LLM(
        model=str(model),
        backend="reference",
        block_size=setup.block_size,
        max_num_batched_tokens=setup.token_budget,
        has_prefix_cache=setup.has_prefix_cache,
        num_blocks=setup.num_blocks,
        max_model_len=LARGEST,
    )
    # The longest first: it holds most of a tight pool while shorter ones enter beside it and grow.
    cases = cases[::-1]
    for case, token_ids in zip(cases, generate(llm, setup, cases), strict=True):
        assert token_ids == case["token_ids"], f"{len(case['prompt_token_ids'])} prompt tokens"
    is_pressed = setup.is_pool_tight and setup.has_batch_mates
    assert (llm.stats.scheduler.num_preemptions > 0) == is_pressed
    # The longest again: now a prefix of it is in the cache.
    again = cases[:1]
    for case, token_ids in zip(again, generate(llm, setup, again), strict=True):
        assert token_ids == case["token_ids"]
    if not setup.is_pool_tight:
        has_full_block = len(again[0]["prompt_token_ids"]) > setup.block_size
        expects_hits = setup.has_prefix_cache and has_full_block
        assert (llm.stats.cache.num_hit_tokens > 0) == expects_hits
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


@pytest.mark.parametrize("setup", COVER, ids=str)
def test_greedy_text_pairwise(setup: Setup, smollm2: Path, scale: int) -> None:
    # One request at a time is slow: a short run gives every such setup another fifth of them.
    is_part = scale == 1 and not setup.has_batch_mates
    check_setup(setup, smollm2, CASES[COVER.index(setup) % 5 :: 5] if is_part else CASES)


@pytest.mark.full
@pytest.mark.parametrize("setup", [s for s in FULL_CROSS if s not in COVER], ids=str)
def test_greedy_text_full_cross(setup: Setup, smollm2: Path) -> None:
    check_setup(setup, smollm2, CASES)


def test_chat_answers_as_transformers(smollm2: Path) -> None:
    chat = GOLDEN["chat"]
    llm = LLM(model=str(smollm2), backend="reference")
    [answer] = llm.chat(chat["messages"], SamplingParams(temperature=0.0, max_tokens=32))
    assert answer.prompt_token_ids == chat["prompt_token_ids"]
    assert answer.outputs[0].token_ids == chat["token_ids"][: len(answer.outputs[0].token_ids)]
    assert answer.outputs[0].text.strip() == chat["text"].strip()
    llm.shutdown()
