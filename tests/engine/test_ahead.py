"""Which engines schedule a step while another runs, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams, StructuredOutputs
from tiny_folder import greedy, make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"), head_dim=16)


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(model=str(folder), num_blocks=100, dtype="float32", **options)


def watch_steps(llm: LLM) -> list[tuple[int, int]]:
    """For each step that ends: how many were scheduled by then, and how many requests it had."""
    core, seen, num_scheduled = llm._core, [], 0
    schedule, update = core.scheduler.schedule, core.scheduler.update

    def counting_schedule() -> Any:
        nonlocal num_scheduled
        num_scheduled += 1
        return schedule()

    def noting_update(output: Any, result: Any) -> Any:
        seen.append((num_scheduled, len(output.num_scheduled_tokens)))
        return update(output, result)

    core.scheduler.schedule = counting_schedule  # type: ignore[method-assign]  # watched
    core.scheduler.update = noting_update  # type: ignore[method-assign]  # watched
    return seen


@pytest.mark.parametrize(
    ("options", "is_ahead"),
    [
        ({"backend": "native"}, True),
        ({"backend": "native", "has_async_stepping": False}, False),
        ({"backend": "native", "tensor_parallel_size": 2}, False),
        ({"backend": "native", "num_draft_tokens": 2}, False),
        ({"backend": "reference"}, False),
        ({"backend": "reference", "has_async_stepping": True}, True),
    ],
    ids=str,
)
def test_steps_are_scheduled_ahead_where_it_gains(
    folder: Path, options: dict[str, Any], is_ahead: bool
) -> None:
    """Where a step is computed within a call, its tokens would only come behind the next one."""
    llm = make_llm(folder, **options)
    seen = watch_steps(llm)
    llm.generate([1, 2, 3], greedy(max_tokens=4))
    assert seen[0] == (2 if is_ahead else 1, 1)
    llm.shutdown()


def test_a_grammar_keeps_its_pace_beside_others(folder: Path) -> None:
    """Its requests cannot run ahead; in every other step alone they would take twice as many."""
    llm = make_llm(folder, backend="native")
    alone = SamplingParams(
        temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-d]{9}")
    )
    expected = llm.generate("x", alone)[0].outputs[0].text
    seen = watch_steps(llm)
    outputs = llm.generate(["x", [1, 2]], [alone, greedy(max_tokens=12)])
    assert outputs[0].outputs[0].text == expected
    assert [num_requests for _, num_requests in seen].count(2) >= 5
    assert len([one for one in seen if one[1]]) <= 14
    llm.shutdown()
