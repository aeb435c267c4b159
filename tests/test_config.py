"""Options: each holds what its annotation says, or is refused by name with what to give."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    resolve_block_size,
    resolve_memory_share,
)
from kvloom.errors import ConfigError

WRONG_KINDS = [
    ("model", 5, "a text"),
    ("dtype", None, "a text"),
    ("max_model_len", "long", 'an integer or "auto"'),
    ("max_model_len", 10.0, 'an integer or "auto"'),
    ("seed", "x", "an integer"),
    ("seed", True, "an integer"),
    ("block_size", True, 'an integer or "auto"'),
    ("kv_cache_dtype", 5, "a text"),
    ("memory_share", "x", 'a number or "auto"'),
    ("memory_share", True, 'a number or "auto"'),
    ("kv_cache_bytes", "1GiB", "an integer or None"),
    ("num_blocks", "x", "an integer or None"),
    ("num_blocks", 10.5, "an integer or None"),
    ("has_prefix_cache", "no", "True or False"),
    ("has_prefix_cache", 1, "True or False"),
    ("max_num_seqs", 1.5, "an integer"),
    ("max_num_batched_tokens", None, "an integer"),
    ("max_num_bypasses", "x", "an integer"),
    ("num_draft_tokens", 2.0, "an integer"),
    ("min_ngram_tokens", None, "an integer"),
    ("max_ngram_tokens", "x", "an integer"),
    ("tensor_parallel_size", "2", "an integer"),
    ("tensor_parallel_size", 2.0, "an integer"),
    ("device", None, "a text"),
    ("backend", 1, "a text"),
    ("num_threads", [1], 'an integer or "auto"'),
]


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG_KINDS)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name, value, wanted):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options({name: value})
    assert str(error.value) == f"{name} is {value!r}; give {wanted}"


OUT_OF_RANGE = [
    ("model", ""),
    ("max_model_len", 1),
    ("seed", -1),
    ("seed", 2**63),
    ("block_size", 24),
    ("block_size", 512),
    ("memory_share", 0),
    ("memory_share", float("nan")),
    ("kv_cache_bytes", 0),
    ("num_blocks", 1),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", -1),
    ("max_num_bypasses", -1),
    ("num_draft_tokens", -1),
    ("num_draft_tokens", 65),
    ("min_ngram_tokens", 0),
    ("max_ngram_tokens", 1),
    ("tensor_parallel_size", 0),
    ("num_threads", 0),
    ("num_threads", 1025),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_options({name: value})


def test_values_of_each_kind_are_taken():
    options = {"max_model_len": 2, "memory_share": 1, "block_size": "auto", "num_blocks": None}
    config = EngineConfig.from_options(options)
    assert config.model == ModelConfig(max_model_len=2)
    assert config.cache == CacheConfig(memory_share=1.0)


def test_a_path_is_a_model():
    assert EngineConfig.from_options({"model": Path("a/b")}).model.model == "a/b"


def test_a_part_of_the_wrong_kind_is_refused():
    with pytest.raises(ConfigError, match=r"cache is .*; give a CacheConfig"):
        EngineConfig(cache=SchedulerConfig())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("blocksize", "block_size"),
        ("tp", "tensor_parallel_size"),
        ("gpu_memory_utilization", "memory_share"),
        ("enable_prefix_caching", "has_prefix_cache"),
    ],
)
def test_an_unknown_option_names_the_one_meant(name, meant):
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; did you mean '{meant}'"):
        EngineConfig.from_options({name: 1})


def test_an_option_like_none_lists_all():
    with pytest.raises(ConfigError, match=r"known options: model, .*num_threads"):
        EngineConfig.from_options({"zzz": 1})


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_other_devices_are_torch_s(backend: str) -> None:
    for device in ("cuda", "neuron"):
        with pytest.raises(ConfigError, match=f"computes on the CPU, not on {device}"):
            DeviceConfig(device=device, backend=backend)
        assert DeviceConfig(device=device).backend == "auto"


def test_blocks_of_trainium_are_larger() -> None:
    sizes = [resolve_block_size("auto", device) for device in ("cpu", "cuda", "neuron", "trn2")]
    assert sizes == [16, 16, 32, 32]


def test_a_device_gives_more_of_its_memory_than_the_host() -> None:
    devices = ("cpu", "cuda", "neuron", "h100", "trn2")
    assert [resolve_memory_share("auto", device) for device in devices] == [0.5, 0.9, 0.9, 0.9, 0.9]
    assert resolve_memory_share(0.7, "cpu") == resolve_memory_share(0.7, "cuda") == 0.7
