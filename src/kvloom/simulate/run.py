"""The simulation: a clock, requests that arrive, and replicas whose steps end."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvloom.simulate.cost import CostModel
from kvloom.simulate.replica import LiveRequest, Replica, RequestRecord
from kvloom.simulate.routing import Route
from kvloom.simulate.setup import SimulatedEngine
from kvloom.simulate.trace import TraceRequest

MAX_SAMPLES = 400
Progress = Callable[[int], None]
"""Told how many requests have ended."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of all replicas together at one moment.

    Attributes:
        used_shares: per group, the mean share of a replica's usable blocks that requests hold.
    """

    seconds: float
    num_running: int
    num_waiting: int
    used_shares: list[float]


@dataclass(slots=True)
class Timeline:
    """Samples at even distances. When there are too many, every second one is dropped."""

    interval: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def next_seconds(self) -> float:
        """When the next sample is due."""
        return len(self.samples) * self.interval

    def add(self, sample: Sample) -> None:
        """Take a sample of the moment that was due."""
        self.samples.append(sample)
        if len(self.samples) == MAX_SAMPLES:
            self.samples = self.samples[::2]
            self.interval *= 2


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Everything that was observed.

    Attributes:
        records: one per request, in the trace's order.
        host_seconds: what the simulation itself took.
    """

    records: list[RequestRecord]
    replicas: list[Replica]
    samples: list[Sample]
    host_seconds: float


class Simulation:
    """Replicas of one engine that serve a trace. The same input gives the same result."""

    def __init__(
        self, engine: SimulatedEngine, cost: CostModel, num_replicas: int, route: Route
    ) -> None:
        self.replicas = [Replica(index, engine, cost) for index in range(num_replicas)]
        self._route = route
        self._ends: list[tuple[float, int]] = []  # (when a step ends, its replica)
        self._records: list[RequestRecord] = []
        self._num_ended = 0

    def run(
        self, requests: Sequence[TraceRequest], progress: Progress = lambda _: None
    ) -> SimulationResult:
        """Serve all requests, which are in order of arrival.

        At one moment, steps end first, then requests arrive, then steps begin.
        """
        start = time.perf_counter()
        last = requests[-1].arrival if requests else 0.0
        timeline = Timeline(max(last / (MAX_SAMPLES // 2), 0.1))
        num_arrived = 0
        while num_arrived < len(requests) or self._ends:
            now = min(
                requests[num_arrived].arrival if num_arrived < len(requests) else float("inf"),
                self._ends[0][0] if self._ends else float("inf"),
            )
            while timeline.next_seconds < now:
                timeline.add(self._sample(timeline.next_seconds))
            touched = self._end_steps(now)
            while num_arrived < len(requests) and requests[num_arrived].arrival <= now:
                touched |= self._admit(num_arrived, requests[num_arrived])
                num_arrived += 1
            self._begin_steps(touched, now)
            progress(self._num_ended)
        seconds = time.perf_counter() - start
        return SimulationResult(self._records, self.replicas, timeline.samples, seconds)

    def _end_steps(self, now: float) -> set[int]:
        """Replicas whose steps end now."""
        ended = set()
        while self._ends and self._ends[0][0] <= now:
            _, index = heapq.heappop(self._ends)
            self._num_ended += len(self.replicas[index].end_step(now))
            ended.add(index)
        return ended

    def _admit(self, index: int, request: TraceRequest) -> set[int]:
        """The replica that takes a request, if it is idle; none if the request is refused."""
        live = LiveRequest(index, request)
        self._records.append(live.record)
        replica = self._route(live, self.replicas)
        if not replica.add(live):
            self._num_ended += 1
            return set()
        is_busy = any(other == replica.index for _, other in self._ends)
        return set() if is_busy else {replica.index}

    def _begin_steps(self, touched: set[int], now: float) -> None:
        for index in sorted(touched):
            if self.replicas[index].has_work:
                heapq.heappush(self._ends, (self.replicas[index].begin_step(now), index))

    def _sample(self, seconds: float) -> Sample:
        replicas = self.replicas
        stats = [replica.scheduler_stats for replica in replicas]
        usable = replicas[0].cache_stats.num_usable_blocks * len(replicas)
        held = zip(*(replica.num_held_blocks() for replica in replicas), strict=True)
        return Sample(
            seconds,
            sum(s.num_running for s in stats),
            sum(s.num_waiting for s in stats),
            [sum(blocks) / usable for blocks in held],
        )
