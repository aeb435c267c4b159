"""One tensor-parallel rank: its part of the model, its weights, its memory and its runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom.config import AUTO, EngineConfig, resolve_block_size
from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.kv.host_memory import read_available_host_bytes
from kvloom.kv.memory import HostMemory, MemoryBudget, MemoryUse, cpu_budget, explicit_budget
from kvloom.kv.spec import KVCacheConfig, KVCacheSpec
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import Backend, Communicator
from kvloom.ops.reference import ReferenceBackend
from kvloom.runner.input_batch import RunnerLimits
from kvloom.runner.model_runner import ModelRunner, StepHandle
from kvloom.step import ModelRunnerOutput, SchedulerOutput
from kvloom.weights.loader import load_weights

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
        self._backend = _make_backend(config.device.backend)
        self._num_ranks = communicator.world_size
        self._weights_bytes = 0
        # A given size needs no look at the machine, which not every system allows.
        self._has_given_size = config.cache.kv_cache_bytes is not None
        self._start_bytes = 0 if self._has_given_size else read_available_host_bytes()
        rank = TensorParallelRank(communicator.rank, communicator.world_size)
        dtypes = _resolve_dtypes(config, self._backend)
        self.model: Model = build_model(checkpoint.config, rank, dtypes)
        limits = _resolve_limits(config, self.model.max_model_len)
        self._runner = ModelRunner(self.model, self._backend, communicator, limits)

    def load_model(self) -> None:
        """Read this rank's weights.

        Raises:
            WeightsError: a tensor is missing, left over or misshaped.
        """
        self._weights_bytes = load_weights(self.model, self._checkpoint, self._backend.pack)

    def determine_available_memory(self) -> MemoryBudget:
        """What this rank may use for KV, with the arithmetic behind it; runs the model once.

        Raises:
            CapacityError: the share of memory asked for is not there now.
        """
        use = MemoryUse(self._weights_bytes, self._runner.profile_run())
        cache = self._config.cache
        if cache.kv_cache_bytes is not None:
            return explicit_budget(cache.kv_cache_bytes, use)
        host = HostMemory(self._start_bytes, read_available_host_bytes(), self._num_ranks)
        return cpu_budget(host, cache.memory_share, use)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The spec of every attention layer, by name."""
        return self._runner.get_kv_cache_spec()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and bind the layers to it."""
        self._runner.initialize_kv_cache(kv_cache_config)

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """Start one step's forward pass."""
        return self._runner.execute_model(output)

    def sample_tokens(self, handle: StepHandle, grammar: Any | None) -> ModelRunnerOutput:
        """Sample from a step's logits, and remember the tokens."""
        return self._runner.sample_tokens(handle, grammar)

    def append_tokens(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Remember the tokens that another rank sampled."""
        self._runner.append_tokens(sampled_token_ids)


def _make_backend(name: str) -> Backend:
    if name == "native":
        raise ConfigError("the native backend is not part of this build; use backend reference")
    return ReferenceBackend()


def _resolve_dtypes(config: EngineConfig, backend: Backend) -> ModelDTypes:
    computed = backend.default_dtype
    if config.model.dtype != AUTO and DType.parse(config.model.dtype) is not computed:
        raise ConfigError(
            f"the {backend.name} backend computes in {computed.value}, not {config.model.dtype}; "
            "leave dtype out, or set kv_cache_dtype to store less"
        )
    stored = config.cache.kv_cache_dtype
    return ModelDTypes(weights=computed, kv=computed if stored == AUTO else DType.parse(stored))


def _resolve_limits(config: EngineConfig, model_max_len: int) -> RunnerLimits:
    """The planner refuses a length beyond the model's; "auto" never ends above it."""
    asked = config.model.max_model_len
    return RunnerLimits(
        block_size=resolve_block_size(config.cache.block_size, config.device.device),
        max_model_len=model_max_len if asked == AUTO else min(asked, model_max_len),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
