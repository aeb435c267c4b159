"""What happened to blocks and requests, as plain data, for whoever wants to look."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block can be found by its hash from now on."""

    block_id: int
    group: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """A cached block was given to somebody else, or must not be reused; its hash is gone."""

    block_id: int
    group: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All `num_blocks` cached blocks lost their hashes at once."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A request gave its blocks back.

    Attributes:
        needed_by: the request that needed them; the request itself if it was the last in
            the order of priority and arrival.
        num_lost_tokens: its computed tokens, to be computed again unless the cache still has them.
    """

    req_id: str
    needed_by: str
    num_lost_tokens: int


CacheEvent = BlockStored | BlockEvicted | CacheCleared | RequestPreempted


class EventLog:
    """The last `capacity` events, oldest first; older ones are dropped and counted."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self.num_dropped = 0

    def record(self, event: CacheEvent) -> None:
        """Remember `event`, dropping the oldest one if the log is full."""
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def drain(self) -> list[CacheEvent]:
        """The events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events
