"""One tensor-parallel rank: its part of the model, its weights, its memory and its runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom.config import AUTO, EngineConfig, resolve_block_size, resolve_memory_share
from kvloom.errors import ConfigError
from kvloom.kv.host_memory import read_available_host_bytes
from kvloom.kv.memory import (
    CudaMemory,
    HostMemory,
    MemoryBudget,
    MemoryUse,
    check_available_now,
    cpu_budget,
    cuda_budget,
    explicit_budget,
)
from kvloom.kv.spec import KVCacheConfig, KVCacheSpec
from kvloom.models.base import Model
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.backend import DeviceMemory
from kvloom.ops.base import Communicator
from kvloom.runner.backends import choose_backend
from kvloom.runner.input_batch import RunnerLimits
from kvloom.runner.model_runner import ModelRunner
from kvloom.runner.step_handle import StepHandle
from kvloom.step import ModelRunnerOutput, SchedulerOutput
from kvloom.weights.loader import RowPacking, load_weights

if TYPE_CHECKING:
    from kvloom.weights.checkpoint import Checkpoint


class Worker:
    """Holds what one rank needs, from model files to sampled tokens.

    Start-up goes in this order: `load_model`, `determine_available_memory`, `get_kv_cache_spec`,
    `initialize_kv_cache`.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, communicator: Communicator
    ) -> None:
        """Build the model without weights.

        Raises:
            ConfigError, UnsupportedModelError: before any weight is read.
        """
        self._config = config
        self._checkpoint = checkpoint
        self._num_ranks = communicator.world_size
        self._weights_bytes = 0
        self._start_bytes = _read_available_bytes(config)
        rank = TensorParallelRank(communicator.rank, communicator.world_size)
        choice = choose_backend(config, checkpoint, rank)
        self._backend = choice.backend
        self._device_memory = choice.backend.read_device_memory()
        self._weights_dtype = choice.weights_dtype
        self.model: Model = choice.model
        limits = _resolve_limits(config, self.model.max_model_len)
        self._runner = ModelRunner(self.model, self._backend, communicator, limits, choice.sampler)

    def load_model(self) -> None:
        """Read this rank's weights.

        Raises:
            WeightsError: a tensor is missing, left over or misshaped.
        """
        backend = self._backend
        pack_rows = backend.pack_rows
        row_packing = None if pack_rows is None else RowPacking(self._weights_dtype, pack_rows)
        self._weights_bytes = load_weights(self.model, self._checkpoint, backend.pack, row_packing)

    def determine_available_memory(self) -> MemoryBudget:
        """What this rank may use for KV, with the arithmetic behind it.

        Raises:
            CapacityError: the memory asked for is not there now.
        """
        if self._device_memory is not None:
            return self._divide_device_memory(self._device_memory)
        now_bytes = _read_available_bytes(self._config)
        use = MemoryUse(self._weights_bytes, self._runner.profile_run(now_bytes))
        cache = self._config.cache
        host = HostMemory(self._start_bytes or 0, now_bytes or 0, self._num_ranks)
        if cache.kv_cache_bytes is None:
            return cpu_budget(host, self._memory_share, use)
        budget = explicit_budget(cache.kv_cache_bytes, use)
        if now_bytes is not None:
            check_available_now(budget, host, "lower kv_cache_bytes or max_num_batched_tokens")
        return budget

    def _divide_device_memory(self, at_start: DeviceMemory) -> MemoryBudget:
        now = self._backend.read_device_memory()
        assert now is not None  # it told at the start
        use = MemoryUse(self._weights_bytes, self._runner.profile_run(now.free_bytes))
        cache = self._config.cache
        if cache.kv_cache_bytes is None:
            device = CudaMemory(at_start.total_bytes, at_start.total_bytes - at_start.free_bytes)
            return cuda_budget(device, self._memory_share, use)
        budget = explicit_budget(cache.kv_cache_bytes, use)
        memory = HostMemory(at_start.free_bytes, now.free_bytes)
        check_available_now(budget, memory, "lower kv_cache_bytes or max_num_batched_tokens")
        return budget

    @property
    def _memory_share(self) -> float:
        return resolve_memory_share(self._config.cache.memory_share, self._config.device.device)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The spec of every attention layer, by name."""
        return self._runner.get_kv_cache_spec()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and bind the layers to it."""
        self._runner.initialize_kv_cache(kv_cache_config)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request: the model's own limit, or the largest context bucket."""
        buckets = self._runner.limits.buckets
        longest = self.model.max_model_len
        return longest if buckets is None else min(longest, buckets.context_lens[-1])

    def warm_up(self) -> int:
        """Run every shape that a step may have; returns how many there are."""
        return self._runner.warm_up()

    @property
    def computes_meanwhile(self) -> bool:
        """Whether `execute_model` returns before it has computed."""
        return self._runner.computes_meanwhile

    def prepare_step(self, output: SchedulerOutput) -> bool:
        """Get a step ready while the one before it runs; whether it may start meanwhile."""
        return self._runner.prepare_step(output)

    def start_sampling(self, handle: StepHandle, grammar: Any | None) -> None:
        """Have a step sampled as soon as its logits are there, if that can be."""
        self._runner.start_sampling(handle, grammar)

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """Start one step's forward pass."""
        return self._runner.execute_model(output)

    def sample_tokens(self, handle: StepHandle, grammar: Any | None) -> ModelRunnerOutput:
        """Sample from a step's logits, and remember the tokens."""
        return self._runner.sample_tokens(handle, grammar)

    def append_tokens(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Remember the tokens that another rank sampled."""
        self._runner.append_tokens(sampled_token_ids)


def _resolve_limits(config: EngineConfig, model_max_len: int) -> RunnerLimits:
    """Sizes that a step can reach; what is asked beyond them costs nothing.

    The planner refuses a length beyond the model's; "auto" never ends above it.
    """
    asked = config.model.max_model_len
    max_model_len = model_max_len if asked == AUTO else min(asked, model_max_len)
    steps = config.scheduler
    block_size = resolve_block_size(config.cache.block_size, config.device.device)
    buckets = config.resolve_buckets(max_model_len)
    if buckets is not None:
        return RunnerLimits(
            block_size=block_size,
            max_model_len=min(max_model_len, buckets.context_lens[-1]),
            max_num_seqs=buckets.num_reqs[-1],
            max_num_batched_tokens=buckets.num_tokens[-1],
            buckets=buckets,
        )
    return RunnerLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        # A request of a step has one token at least, and as many as it is long at most.
        max_num_seqs=min(steps.max_num_seqs, steps.max_num_batched_tokens),
        max_num_batched_tokens=min(
            steps.max_num_batched_tokens, steps.max_num_seqs * max_model_len
        ),
    )


def _read_available_bytes(config: EngineConfig) -> int | None:
    """Not every system tells; then a given size is taken without a look at the machine.

    Nor is it looked at for another device.
    """
    if config.device.device != "cpu":
        return None
    try:
        return read_available_host_bytes()
    except ConfigError:
        if config.cache.kv_cache_bytes is None:
            raise
        return None
