"""What an engine did since it started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloom.kv.events import EventLog
from kvloom.kv.manager import CacheStats
from kvloom.request import Request
from kvloom.sched.stats import SchedulerStats
from kvloom.step import RequestEvent, SchedulerOutput


@dataclass(slots=True)
class StepTimes:
    """Sums over all steps.

    Attributes:
        num_scheduled_tokens: tokens of requests.
        num_padded_tokens: the same with the padding that static shapes add.
        device_seconds: the part of `seconds` that the forward pass and sampling took.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def num_padding_tokens(self) -> int:
        """Tokens that were computed for nobody."""
        return self.num_padded_tokens - self.num_scheduled_tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters.

    Attributes:
        phase_seconds: start-up phases, in order.
        steps: tokens run through the model, and how long that took.
        cache: blocks, and prompt tokens found in the prefix cache.
        scheduler: requests by state, and what preemption cost.
    """

    phase_seconds: dict[str, float]
    steps: StepTimes
    cache: CacheStats
    scheduler: SchedulerStats


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step that ran to its end.

    Attributes:
        start: when it began, by `time.perf_counter`.
        seconds: how long it took; `device_seconds` of it were forward pass and sampling.
    """

    output: SchedulerOutput
    events: Sequence[RequestEvent]
    start: float
    seconds: float
    device_seconds: float


class EngineObserver(Protocol):
    """Is told what happens, by whoever drives the engine: it must be quick.

    Attributes:
        events: where the cache's events are recorded; whoever observes drains it.
    """

    @property
    def events(self) -> EventLog:
        """Filled by the pool and the scheduler."""

    def request_added(self, request: Request, arrival: float) -> None:
        """A request joined the line; it was handed in at `arrival`, by `time.perf_counter`."""

    def step_ended(self, report: StepReport) -> None:
        """A step ran to its end; its events tell who finished in it."""

    def requests_ended(self, events: Sequence[RequestEvent]) -> None:
        """Requests ended between steps: aborted, or at a stop string."""
