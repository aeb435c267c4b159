"""SmolLM2 on the torch backend: transformers' greedy text, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams

pytestmark = pytest.mark.torch

GOLDEN = Path(__file__).parent.parent / "golden"
NEAR_TIE = 0.1  # logits: the best token's lead over the second
MAX_PROMPT = 100  # longer ones take long on a CPU


def cases(name: str) -> list[dict[str, Any]]:
    stored = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    return [case for case in stored if len(case["prompt_token_ids"]) <= MAX_PROMPT]


def generate(llm: LLM, chosen: list[dict[str, Any]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([case["prompt_token_ids"] for case in chosen], params)
    return [output.outputs[0].token_ids for output in outputs]


def test_float32_text_is_transformers_with_chunks_hits_and_preemptions(smollm2: Path) -> None:
    # The longest first: it holds most of a tight pool while shorter ones enter beside it and grow.
    chosen = cases("smollm2_greedy")[::-1]
    num_tokens = 12
    largest = max(len(case["prompt_token_ids"]) for case in chosen) + num_tokens
    llm = LLM(
        model=smollm2,
        backend="torch",
        dtype="float32",
        max_model_len=largest,
        num_blocks=2 + -(-largest // 16),
        max_num_batched_tokens=48,
    )
    for _ in range(2):  # the second time prefixes are in the cache
        texts = generate(llm, chosen, num_tokens)
        assert texts == [case["token_ids"][:num_tokens] for case in chosen]
        chosen = chosen[:1]
    assert llm.stats.scheduler.num_preemptions > 0
    assert llm.stats.cache.num_hit_tokens > 0
    llm._core.manager.check()
    llm.shutdown()


def test_bfloat16_leaves_the_exact_text_at_near_ties_alone(smollm2: Path) -> None:
    chosen = cases("smollm2_bfloat16")[::2]
    llm = LLM(model=smollm2, backend="torch", num_blocks=200, max_model_len=MAX_PROMPT + 12)
    texts = generate(llm, chosen, 12)
    llm.shutdown()
    num_equal = 0
    for ours, case in zip(texts, chosen, strict=True):
        pairs = zip(ours, case["token_ids"], strict=False)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        num_equal += parted is None
        assert parted is None or case["leads"][parted] < NEAR_TIE, f"parted at {parted}"
    assert num_equal >= 0.8 * len(chosen)
