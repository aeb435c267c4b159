"""Which blocks are cached, since when and how often they served again, from the cache's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvloom.kv.events import BlockEvicted, BlockStored, CacheCleared, CacheEvent
from kvloom.step import SchedulerOutput


@dataclass(slots=True)
class CachedBlock:
    """A block that can be found by its hash.

    Attributes:
        since: when it was stored, in seconds.
        num_reuses: requests whose prefix hit it was part of.
    """

    group: int
    block_hash: bytes
    since: float
    num_reuses: int = 0


class BlockTracker:
    """Follows the pool from outside; all calls come from the engine's thread.

    Attributes:
        cached: by block id; blocks in use are among them once they are full.
    """

    def __init__(self, on_evicted: Callable[[float, int], None]) -> None:
        """`on_evicted` gets a block's lifetime in seconds, and how often it was reused."""
        self.cached: dict[int, CachedBlock] = {}
        self.group_block_sizes: Sequence[int] = ()
        self._on_evicted = on_evicted

    def take_events(self, events: Iterable[CacheEvent], now: float) -> None:
        """Follow what happened to the pool up to `now`."""
        for event in events:
            if isinstance(event, BlockStored):
                block = CachedBlock(event.group, event.block_hash, now)
                self.cached[event.block_id] = block
            elif isinstance(event, BlockEvicted):
                self._drop(event.block_id, now)
            elif isinstance(event, CacheCleared):
                for block_id in list(self.cached):
                    self._drop(block_id, now)

    def count_hits(self, output: SchedulerOutput) -> None:
        """Count the blocks that the requests of a step found; its events have been taken."""
        for request in output.scheduled_new_reqs:
            if request.num_computed_tokens:
                self._count_hit(request.block_ids, request.num_computed_tokens)

    def _count_hit(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        for table, block_size in zip(block_ids, self.group_block_sizes, strict=True):
            for block_id in table[: num_tokens // block_size]:
                if block_id in self.cached:  # the null block is not
                    self.cached[block_id].num_reuses += 1

    def _drop(self, block_id: int, now: float) -> None:
        block = self.cached.pop(block_id, None)
        if block is not None:
            self._on_evicted(now - block.since, block.num_reuses)
