"""How vLLM finds the plugin, and what the plugin refuses."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from vllm import platforms
from vllm.engine.arg_utils import EngineArgs

import kvloom.vllm_plugin
from kvloom.errors import ConfigError
from kvloom.vllm_plugin import platform

NGRAMS = {"method": "ngram", "num_speculative_tokens": 2}
OURS = "kvloom.vllm_plugin.platform.KvloomPlatform"


def test_vllm_takes_our_platform_by_itself() -> None:
    [found] = [p for p in entry_points(group="vllm.platform_plugins") if p.name == "kvloom"]
    assert found.load()() == OURS
    assert type(platforms.current_platform).__name__ == "KvloomPlatform"
    assert platforms.current_platform.is_out_of_tree()


def test_vllms_own_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert platforms.resolve_current_platform_cls_qualname() == "vllm.platforms.cpu.CpuPlatform"


@pytest.mark.parametrize("answer", ["vllm.platforms.cuda.CudaPlatform", None, RuntimeError("none")])
def test_it_gives_way_to_an_accelerator(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def detect() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(platforms.builtin_platform_plugins, "cuda", detect)
    expected = None if isinstance(answer, str) else OURS
    assert kvloom.vllm_plugin.register() == expected


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.32.0"])
def test_another_vllm_is_refused_with_the_range(monkeypatch: Any, found: str) -> None:
    monkeypatch.setattr(platform, "version", lambda name: found)
    with pytest.raises(ConfigError, match=r">=0\.32,<0\.33"):
        platform.KvloomPlatform()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"block_size": 40}, "block_size"),
        ({"dtype": "float16"}, "dtype"),
        ({"enable_lora": True}, "enable_lora"),
        ({"max_logprobs": -1}, "max_logprobs"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode"),
        ({"load_format": "dummy"}, "load_format"),
        ({"hf_overrides": {"rope_theta": 5.0}}, "hf_overrides"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"additional_config": {"num_cores": 3}}, "num_cores"),
        ({"speculative_config": NGRAMS | {"method": "ngram_gpu"}}, "speculative_config.method"),
        ({"speculative_config": NGRAMS | {"num_speculative_tokens": 65}}, "num_speculative_tokens"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    config_folder: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineArgs(
            model=str(config_folder), skip_tokenizer_init=True, max_model_len=256, **options
        ).create_engine_config()


@pytest.mark.parametrize("block_size", [None, 16, 48, 128])
def test_options_that_can_be_are_taken(config_folder: Any, block_size: int | None) -> None:
    args = EngineArgs(
        model=str(config_folder),
        skip_tokenizer_init=True,
        max_model_len=256,
        block_size=block_size,
        additional_config={"num_threads": 1},
        speculative_config=NGRAMS,
    )
    config = args.create_engine_config()
    assert config.parallel_config.worker_cls == "kvloom.vllm_plugin.worker.KvloomWorker"
    assert config.cache_config.block_size == (block_size or 16)
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
