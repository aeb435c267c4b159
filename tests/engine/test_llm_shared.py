"""One LLM used from several places at once, and what it refuses meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from kvloom.errors import ConfigError
from tiny_folder import make_tiny_folder, make_tokenizer

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    llm = LLM(model=str(make_tiny_folder(tmp_path)), num_blocks=200)
    yield llm
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


def test_threads_share_an_llm(llm: LLM) -> None:
    """Whoever steps, steps for all; each stream gets its own text."""
    prompts = [f"prompt number {i}" for i in range(4)]
    expected = [llm.generate(prompt, PARAMS)[0].outputs[0].text for prompt in prompts]
    texts = [""] * len(prompts)

    def read(index: int) -> None:
        texts[index] = "".join(delta.text for delta in llm.stream(prompts[index], PARAMS))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected


def test_a_prefix_cache_in_use_is_not_reset(llm: LLM) -> None:
    stream = llm.stream("something", PARAMS)
    next(stream)
    with pytest.raises(ConfigError, match="close their streams"):
        llm.reset_prefix_cache()
    stream.close()
    llm.reset_prefix_cache()


def test_stats_are_a_snapshot(llm: LLM) -> None:
    before = llm.stats
    llm.generate("something", PARAMS)
    assert before.steps.num_steps == 0
    assert llm.stats.steps.num_steps > 0


def test_bad_words_without_a_row_in_the_model_harm_nobody(tmp_path: Path) -> None:
    """A tokenizer may know more tokens than the model has rows: such a word is never drawn."""
    folder = make_tiny_folder(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["\u2603\u2603"])
    assert tokenizer.token_to_id("\u2603\u2603") == 258  # rows are 0 to 257
    tokenizer.save(str(folder / "tokenizer.json"))
    llm = LLM(model=str(folder), num_blocks=50)
    params = SamplingParams(temperature=0.0, max_tokens=5, bad_words=("\u2603\u2603",))
    [output] = llm.generate("abc", params)
    assert output.outputs[0].error is None
    llm.shutdown()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stream_that_is_collected_within_a_step_is_forgotten_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """On whichever thread that is: one that waits for another's lock would wait for ever."""
    llm = LLM(
        model=str(make_tiny_folder(tmp_path)),
        num_blocks=100,
        backend="reference",
        tensor_parallel_size=num_ranks,
    )
    expected = llm.generate("one", PARAMS)[0].outputs[0].text
    worker = llm._core.executor._workers[-1]
    execute, streams = worker.execute_model, []

    def collect(output: Any) -> Any:
        streams.clear()
        return execute(output)

    monkeypatch.setattr(worker, "execute_model", collect)
    kept = llm.stream("two", PARAMS)
    next(kept)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    dropped = llm.stream("three", long)
    next(dropped)
    streams.append(dropped)
    del dropped  # the next step of that worker has the last reference
    assert llm.generate("one", PARAMS)[0].outputs[0].text == expected
    assert "".join(delta.text for delta in kept)
    assert llm.stats.scheduler.num_running == 0
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()
