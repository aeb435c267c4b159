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
from kvloom.ops.isa import built_isas

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text(encoding="utf-8")
)
CASES = GOLDEN["cases"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=GOLDEN["num_new_tokens"], ignore_eos=True)
LARGEST = max(len(case["prompt_token_ids"]) for case in CASES) + GOLDEN["num_new_tokens"]

FACTORS: dict[str, tuple[Any, ...]] = {
    "backend": ("reference", "native"),
    "block_size": (1, 16, 128),
    "token_budget": (16, 64, 2048),
    "has_prefix_cache": (True, False),
    "has_batch_mates": (True, False),
    "is_pool_tight": (True, False),
}
# The native backend computes in float32 here, and must then write what the reference writes.
OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "native": {"dtype": "float32", "num_threads": 1},
}


@dataclass(frozen=True)
class Setup:
    backend: str
    block_size: int
    token_budget: int
    has_prefix_cache: bool
    has_batch_mates: bool
    is_pool_tight: bool

    @property
    def is_possible(self) -> bool:
        return self.backend == "reference" or self.block_size % 16 == 0

    @property
    def num_blocks(self) -> int:
        """Room for the largest request and little else, or for all of them; and block 0."""
        num_tokens = LARGEST + 16 if self.is_pool_tight else len(CASES) * LARGEST
        return 1 + -(-num_tokens // self.block_size)

    @property
    def has_preemptions(self) -> bool:
        return self.is_pool_tight and self.has_batch_mates


FULL_CROSS = [
    s for s in itertools.starmap(Setup, itertools.product(*FACTORS.values())) if s.is_possible
]

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def value_pairs(setup: Setup) -> set[Pair]:
    """Every pair of values that the setup brings together; preemptions count as a value, too."""
    values = [(name, getattr(setup, name)) for name in (*FACTORS, "has_preemptions")]
    return set(itertools.combinations(values, 2))


def make_setup(backend: str, block_size: int, token_budget: int, *names: str) -> Setup:
    return Setup(
        backend, block_size, token_budget, *(n in names for n in ("prefix", "mates", "tight"))
    )


# Any two values of two factors meet in one of these, a block size and a budget in exactly one.
# Chosen to take little time: requests without batch mates take a step per token each.
COVER = [
    make_setup("reference", 1, 16, "prefix", "mates", "tight"),
    make_setup("reference", 1, 64, "prefix", "tight"),
    make_setup("reference", 1, 2048, "mates"),
    make_setup("reference", 16, 64, "prefix", "mates"),
    make_setup("reference", 128, 16, "prefix", "mates"),
    make_setup("native", 16, 16),
    make_setup("native", 16, 2048, "prefix", "mates", "tight"),
    make_setup("native", 128, 64, "mates", "tight"),
    make_setup("native", 128, 2048, "prefix", "tight"),
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


def check_setup(setup: Setup, model: Path) -> None:
    if setup.backend == "native" and not built_isas():
        pytest.skip("the native library is not built")
    llm = LLM(
        model=str(model),
        backend=setup.backend,
        **OPTIONS[setup.backend],
        block_size=setup.block_size,
        max_num_batched_tokens=setup.token_budget,
        has_prefix_cache=setup.has_prefix_cache,
        num_blocks=setup.num_blocks,
        max_model_len=LARGEST,
    )
    # The longest first: it holds most of a tight pool while shorter ones enter beside it and grow.
    cases = CASES[::-1]
    for case, token_ids in zip(cases, generate(llm, setup, cases), strict=True):
        assert token_ids == case["token_ids"], f"{len(case['prompt_token_ids'])} prompt tokens"
    assert (llm.stats.scheduler.num_preemptions > 0) == setup.has_preemptions
    num_hit_tokens = llm.stats.cache.num_hit_tokens
    if setup.has_prefix_cache:
        [again] = generate(llm, setup, cases[:1])
        assert again == cases[0]["token_ids"]
        if not setup.is_pool_tight:  # all of it is still there
            assert llm.stats.cache.num_hit_tokens > num_hit_tokens
    else:
        assert num_hit_tokens == 0
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


@pytest.mark.parametrize("setup", COVER, ids=str)
def test_greedy_text_pairwise(setup: Setup, smollm2: Path) -> None:
    check_setup(setup, smollm2)


@pytest.mark.full
@pytest.mark.parametrize("setup", [s for s in FULL_CROSS if s not in COVER], ids=str)
def test_greedy_text_full_cross(setup: Setup, smollm2: Path) -> None:
    check_setup(setup, smollm2)


def test_chat_answers_as_transformers(smollm2: Path) -> None:
    chat = GOLDEN["chat"]
    llm = LLM(model=str(smollm2), backend="reference")
    [answer] = llm.chat(chat["messages"], SamplingParams(temperature=0.0, max_tokens=32))
    assert answer.prompt_token_ids == chat["prompt_token_ids"]
    assert answer.outputs[0].token_ids == chat["token_ids"][: len(answer.outputs[0].token_ids)]
    assert answer.outputs[0].text.strip() == chat["text"].strip()
    llm.shutdown()
