"""AsyncLLM on a tiny random model: what LLM gives, for many tasks at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, AsyncLLM, SamplingParams
from kvloom.engine.async_llm import Submission
from kvloom.engine.outputs import Generation
from kvloom.errors import ConfigError, RequestError, UnavailableError
from tiny_folder import greedy

PROMPT = "The quick brown fox"


@pytest.fixture(params=["lockstep", "async"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        model=str(folder),
        num_blocks=200,
        max_num_batched_tokens=64,
        has_async_stepping=request.param == "async",
    )
    yield engine
    assert engine._engine._thread.is_alive()  # else the inspection below would wait for ever
    assert engine.num_open_choices == 0
    engine._engine.inspect(lambda core: core.manager.check()).result()
    assert engine.stats.cache.num_used_blocks == 0
    engine.shutdown()


async def until_idle(engine: AsyncLLM) -> None:
    """Commands run in order: what was asked before this has happened after it."""
    while await engine.inspect(lambda core: core.has_unfinished_requests()):
        await asyncio.sleep(0.001)


def test_answers_are_those_of_the_blocking_engine(engine: AsyncLLM, llm: LLM) -> None:
    prompts = ["a", "bb", PROMPT, [1, 2, 3]]
    expected = llm.generate(prompts, greedy(logprobs=2))

    async def main() -> list[Any]:
        return await asyncio.gather(*(engine.generate(p, greedy(logprobs=2)) for p in prompts))

    for ours, theirs in zip(asyncio.run(main()), expected, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].text == theirs.outputs[0].text
        assert len(ours.outputs[0].logprobs) == 8


def test_a_chat_is_that_of_the_blocking_engine(engine: AsyncLLM, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [expected] = llm.chat(messages, greedy())
    answer = asyncio.run(engine.chat(messages, greedy()))
    assert (answer.prompt, answer.outputs[0].text) == (expected.prompt, expected.outputs[0].text)


def test_a_stream_is_the_same_text_in_pieces(engine: AsyncLLM, llm: LLM) -> None:
    params = greedy(max_tokens=30, logprobs=0)
    [whole] = llm.generate(PROMPT, params)

    async def main() -> list[Any]:
        return [delta async for delta in engine.stream(PROMPT, params)]

    deltas = asyncio.run(main())
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [t for d in deltas for t in d.token_ids] == whole.outputs[0].token_ids
    assert [e.token_id for d in deltas for e in d.logprobs] == whole.outputs[0].token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_prompts_of_one_submission_share_a_stream(engine: AsyncLLM, llm: LLM) -> None:
    prompts = ["one", "two"]
    params = greedy(n=2, temperature=1.0, seed=3)
    expected = [[c.text for c in o.outputs] for o in llm.generate(prompts, params)]

    async def main() -> dict[tuple[int, int], str]:
        prepared = [await engine.prepare(p, params) for p in prompts]
        stream = engine.submit(Submission(prepared, params))
        assert engine.num_open_choices == 4
        texts = {(p, c): "" for p in range(2) for c in range(2)}
        async for index, delta in stream:
            texts[index, delta.index] += delta.text
        return texts

    texts = asyncio.run(main())
    assert [[texts[p, c] for c in range(2)] for p in range(2)] == expected


def paused(engine: AsyncLLM) -> threading.Event:
    """Hold the engine's thread between two steps until the event is set."""
    go_on = threading.Event()
    engine._engine.inspect(lambda _: go_on.wait())
    return go_on


def test_a_cancelled_task_aborts_its_request_alone(engine: AsyncLLM) -> None:
    async def main() -> str:
        go_on = paused(engine)
        task = asyncio.create_task(engine.generate("one", greedy(max_tokens=200)))
        other = asyncio.create_task(engine.generate("two", greedy()))
        while engine.num_open_choices < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_open_choices == 1
        go_on.set()
        answer = await other
        await until_idle(engine)
        return answer.outputs[0].finish_reason or ""

    assert asyncio.run(main()) == "length"
    assert engine.stats.steps.num_scheduled_tokens < 20  # "one" never ran


def test_an_inspection_that_is_cancelled_harms_no_one(engine: AsyncLLM) -> None:
    """As when a page that follows the cache is closed: before its turn, and during it."""
    is_read, go_on = threading.Event(), threading.Event()

    async def main() -> str:
        def read(_core: object) -> None:
            is_read.set()
            go_on.wait()

        tasks = [asyncio.create_task(engine.inspect(one)) for one in (read, lambda _: None)]
        await asyncio.to_thread(is_read.wait)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        go_on.set()
        answer = asyncio.create_task(engine.generate("one", greedy()))
        while not answer.done():  # what nobody computes would never be
            assert engine._engine._thread.is_alive()
            await asyncio.sleep(0.001)
        return answer.result().outputs[0].finish_reason or ""

    assert asyncio.run(main()) == "length"


def test_a_closed_stream_is_aborted_within_two_steps(engine: AsyncLLM) -> None:
    async def main() -> int:
        params = greedy(max_tokens=200)
        stream = engine.submit(Submission([await engine.prepare("one", params)], params))
        await anext(stream)
        stream.close()
        num_steps = engine.stats.steps.num_steps
        while engine.stats.scheduler.num_running:
            await asyncio.sleep(0.001)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return engine.stats.steps.num_steps - num_steps

    assert asyncio.run(main()) <= 2


def test_bad_requests_are_refused_before_they_run(engine: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="prompt"):
            await engine.generate([], greedy())
        with pytest.raises(RequestError, match="max_tokens"):
            await engine.generate("x", SamplingParams(max_tokens=10**6))

    asyncio.run(main())


def test_a_failing_step_ends_its_requests_and_no_later_ones(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> tuple[Any, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.executor, "execute_model", broken)
            failed = await engine.generate("one", greedy())
        return failed, await engine.generate("one", greedy())

    def broken(output: Any) -> Any:
        raise OSError("device lost")

    failed, healthy = asyncio.run(main())
    assert failed.outputs[0].finish_reason == "error"
    assert "device lost" in failed.outputs[0].error
    assert healthy.outputs[0].finish_reason == "length"


def test_a_request_whose_text_fails_harms_no_other(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = Generation.push

    def broken(self: Generation, event: Any) -> Any:
        if self.output.prompt == "one":
            raise ValueError("no text")
        return push(self, event)

    async def main() -> list[Any]:
        monkeypatch.setattr(Generation, "push", broken)
        tasks = [engine.generate(p, greedy()) for p in ("one", "two")]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(engine)
        return results

    failed, healthy = asyncio.run(main())
    assert isinstance(failed, ValueError)
    assert healthy.outputs[0].finish_reason == "length"


def test_steps_that_always_fail_end_everything(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise AssertionError("a bug of ours")

    async def main() -> list[str | None]:
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.scheduler, "schedule", broken)
            outputs = await asyncio.gather(*(engine.generate(p, greedy()) for p in ("one", "two")))
        return [o.outputs[0].finish_reason for o in outputs]

    assert asyncio.run(main()) == ["error", "error"]


def test_tokenising_does_not_hold_the_event_loop(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sets the event that tokenising waits for: on the loop itself it could not."""
    ticked = threading.Event()
    encode = engine.tokenizer.encode

    def slow_encode(text: str, add_special_tokens: bool) -> list[int]:
        assert ticked.wait(timeout=30)
        return encode(text, add_special_tokens)

    async def main() -> None:
        monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)
        task = asyncio.create_task(engine.generate("one", greedy()))
        await asyncio.sleep(0)
        ticked.set()
        await task

    asyncio.run(main())


def test_long_texts_keep_no_short_one_waiting(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than `asyncio.to_thread` has threads."""
    may_end, encode = threading.Event(), engine.tokenizer.encode

    def slow_encode(text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > 100_000:
            assert may_end.wait(timeout=60)
        return encode(text, add_special_tokens)

    async def main() -> None:
        monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)
        chat = [{"role": "user", "content": "x" * 200_000}]
        long_ones = [asyncio.create_task(engine.generate("x" * 200_000)) for _ in range(40)]
        long_ones += [asyncio.create_task(engine.chat(chat)) for _ in range(40)]
        await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(engine.generate("one", greedy()), 30)
        finally:
            may_end.set()
        for refused in await asyncio.gather(*long_ones, return_exceptions=True):
            assert isinstance(refused, RequestError)

    asyncio.run(main())


def test_encoding_lets_other_threads_run(engine: AsyncLLM) -> None:
    """Were the interpreter held throughout, this thread would hardly count at all."""
    text = "many words of a long text " * 40_000
    thread = threading.Thread(target=engine.tokenizer.encode, args=(text, False))
    count = 0
    thread.start()
    while thread.is_alive():
        count += 1
    assert count > 1000


def test_shutdown_ends_what_runs_and_refuses_what_comes(folder: Path) -> None:
    engine = AsyncLLM(model=str(folder), num_blocks=200)

    async def main() -> None:
        go_on = paused(engine)
        task = asyncio.create_task(engine.generate("one", greedy(max_tokens=200)))
        while engine.num_open_choices == 0:
            await asyncio.sleep(0.001)
        shutdown = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        while not engine._is_closed:
            await asyncio.sleep(0.001)
        go_on.set()
        await shutdown
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        with pytest.raises(UnavailableError):
            await engine.generate("two", greedy())

    asyncio.run(main())
    engine.shutdown()
    with pytest.raises(UnavailableError):
        engine._engine.inspect(lambda core: core).result()


def test_options_are_those_of_llm() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM(max_num_seq=1)
