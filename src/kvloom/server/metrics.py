"""The server's metrics, for Prometheus. METRICS is the one table of them; the README prints it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvloom.engine.core import EngineCore
from kvloom.engine.stats import StepReport
from kvloom.kv.events import EventLog, RequestPreempted
from kvloom.kv.pool import NULL_BLOCK_ID
from kvloom.request import Request
from kvloom.server.block_tracker import BlockTracker
from kvloom.step import RequestEvent

_MAX_EVENTS = 1_000_000  # between two steps; each step takes them all
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_AGES = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
_REUSES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_FINISH_REASONS = ("stop", "length", "abort", "error")
_PREEMPTION_REASONS = ("older_request", "own_growth")
_BLOCK_STATES = ("used", "cached")
_COUNTED_ELSEWHERE = (
    "prefix_queried_tokens_total",
    "prefix_hit_tokens_total",
    "draft_tokens_total",
    "accepted_draft_tokens_total",
    "padding_tokens_total",
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table: `kvloom_` comes before `name`; `buckets` are a histogram's."""

    name: str
    kind: type[Gauge | Counter | Histogram]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()


METRICS = (
    Metric("requests_running", Gauge, "choices that hold blocks"),
    Metric("requests_waiting", Gauge, "choices that wait for blocks, preempted ones included"),
    Metric("requests_preempted", Gauge, "choices that gave their blocks back and wait again"),
    Metric(
        "kv_blocks",
        Gauge,
        "KV blocks of a group: used by requests, or cached and free to be taken",
        ("group", "state"),
    ),
    Metric("kv_blocks_free", Gauge, "KV blocks of the pool that hold nothing, for all groups"),
    Metric("prefix_queried_tokens_total", Counter, "prompt tokens looked up in the prefix cache"),
    Metric("prefix_hit_tokens_total", Counter, "prompt tokens found there"),
    Metric("prompt_tokens_total", Counter, "tokens of prompts, once per choice"),
    Metric("generated_tokens_total", Counter, "tokens generated"),
    Metric("draft_tokens_total", Counter, "drafts that were computed"),
    Metric("accepted_draft_tokens_total", Counter, "drafts that became tokens"),
    Metric("padding_tokens_total", Counter, "tokens that static shapes added to steps"),
    Metric("requests_finished_total", Counter, "choices that ended", ("reason",)),
    Metric(
        "preemptions_total",
        Counter,
        "running choices that gave way: to an older one, or for lack of blocks of their own",
        ("reason",),
    ),
    Metric(
        "time_to_first_token_seconds", Histogram, "from submission to the first token", (), _LONG
    ),
    Metric(
        "time_per_output_token_seconds",
        Histogram,
        "mean time between the tokens of a choice after its first",
        (),
        _SHORT,
    ),
    Metric("queue_seconds", Histogram, "from submission to the first step", (), _LONG),
    Metric("step_host_seconds", Histogram, "part of a step for scheduling", (), _SHORT),
    Metric(
        "step_device_seconds", Histogram, "part of a step for forward pass and sampling", (), _SHORT
    ),
    Metric("block_lifetime_seconds", Histogram, "from a full block to its eviction", (), _AGES),
    Metric("block_reuses", Histogram, "prefix hits of a block until its eviction", (), _REUSES),
)


@dataclass(slots=True)
class _Clock:
    """A request and when things happened to it, by `time.perf_counter`."""

    request: Request
    arrival: float
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0


class EngineMetrics:
    """Observes an engine; `text` is what Prometheus reads.

    Attributes:
        events: the cache's events since the last step.
        tracker: the cached blocks.
    """

    def __init__(self) -> None:
        self.events = EventLog(_MAX_EVENTS)
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {m.name: _make(m, self._registry) for m in METRICS}
        self.tracker = BlockTracker(self._block_evicted)
        self._clocks: dict[str, _Clock] = {}
        self._preempted: set[str] = set()
        self._num_told = dict.fromkeys(_COUNTED_ELSEWHERE, 0)
        for reason in _FINISH_REASONS:
            self._metrics["requests_finished_total"].labels(reason)
        for reason in _PREEMPTION_REASONS:
            self._metrics["preemptions_total"].labels(reason)
        self._set_groups((16,))

    def attach(self, core: EngineCore) -> None:
        """The engine is there, and with it the groups of its cache."""
        groups = core.plan.configs[0].kv_cache_groups
        self._set_groups([group.kv_cache_spec.block_size for group in groups])

    @property
    def requests(self) -> list[Request]:
        """All that are not finished; to be read between steps."""
        return [clock.request for clock in self._clocks.values()]

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def read_engine(self, core: EngineCore) -> None:
        """Set what is counted elsewhere; between steps, on the engine's thread."""
        self.catch_up(time.perf_counter())
        scheduler, cache = core.scheduler.stats, core.manager.stats
        self._metrics["requests_running"].set(scheduler.num_running)
        self._metrics["requests_waiting"].set(scheduler.num_waiting)
        self._metrics["requests_preempted"].set(len(self._preempted))
        self._count_up("prefix_queried_tokens_total", cache.num_queried_tokens)
        self._count_up("prefix_hit_tokens_total", cache.num_hit_tokens)
        self._count_up("draft_tokens_total", scheduler.num_draft_tokens)
        self._count_up("accepted_draft_tokens_total", scheduler.num_accepted_tokens)
        self._count_up("padding_tokens_total", core.stats.steps.num_padding_tokens)
        used: list[set[int]] = [set() for _ in self.tracker.group_block_sizes]
        for tables in block_tables(core, self._clocks).values():
            for held, table in zip(used, tables, strict=True):
                held.update(table)
                held.discard(NULL_BLOCK_ID)
        num_cached = [0] * len(self.tracker.group_block_sizes)
        for block_id, block in self.tracker.cached.items():
            num_cached[block.group] += block_id not in used[block.group]
        for group, num in enumerate(num_cached):
            self._metrics["kv_blocks"].labels(str(group), "used").set(len(used[group]))
            self._metrics["kv_blocks"].labels(str(group), "cached").set(num)
        num_free = cache.num_usable_blocks - cache.num_used_blocks - sum(num_cached)
        self._metrics["kv_blocks_free"].set(num_free)

    def catch_up(self, now: float) -> None:
        """Take over what the pool and the scheduler recorded, also between steps."""
        log = self.events.drain()
        self.tracker.take_events(log, now)
        for event in log:
            if isinstance(event, RequestPreempted):
                is_own = event.needed_by == event.req_id
                reason = "own_growth" if is_own else "older_request"
                self._metrics["preemptions_total"].labels(reason).inc()
                self._preempted.add(event.req_id)

    def request_added(self, request: Request, arrival: float) -> None:
        """See `EngineObserver`."""
        self._clocks[request.req_id] = _Clock(request, arrival)
        self._metrics["prompt_tokens_total"].inc(request.num_prompt_tokens)

    def step_ended(self, report: StepReport) -> None:
        """See `EngineObserver`."""
        now = report.start + report.seconds
        self.catch_up(now)
        self.tracker.count_hits(report.output)
        self._note_resumed(report)
        self._metrics["step_host_seconds"].observe(report.seconds - report.device_seconds)
        self._metrics["step_device_seconds"].observe(report.device_seconds)
        for new in report.output.scheduled_new_reqs:
            clock = self._clocks.get(new.req_id)
            if clock is not None:
                self._metrics["queue_seconds"].observe(report.start - clock.arrival)
        for event in report.events:
            self._note_tokens(event, now)
        self.requests_ended([e for e in report.events if e.finish_reason is not None])

    def requests_ended(self, events: Sequence[RequestEvent]) -> None:
        """See `EngineObserver`."""
        for event in events:
            self._preempted.discard(event.req_id)
            self._metrics["requests_finished_total"].labels(event.finish_reason).inc()
            clock = self._clocks.pop(event.req_id, None)
            if clock is not None and clock.first_token is not None and clock.num_tokens > 1:
                seconds = (clock.last_token - clock.first_token) / (clock.num_tokens - 1)
                self._metrics["time_per_output_token_seconds"].observe(seconds)

    def _note_tokens(self, event: RequestEvent, now: float) -> None:
        clock = self._clocks.get(event.req_id)
        if clock is None or not event.new_token_ids:
            return
        if clock.first_token is None:
            clock.first_token = now
            self._metrics["time_to_first_token_seconds"].observe(now - clock.arrival)
        clock.last_token = now
        clock.num_tokens += len(event.new_token_ids)
        self._metrics["generated_tokens_total"].inc(len(event.new_token_ids))

    def _note_resumed(self, report: StepReport) -> None:
        cached = report.output.scheduled_cached_reqs
        for req_id, is_resumed in zip(cached.req_ids, cached.resumed_from_preemption, strict=True):
            if is_resumed:
                self._preempted.discard(req_id)

    def _block_evicted(self, seconds: float, num_reuses: int) -> None:
        self._metrics["block_lifetime_seconds"].observe(seconds)
        self._metrics["block_reuses"].observe(num_reuses)

    def _count_up(self, name: str, total: int) -> None:
        self._metrics[name].inc(total - self._num_told[name])
        self._num_told[name] = total

    def _set_groups(self, block_sizes: Sequence[int]) -> None:
        self.tracker.group_block_sizes = block_sizes
        for group in range(len(block_sizes)):
            for state in _BLOCK_STATES:
                self._metrics["kv_blocks"].labels(str(group), state)


def block_tables(core: EngineCore, req_ids: Iterable[str]) -> dict[str, tuple[list[int], ...]]:
    """The block ids per group of the requests that hold any."""
    tables = {}
    for req_id in req_ids:
        with suppress(KeyError):
            tables[req_id] = core.manager.get_block_ids(req_id)
    return tables


def _make(metric: Metric, registry: CollectorRegistry) -> Gauge | Counter | Histogram:
    name = f"kvloom_{metric.name}"
    if metric.kind is Histogram:
        return Histogram(
            name, metric.meaning, metric.labels, registry=registry, buckets=metric.buckets
        )
    return metric.kind(name, metric.meaning, metric.labels, registry=registry)
