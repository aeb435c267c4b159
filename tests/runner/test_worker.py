"""One rank: options it resolves or refuses, and the arithmetic of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloom.cli.plan_budget import MemorySource
from kvloom.config import DeviceConfig, EngineConfig
from kvloom.dtypes import DType
from kvloom.errors import CapacityError, ConfigError, ParallelSizeError, WeightsError
from kvloom.kv.memory import CUDA_TOTAL_BYTES
from kvloom.ops.backend import DeviceMemory
from kvloom.ops.reference import ReferenceBackend
from kvloom.runner import worker as worker_module
from kvloom.runner.backends import choose_backend
from kvloom.runner.collectives import SingleRankCommunicator, make_thread_communicators
from kvloom.runner.worker import Worker


def make_worker(fakes, checkpoint=None, **options):
    config = EngineConfig.from_options({"max_num_seqs": 4, **options})
    return Worker(config, checkpoint or fakes.checkpoint(fakes.llama), SingleRankCommunicator())


def test_memory_is_the_share_of_what_was_there_less_weights_and_peak(fakes, monkeypatch):
    available = iter([100_000_000, 90_000_000])
    monkeypatch.setattr(worker_module, "read_available_host_bytes", lambda: next(available))
    worker = make_worker(fakes, memory_share=0.25)
    worker.load_model()
    budget = worker.determine_available_memory()
    values = sum(t.size for t in fakes.checkpoint(fakes.llama).tensors.values())
    assert budget.use.weights_bytes == values * 4
    assert budget.use.activation_bytes > 2048 * fakes.llama["intermediate_size"] * 4
    assert budget.kv_bytes == 25_000_000 - values * 4 - budget.use.activation_bytes


def test_ranks_of_one_host_share_its_memory(fakes, monkeypatch):
    monkeypatch.setattr(worker_module, "read_available_host_bytes", lambda: 100_000_000)
    config = EngineConfig.from_options({"tensor_parallel_size": 2})
    checkpoint = fakes.checkpoint(fakes.llama)
    for communicator in make_thread_communicators(2):
        worker = Worker(config, checkpoint, communicator)
        worker.load_model()
        budget = worker.determine_available_memory()
        use = budget.use
        assert budget.kv_bytes == 25_000_000 - use.weights_bytes - use.activation_bytes


def test_a_share_that_is_not_there_now_is_refused(fakes, monkeypatch):
    available = iter([1_000_000_000, 50_000_000])
    monkeypatch.setattr(worker_module, "read_available_host_bytes", lambda: next(available))
    worker = make_worker(fakes)
    worker.load_model()
    with pytest.raises(CapacityError, match="memory_share"):
        worker.determine_available_memory()


def say_nothing():
    raise ConfigError("this system does not tell its available memory")


def test_a_given_size_is_taken_from_a_machine_that_does_not_tell(fakes, monkeypatch):
    monkeypatch.setattr(worker_module, "read_available_host_bytes", say_nothing)
    with pytest.raises(ConfigError, match="does not tell"):
        make_worker(fakes)
    worker = make_worker(fakes, kv_cache_bytes=12_345)
    worker.load_model()
    assert worker.determine_available_memory().kv_bytes == 12_345


def test_a_given_size_that_is_not_there_now_is_refused(fakes, monkeypatch):
    monkeypatch.setattr(worker_module, "read_available_host_bytes", lambda: 100_000_000)
    worker = make_worker(fakes, kv_cache_bytes=10**15)
    worker.load_model()
    with pytest.raises(CapacityError, match=r"909\.49 TiB.*95\.37 MiB.*lower kv_cache_bytes"):
        worker.determine_available_memory()


def test_a_step_too_large_is_refused_before_it_is_measured(fakes, monkeypatch):
    """1000 seats of 300 tokens; a value as wide as the model of each is 300,000 x 32 x 4 bytes."""
    monkeypatch.setattr(worker_module, "read_available_host_bytes", lambda: 38_000_000)
    monkeypatch.setattr(
        "kvloom.runner.model_runner.measure_peak_activation_bytes", lambda *_: pytest.fail("ran")
    )
    sizes = {"max_num_seqs": 1000, "max_num_batched_tokens": 10**9}
    worker = make_worker(fakes, backend="reference", **sizes)
    worker.load_model()
    with pytest.raises(CapacityError, match="300000 tokens and 1000 requests"):
        worker.determine_available_memory()


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ((4, 2048), (4, 1200)),
        ((10**9, 2048), (2048, 2048)),
        ((10**9, 10**12), (10**9, 300 * 10**9)),
        ((64, 7), (7, 7)),
    ],
)
def test_sizes_end_where_a_step_cannot_reach(fakes, asked, limits):
    """A request of a step has 1 to 300 tokens."""
    num_seqs, num_tokens = asked
    worker = make_worker(fakes, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    found = worker._runner.limits
    assert (found.max_num_seqs, found.max_num_batched_tokens) == limits


@pytest.mark.parametrize(
    ("options", "block_size", "dtype"),
    [
        ({}, 16, DType.FLOAT32),
        ({"block_size": 64, "kv_cache_dtype": "bfloat16"}, 64, DType.BFLOAT16),
        ({"block_size": 1, "dtype": "float32"}, 1, DType.FLOAT32),
    ],
)
def test_specs_follow_the_options(fakes, options, block_size, dtype):
    specs = make_worker(fakes, **options).get_kv_cache_spec()
    assert len(specs) == fakes.llama["num_hidden_layers"]
    for spec in specs.values():
        assert (spec.block_size, spec.dtype, spec.num_kv_heads) == (block_size, dtype, 2)


def test_a_backend_that_is_not_there_is_refused(fakes):
    with pytest.raises(ConfigError, match="reference"):
        make_worker(fakes, backend="native")


def test_a_dtype_the_backend_does_not_compute_in_is_refused(fakes):
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        make_worker(fakes, dtype="bfloat16")


def test_a_wrong_parallel_size_is_refused_before_weights_are_read(fakes):
    checkpoint = fakes.checkpoint(fakes.llama)
    config = EngineConfig.from_options({"tensor_parallel_size": 3})
    with pytest.raises(ParallelSizeError, match="1, 2, 4"):
        Worker(config, checkpoint, make_thread_communicators(3)[0])
    assert checkpoint.num_reads == 0


def test_a_missing_tensor_is_named(fakes):
    checkpoint = fakes.checkpoint(fakes.llama)
    del checkpoint.tensors["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        make_worker(fakes, checkpoint).load_model()


def test_a_device_with_memory_of_its_own_gives_a_share_of_all_of_it(fakes, monkeypatch):
    """Other processes hold 10 MB of 100; weights and peak are ours, and the share is of it all."""
    memory = iter([DeviceMemory(100_000_000, 90_000_000), DeviceMemory(100_000_000, 80_000_000)])
    monkeypatch.setattr(ReferenceBackend, "read_device_memory", lambda self: next(memory))
    worker = make_worker(fakes, backend="reference", memory_share=0.9)
    worker.load_model()
    budget = worker.determine_available_memory()
    use = budget.use
    assert budget.kv_bytes == 90_000_000 - use.weights_bytes - use.activation_bytes


@pytest.mark.parametrize("options", [{}, {"memory_share": 0.75}])
def test_a_plan_counts_on_what_an_engine_takes_of_this_host(fakes, monkeypatch, options):
    for module in ("kvloom.runner.worker", "kvloom.kv.host_memory"):
        monkeypatch.setattr(f"{module}.read_available_host_bytes", lambda: 100_000_000)
    worker = make_worker(fakes, **options)
    worker.load_model()
    budget = worker.determine_available_memory()
    share = options.get("memory_share", "auto")
    assert MemorySource("cpu", share=share).budget(budget.use, 1) == budget


@pytest.mark.parametrize("options", [{}, {"memory_share": 0.75}])
def test_a_plan_counts_on_what_an_engine_takes_of_a_device(fakes, monkeypatch, options):
    """The model runs in numpy; what the engine is told is that it runs on an empty H100."""

    def choose_numpy(config, *of_model):
        return choose_backend(replace(config, device=DeviceConfig(backend="reference")), *of_model)

    memory = DeviceMemory(CUDA_TOTAL_BYTES["h100"], CUDA_TOTAL_BYTES["h100"])
    monkeypatch.setattr(worker_module, "choose_backend", choose_numpy)
    monkeypatch.setattr(ReferenceBackend, "read_device_memory", lambda self: memory)
    worker = make_worker(fakes, device="cuda", **options)
    worker.load_model()
    budget = worker.determine_available_memory()
    share = options.get("memory_share", "auto")
    assert MemorySource("h100", share=share).budget(budget.use, 1) == budget


def test_a_share_of_a_device_that_others_hold_is_refused(fakes, monkeypatch):
    memory = DeviceMemory(100_000_000, 85_000_000)
    monkeypatch.setattr(ReferenceBackend, "read_device_memory", lambda self: memory)
    worker = make_worker(fakes, backend="reference", memory_share=0.9)
    worker.load_model()
    with pytest.raises(CapacityError, match=r"memory_share to at most 0\.85"):
        worker.determine_available_memory()


def test_a_given_size_that_a_device_has_not_is_refused(fakes, monkeypatch):
    memory = DeviceMemory(10**15, 100_000_000)
    monkeypatch.setattr(ReferenceBackend, "read_device_memory", lambda self: memory)
    worker = make_worker(fakes, backend="reference", kv_cache_bytes=10**12)
    worker.load_model()
    with pytest.raises(CapacityError, match=r"931\.32 GiB.*95\.37 MiB.*lower kv_cache_bytes"):
        worker.determine_available_memory()
