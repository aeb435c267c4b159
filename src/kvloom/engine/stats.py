"""What an engine did since it started."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.kv.manager import CacheStats
from kvloom.sched.scheduler import SchedulerStats


@dataclass(slots=True)
class StepTimes:
    """Sums over all steps."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    seconds: float = 0.0


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
