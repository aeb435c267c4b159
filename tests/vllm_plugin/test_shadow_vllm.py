"""Under vLLM's scheduler, too, every read finds what was written for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shadow import VOCAB_SIZE, expected_text

MIN_READS = 100_000  # two million with --full
LONGEST = 600


@dataclass(frozen=True)
class Setup:
    """One of vLLM's ways to run."""

    layers: str
    num_blocks: int
    budget: int = 256
    is_async: bool = True
    has_two_processes: bool = False
    is_hybrid: bool = True  # else layers that see less keep all blocks
    is_v2: bool = False  # vLLM sends a preempted request anew
    num_drafts: int = field(default=0, repr=False)  # what repr has is the seed


SETUPS = [
    Setup("full", 70, is_v2=True),
    Setup("hybrid", 110, budget=24, is_async=False),
    Setup("hybrid", 170, has_two_processes=True),
    Setup("hybrid", 70, budget=24, is_hybrid=False),
    Setup("mixed", 140),
    Setup("mixed", 140, is_async=False, num_drafts=4),
    Setup("chunked", 80, budget=24),
]


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Sixteen prompts, many of which begin alike."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(300)] for _ in range(3)]
    prompts = []
    for _ in range(16):
        stem = rng.choice(stems)[: rng.randrange(300)]
        prompts.append(stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 80))])
    return prompts


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_no_read_finds_anything_else(
    setup: Setup,
    scale: int,
    tmp_path: Path,
    config_folder: Path,
    make_llm: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import SamplingParams

    report = tmp_path / "report.json"
    monkeypatch.setenv("SHADOW_LAYERS", setup.layers)
    monkeypatch.setenv("SHADOW_REPORT", str(report))
    if setup.is_v2:  # as vLLM chooses where Triton runs
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(setup.has_two_processes)))
    llm = make_llm(
        config_folder,
        skip_tokenizer_init=True,
        worker_cls="shadow_vllm.ShadowVllmWorker",
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=setup.budget,
        async_scheduling=setup.is_async,
        num_gpu_blocks_override=setup.num_blocks,
        disable_hybrid_kv_cache_manager=not setup.is_hybrid,
        speculative_config=(
            setup.num_drafts and {"method": "ngram", "num_speculative_tokens": setup.num_drafts}
        )
        or None,
        dtype="float32",
    )
    rng = random.Random(repr(setup))
    while True:
        prompts = make_prompts(rng)
        lengths = [rng.randrange(1, 200) for _ in prompts]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == expected_text(prompt, length)
        counts = json.loads(report.read_text())
        if counts["num_reads"] >= MIN_READS * scale:
            break
    assert counts["num_bad"] == 0
    assert counts["num_preempted"] > 0
