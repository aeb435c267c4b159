"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Requests by state now, and counts since the start.

    Attributes:
        num_lost_tokens: computed tokens that preempted requests gave up.
        num_draft_tokens: drafts that were computed.
        num_accepted_tokens: drafts that became output tokens.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_lost_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
