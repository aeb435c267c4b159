"""A step that is cut short loses its own requests, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from tiny_folder import make_tiny_folder

PROMPT = "a prompt that fills several blocks of sixteen tokens each, and some more"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(
    params=[
        (1, False, "reference"),
        (2, False, "reference"),
        (1, True, "reference"),
        (2, True, "reference"),
        (1, False, "native"),
        (1, True, "native"),
    ],
    ids=str,
)
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    num_ranks, is_async, backend = request.param
    llm = LLM(
        model=str(make_tiny_folder(tmp_path, head_dim=16)),
        num_blocks=100,
        max_num_batched_tokens=32,
        backend=backend,
        num_threads=2,
        dtype="float32",
        tensor_parallel_size=num_ranks,
        has_async_stepping=is_async,
    )
    yield llm
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


def text_of(llm: LLM) -> str:
    return llm.generate(PROMPT, PARAMS)[0].outputs[0].text


def once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], rank: int = 0
) -> list[Any]:
    """Let `act` happen within the next step of `rank`, before its forward pass.

    Returns the list of what its steps are given, to which later steps add.
    """
    worker = llm._core.executor._workers[rank]
    real = worker.execute_model
    steps: list[Any] = []

    def execute_model(output: Any) -> Any:
        steps.append(output)
        if len(steps) == 1:
            act()
        return real(output)

    monkeypatch.setattr(worker, "execute_model", execute_model)
    return steps


def fail() -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("rank", [0, -1])
def test_nothing_is_read_that_was_never_computed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The failed step had published its blocks; a later prompt must not find them."""
    other = LLM(config=llm.config)
    expected = text_of(other)
    other.shutdown()
    once(llm, monkeypatch, fail, rank)
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate(PROMPT, PARAMS)
    assert llm.stats.cache.num_used_blocks == 0
    [output] = llm.generate(PROMPT, PARAMS)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].text == expected


def test_other_streams_end_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("another", PARAMS)
    next(stream)
    once(llm, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate(PROMPT, PARAMS)
    assert [delta.finish_reason for delta in stream][-1] == "error"


def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("another", PARAMS)
    pieces = [next(stream).text]
    steps = once(llm, monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, PARAMS)
    assert len(steps) <= 2  # the one at work, and one that was scheduled beside it
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pieces += [delta.text for delta in stream]
    assert "".join(pieces) == llm.generate("another", PARAMS)[0].outputs[0].text


def test_a_second_ctrl_c_goes_through_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text_of(llm)
    llm.reset_prefix_cache()

    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    once(llm, monkeypatch, press_twice)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, PARAMS)
    assert text_of(llm) == expected


def test_a_step_that_was_started_ahead_and_given_up_harms_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling fails while the step behind it may run already; others get its blocks."""
    expected = text_of(llm)
    for _ in range(3):
        executor = llm._core.executor
        with monkeypatch.context() as patch:
            sample, calls = executor.sample_tokens, []

            def failing(*args: Any, sample: Any = sample, calls: list[Any] = calls) -> Any:
                calls.append(args)
                return fail() if len(calls) == 4 else sample(*args)

            patch.setattr(executor, "sample_tokens", failing)
            with pytest.raises(RuntimeError, match="injected"):
                llm.generate("some other prompt " * 3, PARAMS)
        llm.reset_prefix_cache()
        assert text_of(llm) == expected
