"""Greedy float32 text of vLLM over kvloom is transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from float32_folder import LENGTHS, NUM_NEW_TOKENS, Case, read_cases

LONGEST = max(LENGTHS) + NUM_NEW_TOKENS
COLUMNS = -(-LONGEST // 16)
# Pools, by model and budget, that hold the longest request and one or two of the shortest beside
# it until they grow. Gemma's layers are six groups, five of which hold their window of 512 tokens
# and what is in flight.
TIGHT_BLOCKS = {
    ("smollm2", 16): COLUMNS + 2,
    ("smollm2", 2048): COLUMNS + 2,
    ("gemma3", 16): COLUMNS + 5 * 36 + 2,
    ("gemma3", 2048): 6 * (COLUMNS + 1) + 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)

# Between them: both schedulers, both budgets, both pools, with and without a prefix cache.
SETUPS = [
    {"async_scheduling": True, "max_num_batched_tokens": 16, "enable_prefix_caching": True},
    {
        "async_scheduling": False,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": TIGHT_BLOCKS["smollm2", 2048],
    },
]


def check_texts(
    make_llm: Callable[..., Any], folder: Path, cases: Sequence[Case], setup: dict[str, Any]
) -> None:
    options = {"max_model_len": LONGEST, "max_num_seqs": 16, "dtype": "float32"} | setup
    llm = make_llm(folder, disable_log_stats=False, **options)
    cases = [cases[-1], *cases[:-1]]  # the longest first: as it grows, others must give way
    outputs = llm.generate([{"prompt_token_ids": case.prompt} for case in cases], GREEDY)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case.tokens, f"{len(case.prompt)} tokens"
    if options.get("num_gpu_blocks_override"):
        assert read_metric(llm, "vllm:num_preemptions") > 0


def read_metric(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_smollm2(
    make_llm: Callable[..., Any], smollm2_float32: Path, setup: dict[str, Any]
) -> None:
    longest = 300 if setup["max_num_batched_tokens"] == 16 else LONGEST  # many steps take long
    cases = [case for case in read_cases("smollm2") if len(case.prompt) <= longest]
    check_texts(make_llm, smollm2_float32, cases, setup)


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
        "num_gpu_blocks_override": TIGHT_BLOCKS[model, budget] if is_tight else None,
    }
    folder = request.getfixturevalue(f"{model}_float32")
    check_texts(make_llm, folder, read_cases(model), setup)


@pytest.mark.full
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_an_engine_in_its_own_process(
    request: pytest.FixtureRequest,
    make_llm: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    folder = request.getfixturevalue(f"{model}_float32")
    check_texts(make_llm, folder, read_cases(model), {"max_num_batched_tokens": 2048})


@pytest.mark.parametrize("has_two_processes", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_longest_length_that_fits(
    make_llm: Callable[..., Any],
    smollm2_float32: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_two_processes: bool,
) -> None:
    """19 blocks of 16 tokens beside the null block, and a text that fills them."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(has_two_processes)))
    block_bytes = 30 * 16 * 3 * (64 + 64) * 4  # layers, tokens, heads, keys and values, float32
    llm = make_llm(
        smollm2_float32,
        max_model_len=-1,
        dtype="float32",
        max_num_seqs=2,
        kv_cache_memory_bytes=20 * block_bytes + 1000,
    )
    assert llm.model_config.max_model_len == 19 * 16
    [case] = [case for case in read_cases("smollm2") if len(case.prompt) == 300]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    params.max_tokens = None  # all that fit
    [output] = llm.generate({"prompt_token_ids": case.prompt}, params)
    assert list(output.outputs[0].token_ids) == case.tokens[:4]
