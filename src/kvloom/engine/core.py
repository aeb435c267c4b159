"""EngineCore: plan, initialise, then the step loop. Only here are all parts wired together."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvloom.config import EngineConfig
from kvloom.engine.device import Device, DeviceResult
from kvloom.engine.stats import EngineObserver, EngineStats, StepReport, StepTimes
from kvloom.errors import CapacityError
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import KVCachePlan, PlanRequest, plan_kv_cache
from kvloom.kv.spec import KVLimits
from kvloom.request import Request, RequestStatus
from kvloom.runner.executor import InProcessExecutor
from kvloom.sampling.structured import GrammarStates
from kvloom.sched.drafts import make_speculation
from kvloom.sched.scheduler import Scheduler
from kvloom.step import RequestEvent, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvloom.tokenizer import Tokenizer
    from kvloom.weights.checkpoint import Checkpoint

# Whoever drives the engine can ask something of it so often while all requests wait for grammars.
_MAX_GRAMMAR_WAIT_SECONDS = 0.02

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step from its schedule to its update; `start` is when that was, by `time.perf_counter`."""

    output: SchedulerOutput
    start: float
    wait: Callable[[], DeviceResult]


class EngineCore:
    """Runs requests on one model until they finish.

    Start-up is the first two integration points: every worker answers its memory and its layers'
    specs, the planner turns them into one config per worker, workers allocate and bind. Each
    `step` is the other two. With asynchronous stepping, one step is scheduled ahead.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        observer: EngineObserver | None = None,
    ) -> None:
        """Load the model, plan the cache and allocate it; `observer` is told what happens then.

        `tokenizer` is for structured outputs alone: token ids go in and out.

        Raises:
            ConfigError, ModelError, CapacityError: with the remedy.
        """
        self.config = config
        self._phase_seconds: dict[str, float] = {}
        self._steps = StepTimes()
        with self._phase("load weights"):
            self.executor = InProcessExecutor(config, checkpoint)
        with self._phase("plan KV cache"):
            self.plan = self._plan_kv_cache()
        with self._phase("allocate KV cache"):
            self.executor.initialize_kv_cache(self.plan.configs)
        if config.shapes.is_static(config.device.device):
            with self._phase("warm up"):
                logger.info("static shapes: ran each of %d once", self.executor.warm_up())
        self.max_model_len = self.plan.max_model_len
        limits = KVLimits(self.max_model_len, config.scheduler.max_num_batched_tokens)
        self._observer = observer
        log = None if observer is None else observer.events
        self.manager = KVCacheManager(
            self.plan.configs[0], limits, has_prefix_cache=config.cache.has_prefix_cache, events=log
        )
        self._grammars = GrammarStates(tokenizer, self.executor.vocab_size)
        speculation = make_speculation(config.speculative, self.max_model_len)
        steps = config.scheduler.resolve(self.executor.computes_meanwhile)
        self.scheduler = Scheduler(
            steps, self.manager, self.max_model_len, log, speculation, self._grammars
        )
        self._device = Device(self.executor, self._grammars.token_mask)
        self._in_flight: deque[_StepInFlight] = deque()
        # A step that runs when Python ends would keep what it holds beyond its modules.
        weakref.finalize(self, self._in_flight.clear)
        self._last_end = 0.0  # of a step

    def _plan_kv_cache(self) -> KVCachePlan:
        specs = self.executor.get_kv_cache_specs()
        memory = self.executor.determine_available_memory()
        request = PlanRequest(
            max_model_len=self.config.model.max_model_len,
            model_max_len=self.executor.model_max_len,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            num_blocks=self.config.cache.num_blocks,
            budgets=self.executor.memory_budgets,
            remedy="give the cache more memory with memory_share or kv_cache_bytes, or lower "
            "max_num_batched_tokens or max_num_seqs",
        )
        plan = plan_kv_cache(request, specs, memory)
        logger.info(
            "KV cache: %d blocks, max_model_len %d, %.2f requests of that length",
            plan.num_blocks,
            plan.max_model_len,
            plan.max_concurrency,
        )
        return plan

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a part of the start-up; memory that runs out in it is a kvloom error."""
        start = time.perf_counter()
        try:
            yield
        except MemoryError as error:
            reason = f" ({error})" if str(error) else ""
            raise CapacityError(
                f"this process ran out of memory at: {name}{reason}; lower kv_cache_bytes, "
                "memory_share, max_num_batched_tokens or max_num_seqs, use a smaller model, or "
                "raise the limit of the process (ulimit -v)"
            ) from error
        self._phase_seconds[name] = time.perf_counter() - start

    def prepare_grammars(self) -> None:
        """Make now what the first request with a grammar would have everybody wait for."""
        self._grammars.prepare()

    def add_requests(self, requests: Iterable[Request], arrival: float | None = None) -> None:
        """Queue requests that were handed in at `arrival`, by `time.perf_counter`, or now."""
        for request in requests:
            self.scheduler.add_request(request)
            if self._observer is not None:
                now = time.perf_counter() if arrival is None else arrival
                self._observer.request_added(request, now)

    def abort(self, req_ids: Iterable[str]) -> None:
        """End requests in any state; unknown and finished ids are no error."""
        self._finish(req_ids, RequestStatus.FINISHED_ABORT)

    def stop(self, req_id: str, stop_string: str) -> None:
        """End a request whose text reached a stop string."""
        self._finish([req_id], RequestStatus.FINISHED_STOP, stop_string)

    def _finish(
        self, req_ids: Iterable[str], status: RequestStatus, stop_string: str | None = None
    ) -> None:
        events = self.scheduler.finish_requests(req_ids, status, stop_string)
        if events and self._observer is not None:
            self._observer.requests_ended(events)
        if not self.scheduler.has_unfinished_requests():
            try:
                self._end_steps()
            except Exception:  # nobody is left who could hear of it
                logger.exception("a step failed whose requests have ended")

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[RequestEvent]:
        """Schedule, run and update once.

        Whatever cuts the step short ends its requests with "error", so that nothing is read that
        was never computed, and is raised again.
        """
        if self.scheduler.waits_for_grammars:
            self._grammars.wait(_MAX_GRAMMAR_WAIT_SECONDS)
        while self.scheduler.may_schedule:
            start = time.perf_counter()
            output = self.scheduler.schedule()
            self._in_flight.append(_StepInFlight(output, start, self._device.begin(output)))
        events = self._end_step()
        if not self.scheduler.has_unfinished_requests():
            events += self._end_steps()
        return events

    def _end_steps(self) -> list[RequestEvent]:
        """End all steps in flight: what ended requests hold is free then."""
        events: list[RequestEvent] = []
        while self._in_flight:
            events += self._end_step()
        return events

    def _end_step(self) -> list[RequestEvent]:
        step = self._in_flight[0]
        try:
            result = step.wait()
        except BaseException as error:
            self._device.cancel()
            while self._in_flight:
                output = self._in_flight.popleft().output
                self.scheduler.fail_step(output, f"the step failed: {error!r}")
            raise
        self._in_flight.popleft()
        events = self.scheduler.update(step.output, result.output)
        self._report(step, events, result)
        return events

    def _report(
        self, step: _StepInFlight, events: list[RequestEvent], result: DeviceResult
    ) -> None:
        """Count a step; one that was scheduled ahead begins when the one before it ends."""
        start, end = max(step.start, self._last_end), time.perf_counter()
        self._last_end = end
        self._steps.num_steps += 1
        self._steps.num_scheduled_tokens += step.output.total_num_scheduled_tokens
        self._steps.num_padded_tokens += result.num_padded_tokens
        self._steps.seconds += end - start
        self._steps.device_seconds += result.seconds
        if self._observer is not None:
            report = StepReport(step.output, events, start, end - start, result.seconds)
            self._observer.step_ended(report)

    @property
    def stats(self) -> EngineStats:
        """All counters."""
        return EngineStats(
            dict(self._phase_seconds),
            replace(self._steps),
            self.manager.stats,
            self.scheduler.stats,
        )

    def shutdown(self) -> None:
        """Stop the threads."""
        self._grammars.shutdown()
        self.executor.shutdown()
