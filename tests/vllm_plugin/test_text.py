"""Greedy float32 text of vLLM over kvloom is transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from float32_folder import LENGTHS, NUM_NEW_TOKENS, read_cases

LONGEST = max(LENGTHS) + NUM_NEW_TOKENS
# The longest request fits, beside little else; vLLM makes six groups of Gemma's layers.
COLUMNS = 1 + -(-LONGEST // 16)
TIGHT_BLOCKS = {"smollm2": COLUMNS + 1, "gemma3": 6 * COLUMNS + 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)

# Between them: both schedulers, both budgets, both pools, with and without a prefix cache.
SETUPS = [
    {"async_scheduling": True, "max_num_batched_tokens": 16, "enable_prefix_caching": True},
    {
        "async_scheduling": False,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": TIGHT_BLOCKS["smollm2"],
    },
]


def check_texts(
    make_llm: Callable[..., Any], model: str, folder: Path, setup: dict[str, Any]
) -> None:
    cases = read_cases(model)
    options = {"max_model_len": LONGEST, "max_num_seqs": 16, "dtype": "float32"} | setup
    llm = make_llm(folder, **options)
    outputs = llm.generate([{"prompt_token_ids": case.prompt} for case in cases], GREEDY)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case.tokens, f"{len(case.prompt)} tokens"


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_smollm2(
    make_llm: Callable[..., Any], smollm2_float32: Path, setup: dict[str, Any]
) -> None:
    check_texts(make_llm, "smollm2", smollm2_float32, setup)


@pytest.mark.full
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("is_tight", [False, True])
def test_every_combination(
    request: pytest.FixtureRequest,
    make_llm: Callable[..., Any],
    model: str,
    is_async: bool,
    budget: int,
    has_cache: bool,
    is_tight: bool,
) -> None:
    setup = {
        "async_scheduling": is_async,
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": has_cache,
        "num_gpu_blocks_override": TIGHT_BLOCKS[model] if is_tight else None,
    }
    check_texts(make_llm, model, request.getfixturevalue(f"{model}_float32"), setup)


def test_blocks_run_out_in_a_tight_pool() -> None:
    """What makes the second setup preempt: requests that run at once outgrow the pool."""
    num_blocks = sum(-(-(length + NUM_NEW_TOKENS) // 16) for length in LENGTHS[-8:])
    assert num_blocks > TIGHT_BLOCKS["smollm2"]
