"""Schedulers over a cache of any size, of full attention unless told otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from drafting import sampled_tokens
from kvloom.config import SchedulerConfig
from kvloom.kv.events import EventLog
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import KVLimits
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.sched.drafts import DraftProposer, Speculation
from kvloom.sched.grammars import Grammars
from kvloom.sched.scheduler import Scheduler
from kvloom.step import ModelRunnerOutput, RequestEvent, SchedulerOutput
from visibility import Kind, cache_of


@dataclass
class Setup:
    """A scheduler, its manager, and a model that answers at once."""

    scheduler: Scheduler
    manager: KVCacheManager
    events: EventLog

    def add(self, req_id: str, prompt, max_tokens: int = 1, **params) -> Request:
        leader = params.pop("leader", None)
        salt, priority = params.pop("cache_salt", None), params.pop("priority", 0)
        sampling = ResolvedSamplingParams(seed=0, max_tokens=max_tokens, **params)
        request = Request(req_id, prompt, sampling, salt, priority)
        request.leader = leader
        self.scheduler.add_request(request)
        self.manager.check()
        return request

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.manager.check()
        return output

    def update(self, output: SchedulerOutput, **result) -> list[RequestEvent]:
        """Give the step's results, sampled tokens unless told otherwise."""
        if "sampled_token_ids" not in result:
            running = (
                self.scheduler._requests.get(req_id) for req_id in output.num_scheduled_tokens
            )
            drafts = output.scheduled_spec_decode_tokens
            result["sampled_token_ids"] = {
                r.req_id: sampled_tokens(r.token_ids, drafts.get(r.req_id, ()))
                for r in running
                if r is not None and r.num_computed_tokens == r.num_tokens
            }
        events = self.scheduler.update(output, ModelRunnerOutput(**result))
        self.manager.check()
        return events

    def step(self) -> tuple[SchedulerOutput, list[RequestEvent]]:
        output = self.schedule()
        return output, self.update(output)

    def run_out(self) -> list[tuple[SchedulerOutput, list[RequestEvent]]]:
        """Step until nothing is left."""
        steps = []
        while self.scheduler.has_unfinished_requests():
            steps.append(self.step())
            assert len(steps) < 1000, "the scheduler makes no progress"
        return steps

    def finish_all(self) -> list[RequestEvent]:
        """Step until nothing is left; the last event of each request."""
        events = [event for _, events in self.run_out() for event in events]
        return [event for event in events if event.finish_reason is not None]


@pytest.fixture
def setup() -> Callable[..., Setup]:
    def make(
        num_blocks: int = 1000,
        block_size: int = 4,
        max_model_len: int = 512,
        has_prefix_cache: bool = True,
        kinds: Sequence[Kind] = (),
        speculation: tuple[DraftProposer, int] | None = None,
        grammars: Grammars | None = None,
        **options,
    ) -> Setup:
        config = SchedulerConfig(**options)
        cache = cache_of(kinds or [Kind("full", block_size)], num_blocks)
        limits = KVLimits(max_model_len, config.max_num_batched_tokens)
        events = EventLog(capacity=10_000)
        manager = KVCacheManager(cache, limits, has_prefix_cache, events)
        drafts = None if speculation is None else Speculation(*speculation, max_model_len)
        scheduler = Scheduler(config, manager, max_model_len, events, drafts, grammars)
        return Setup(scheduler, manager, events)

    return make


@pytest.fixture
def fresh() -> Callable[[int], list[int]]:
    """Token ids that no earlier call gave."""
    counter = itertools.count(1000)
    return lambda num_tokens: list(itertools.islice(counter, num_tokens))
