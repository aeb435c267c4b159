"""What a simulation says: latencies, rates, and how the cache was used. Plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvloom.simulate.replica import RequestRecord
from kvloom.simulate.run import Sample, SimulationResult

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as good; None asks nothing.

    Attributes:
        first_token: most seconds until the first token.
        per_token: most seconds per token after it.
    """

    first_token: float | None = None
    per_token: float | None = None

    def are_kept(self, record: RequestRecord) -> bool:
        """Whether a request that ran to its end kept them."""
        first, per_token = time_to_first_token(record), time_per_token(record)
        return (
            first is not None
            and (self.first_token is None or first <= self.first_token)
            and (self.per_token is None or per_token is None or per_token <= self.per_token)
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of seconds over requests. Percentiles are values that occurred, by nearest rank."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None if there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered)
        p50, p90, p99 = (ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES)
        return cls(mean, p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in numbers. Rates are per second from the first arrival to the last end.

    Attributes:
        seconds: that time.
        num_failed: requests that were refused, or did not run to their end.
        queueing: arrival to the begin of the first step.
        first_token: arrival to the first token.
        per_token: seconds per token after the first; requests of one token have none.
        whole: arrival to the last token.
        goodput: requests per second that ran to their end and kept the limits.
        good_share: of all requests.
        hit_share: prompt tokens that the prefix cache had, of those asked for.
        num_lost_tokens: computed tokens that preempted requests gave up.
        peak_used_share: of usable blocks, of the replica that used most.
        mean_used_shares: per group, of the usable blocks of all replicas, over time.
        busy_share: of the replicas' time, spent in steps.
    """

    num_requests: int
    num_failed: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    requests_per_second: float
    goodput: float
    good_share: float
    queueing: Distribution | None
    first_token: Distribution | None
    per_token: Distribution | None
    whole: Distribution | None
    num_steps: int
    num_preemptions: int
    num_lost_tokens: int
    hit_share: float
    num_hit_tokens: int
    num_queried_tokens: int
    peak_used_share: float
    mean_used_shares: list[float]
    busy_share: float


def time_to_first_token(record: RequestRecord) -> float | None:
    """Seconds; None if there was no token."""
    return None if record.first_token is None else record.first_token - record.arrival


def time_per_token(record: RequestRecord) -> float | None:
    """Seconds per token after the first; None if there was none."""
    if record.finished is None or record.first_token is None or record.num_output_tokens < 2:
        return None
    return (record.finished - record.first_token) / (record.num_output_tokens - 1)


def summarise(result: SimulationResult, limits: Limits) -> Summary:
    """All numbers of a simulation."""
    records = result.records
    done = [r for r in records if r.error is None and r.finished is not None]
    begin = min((r.arrival for r in records), default=0.0)
    seconds = max((r.finished or 0.0 for r in done), default=begin) - begin
    num_good = sum(limits.are_kept(record) for record in done)
    per_second = 1 / seconds if seconds else 0.0
    cache = [replica.cache_stats for replica in result.replicas]
    scheduler = [replica.scheduler_stats for replica in result.replicas]
    num_hit = sum(stats.num_hit_tokens for stats in cache)
    num_queried = sum(stats.num_queried_tokens for stats in cache)
    busy = math.fsum(replica.busy_seconds for replica in result.replicas)
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(done),
        seconds=seconds,
        prompt_tokens_per_second=sum(r.num_prompt_tokens for r in done) * per_second,
        output_tokens_per_second=sum(r.num_output_tokens for r in done) * per_second,
        requests_per_second=len(done) * per_second,
        goodput=num_good * per_second,
        good_share=num_good / len(records) if records else 0.0,
        queueing=Distribution.of([r.started - r.arrival for r in done if r.started is not None]),
        first_token=Distribution.of([t for r in done if (t := time_to_first_token(r)) is not None]),
        per_token=Distribution.of([t for r in done if (t := time_per_token(r)) is not None]),
        whole=Distribution.of([r.finished - r.arrival for r in done if r.finished is not None]),
        num_steps=sum(replica.num_steps for replica in result.replicas),
        num_preemptions=sum(stats.num_preemptions for stats in scheduler),
        num_lost_tokens=sum(stats.num_lost_tokens for stats in scheduler),
        hit_share=num_hit / num_queried if num_queried else 0.0,
        num_hit_tokens=num_hit,
        num_queried_tokens=num_queried,
        peak_used_share=max(s.num_peak_blocks / s.num_usable_blocks for s in cache),
        mean_used_shares=_mean_used_shares(result.samples),
        busy_share=busy / (seconds * len(result.replicas)) if seconds else 0.0,
    )


def _mean_used_shares(samples: Sequence[Sample]) -> list[float]:
    groups = zip(*(sample.used_shares for sample in samples), strict=True)
    return [math.fsum(shares) / len(samples) for shares in groups]


def as_data(summary: Summary, samples: Sequence[Sample]) -> dict[str, Any]:
    """For JSON: the numbers, and the state over time."""
    return {**asdict(summary), "timeline": [asdict(sample) for sample in samples]}
