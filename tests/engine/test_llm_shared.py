"""One LLM used from several places at once, and what it refuses meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

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
