"""Drives one worker per tensor-parallel rank, all in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from kvloom.config import EngineConfig
from kvloom.dtypes import DType
from kvloom.kv.memory import MemoryBudget
from kvloom.kv.spec import KVCacheConfig, KVCacheSpec
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.runner.collectives import (
    CollectiveAbortedError,
    ThreadCommunicator,
    make_thread_communicators,
)
from kvloom.runner.step_handle import StepHandle
from kvloom.runner.worker import Worker
from kvloom.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from kvloom.weights.checkpoint import Checkpoint

T = TypeVar("T")


class InProcessExecutor:
    """Rank 0 runs in the calling thread, the others on a thread each.

    Attributes:
        memory_budgets: per rank, once `determine_available_memory` ran; for messages.
        model_max_len: most tokens of one request: what the model was made for, or the largest
            context that steps are padded to.
        vocab_size: token ids the model knows.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Build every rank's model, then load weights.

        Raises:
            ConfigError, ModelError: with the remedy; sizes are checked before weights are read.
        """
        num_ranks = config.parallel.tensor_parallel_size
        # One rank's model refuses a size that does not fit, before there is anything per rank.
        any_dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
        build_model(checkpoint.config, TensorParallelRank(0, num_ranks), any_dtypes)
        communicators = make_thread_communicators(num_ranks)
        self._group = [c for c in communicators if isinstance(c, ThreadCommunicator)]
        self._workers = [Worker(config, checkpoint, c) for c in communicators]
        for worker in self._workers:
            worker.load_model()
        # No thread starts before there is work for it.
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="kvloom-rank")
        self.memory_budgets: tuple[MemoryBudget, ...] = ()
        self.model_max_len = self._workers[0].max_model_len
        self.vocab_size = self._workers[0].model.vocab_size

    def determine_available_memory(self) -> list[int]:
        """Bytes each rank may use for KV.

        Raises:
            CapacityError: the share of memory asked for is not there now.
        """
        self.memory_budgets = tuple(w.determine_available_memory() for w in self._workers)
        return [budget.kv_bytes for budget in self.memory_budgets]

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Each rank's specs, by layer name."""
        return [worker.get_kv_cache_spec() for worker in self._workers]

    def initialize_kv_cache(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Allocate every rank's KV cache; one config per rank."""
        for worker, config in zip(self._workers, kv_cache_configs, strict=True):
            worker.initialize_kv_cache(config)

    def warm_up(self) -> int:
        """Run every shape that a step may have on all ranks; returns how many there are."""
        return self._run(lambda worker: worker.warm_up())[0]

    @property
    def computes_meanwhile(self) -> bool:
        """Whether `execute_model` returns before it has computed."""
        return self._workers[0].computes_meanwhile

    def prepare_step(self, output: SchedulerOutput) -> bool:
        """Get a step ready while the one before it runs.

        Returns whether `execute_model` may be called before that one's `sample_tokens`.
        """
        may_start = [worker.prepare_step(output) for worker in self._workers]
        return all(may_start)

    def start_sampling(self, handle: StepHandle, grammar: Any | None = None) -> None:
        """Have a step sampled as soon as its logits are there; `sample_tokens` waits for it."""
        self._workers[0].start_sampling(handle, grammar)

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """Start one step's forward pass on all ranks; the handle is rank 0's."""
        return self._run(lambda worker: worker.execute_model(output))[0]

    def sample_tokens(self, handle: StepHandle, grammar: Any | None = None) -> ModelRunnerOutput:
        """Sample on rank 0 and tell the others; they all have the same logits."""
        first, *others = self._workers
        result = first.sample_tokens(handle, grammar)
        for worker in others:
            worker.append_tokens(result.appended_token_ids)
        return result

    def shutdown(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _run(self, work: Callable[[Worker], T]) -> list[T]:
        """Run on all ranks at once; the first error ends it for all of them."""
        futures: list[Future[T]] = []
        try:
            for worker in self._workers[1:]:
                futures.append(self._threads.submit(self._run_rank, work, worker))
            results = [self._run_rank(work, self._workers[0])]
            return results + [future.result() for future in futures]
        except BaseException as error:
            # Also when rank 0 never started: others may already wait for it in a collective.
            for communicator in self._group[:1]:
                communicator.abort()
            wait(futures)
            for communicator in self._group[:1]:
                communicator.reset()
            if isinstance(error, CollectiveAbortedError):
                raise _cause(futures) from None
            raise

    def _run_rank(self, work: Callable[[Worker], T], worker: Worker) -> T:
        try:
            return work(worker)
        except BaseException:
            # The other ranks may wait for this one in a collective.
            for communicator in self._group[:1]:
                communicator.abort()
            raise


def _cause(futures: Sequence[Future[T]]) -> BaseException:
    """The error that made the other ranks stop."""
    errors = [future.exception() for future in futures]
    return next(e for e in errors if e is not None and not isinstance(e, CollectiveAbortedError))
