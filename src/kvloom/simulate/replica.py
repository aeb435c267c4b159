"""One engine: the real scheduler and cache manager, with a cost model in place of the runner."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvloom.errors import RequestError
from kvloom.kv.events import EventLog
from kvloom.kv.manager import CacheStats, KVCacheManager
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.scheduler import Scheduler
from kvloom.sched.stats import SchedulerStats
from kvloom.simulate.cost import CostModel
from kvloom.simulate.setup import SimulatedEngine
from kvloom.simulate.trace import TraceRequest
from kvloom.simulate.work import Chunk, StepShape
from kvloom.step import ModelRunnerOutput, SchedulerOutput


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times are seconds after the start.

    Attributes:
        index: its place in the trace.
        replica: where it ran.
        started: when the first step that computed it began; None if none did.
        first_token, finished: when the steps that made its first and its last token ended.
        num_cached_tokens: of its prompt, at its first admission.
        error: why it did not run to its end.
    """

    index: int
    replica: int
    arrival: float
    num_prompt_tokens: int
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


class LiveRequest:
    """A request between its arrival and its end: only then it has token ids."""

    __slots__ = ("output_token_ids", "record", "request")

    def __init__(self, index: int, trace_request: TraceRequest) -> None:
        params = ResolvedSamplingParams(
            seed=0, max_tokens=trace_request.num_output_tokens, temperature=0.0
        )
        self.request = Request(str(index), trace_request.prompt_token_ids(), params)
        self.output_token_ids = trace_request.output_token_ids
        num_prompt_tokens = self.request.num_prompt_tokens
        self.record = RequestRecord(index, -1, trace_request.arrival, num_prompt_tokens)

    def next_token_id(self) -> int:
        """What it generates next: made-up ids are negative, so that no prompt holds them."""
        if self.output_token_ids is None:
            return -1 - self.record.index
        return self.output_token_ids[self.request.num_output_tokens]


@dataclass(frozen=True, slots=True)
class _Step:
    output: SchedulerOutput
    sampled: list[LiveRequest]


class Replica:
    """Requests in, records out, one step at a time.

    Attributes:
        live: requests that have not ended, by id.
        num_steps, busy_seconds: steps so far, and what they took.
    """

    def __init__(
        self, index: int, engine: SimulatedEngine, cost: CostModel, events: EventLog | None = None
    ) -> None:
        self.index = index
        self.live: dict[str, LiveRequest] = {}
        self.num_steps = 0
        self.busy_seconds = 0.0
        self._steps: deque[_Step] = deque()  # scheduled and not ended
        self._last_end: float | None = None  # of a step
        self._cost = cost
        self._manager = KVCacheManager(
            engine.plan.configs[0], engine.limits, engine.config.cache.has_prefix_cache, events
        )
        max_model_len = engine.plan.max_model_len
        # Ranks wait for each other, as the engine's do.
        steps = engine.config.scheduler.resolve(engine.config.parallel.tensor_parallel_size == 1)
        self._scheduler = Scheduler(steps, self._manager, max_model_len, events)

    # --- what routing and reports ask -------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether another step has anything to do."""
        return self._scheduler.has_unfinished_requests()

    @property
    def cache_stats(self) -> CacheStats:
        """Blocks and prefix hits."""
        return self._manager.stats

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """Requests by state, and preemptions."""
        return self._scheduler.stats

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that its requests have yet to compute, outputs to come included."""
        return sum(
            live.request.num_prompt_tokens
            + live.request.sampling_params.max_tokens
            - live.request.num_computed_tokens
            for live in self.live.values()
        )

    def num_hit_tokens(self, live: LiveRequest) -> int:
        """Tokens of a request that its cache has now."""
        return self._manager.get_computed_blocks(live.request).num_tokens

    def num_held_blocks(self) -> list[int]:
        """Per group, the blocks that requests hold; one that several hold counts once."""
        held: list[set[int]] = [set() for _ in range(self._manager.num_groups)]
        for req_id, live in self.live.items():
            if live.request.status is RequestStatus.RUNNING:
                for blocks, ids in zip(held, self._manager.get_block_ids(req_id), strict=True):
                    blocks.update(ids)
        return [len(blocks - {0}) for blocks in held]  # 0 is no block

    # --- steps ------------------------------------------------------------------------------

    def add(self, live: LiveRequest) -> bool:
        """Let a request join the line; False if it can never run here."""
        live.record.replica = self.index
        try:
            self._scheduler.add_request(live.request)
        except RequestError as error:
            live.record.error = str(error)
            return False
        self.live[live.request.req_id] = live
        return True

    def begin_step(self, now: float) -> float:
        """Begin the step that is next, and schedule those that the engine would; when it ends."""
        while self._scheduler.may_schedule:
            output = self._scheduler.schedule()
            self._steps.append(_Step(output, self._find_sampled(output)))
        step = self._steps[0]
        for new in step.output.scheduled_new_reqs:
            self.live[new.req_id].record.started = now
        is_after_idle = self._last_end != now  # else this step follows the last one at once
        shape = StepShape(_chunks(step.output), len(step.sampled), is_after_idle)
        seconds = self._cost.step_seconds(shape)
        self.num_steps += 1
        self.busy_seconds += seconds
        return now + seconds

    def end_step(self, now: float) -> list[RequestRecord]:
        """Hand the step's tokens to the scheduler; the records of requests that ended."""
        self._last_end = now
        step = self._steps.popleft()
        sampled = {live.request.req_id: [live.next_token_id()] for live in step.sampled}
        events = self._scheduler.update(step.output, ModelRunnerOutput(sampled))
        ended = []
        for event in events:
            record = self.live[event.req_id].record
            if event.new_token_ids:
                record.num_output_tokens += 1
                if record.first_token is None:
                    record.first_token = now
            if event.finish_reason is not None:
                record.finished, record.error = now, event.error
                request = self.live.pop(event.req_id).request
                record.num_cached_tokens = request.num_cached_tokens
                record.num_preemptions = request.num_preemptions
                ended.append(record)
        while self._steps and not self.has_work:  # it was scheduled for nobody
            self._scheduler.update(self._steps.popleft().output, ModelRunnerOutput())
        return ended

    def _find_sampled(self, output: SchedulerOutput) -> list[LiveRequest]:
        """Those that the step gives a token: all that they have before it are computed."""
        lives = [self.live[req_id] for req_id in output.num_scheduled_tokens]
        return [one for one in lives if one.request.num_computed_tokens >= one.request.num_tokens]


def _chunks(output: SchedulerOutput) -> list[Chunk]:
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    chunks = [(new.num_computed_tokens, scheduled[new.req_id]) for new in output.scheduled_new_reqs]
    computed = zip(cached.num_computed_tokens, cached.req_ids, strict=True)
    chunks += [(num_computed, scheduled[req_id]) for num_computed, req_id in computed]
    return chunks
