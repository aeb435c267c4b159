"""A recorded hour of conversations through the real engine, on a tiny model: nothing is lost.

The sizes are those of the Azure Public Dataset (LLM inference, 2023; CC BY 4.0).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from kvloom import LLM, SamplingParams
from tiny_folder import make_tiny_folder

EXCERPT = Path(__file__).parents[1] / "data" / "azure_conversation_100.csv"
WHOLE = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"
SCALE = 16  # a prompt, and an answer, has so many times fewer tokens than were recorded


def read_sizes(path: Path, num_requests: int) -> list[tuple[int, int]]:
    """Tokens of prompt and output of the first requests, scaled down."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [row for row, _ in zip(csv.DictReader(lines), range(num_requests), strict=False)]
    return [
        (max(1, int(row["ContextTokens"]) // SCALE), max(1, int(row["GeneratedTokens"]) // SCALE))
        for row in rows
    ]


@pytest.mark.parametrize("is_async", [False, True], ids=["lockstep", "async"])
@pytest.mark.parametrize(
    ("path", "num_requests"),
    [
        pytest.param(EXCERPT, 100, id="100"),
        pytest.param(WHOLE, 2000, id="2000", marks=pytest.mark.full),
    ],
)
def test_a_trace_runs_to_its_end(
    tmp_path: Path, path: Path, num_requests: int, is_async: bool
) -> None:
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    sizes = read_sizes(path, num_requests)
    assert len(sizes) == num_requests
    max_model_len = max(map(sum, sizes)) + 1
    llm = LLM(
        model=str(make_tiny_folder(tmp_path, max_position_embeddings=1024)),
        max_model_len=max_model_len,
        num_blocks=2 + -(-max_model_len // 16) + 8,  # the longest one fits, and a little more
        max_num_batched_tokens=256,
        has_async_stepping=is_async,
        num_threads=1,
    )
    manager, step, num_steps = llm._core.manager, llm._core.step, 0

    def checked_step():
        nonlocal num_steps
        num_steps += 1
        events = step()
        if num_steps % 10 == 0:
            manager.check()
        return events

    llm._core.step = checked_step
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, num_prompt).tolist() for num_prompt, _ in sizes]
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        for _, num_output in sizes
    ]
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in sizes]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    assert llm.stats.scheduler.num_preemptions > 0
    manager.check()
    stats = llm.stats.cache
    assert stats.num_used_blocks == 0
    # Every block can be had again: the pool was full once, and is empty now.
    assert stats.num_peak_blocks > 0.8 * stats.num_usable_blocks
    llm.reset_prefix_cache()
    manager.check()
    assert manager._pool.num_free_blocks == stats.num_usable_blocks
    llm.shutdown()
