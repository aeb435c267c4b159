"""Fork points: blocks that are kept while requests wait to go on from another's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.kv.block import KVCacheBlock
from kvloom.kv.group import BlockTable, CacheGroup
from kvloom.kv.hit import PrefixHit
from kvloom.kv.pool import BlockPool
from kvloom.request import Request


class ForkPoints:
    """Holds, for each request that others fork, what their first query sees.

    ```
    leader      [ 7 | 12 | 3 : ]             point behind 40 tokens, block size 16
    follower    [ 7 | 12 | 9 : ]             7 and 12 are shared; copy 3 -> 9
    ```
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._points: dict[Request, PrefixHit] = {}  # by leader

    @property
    def held(self) -> list[KVCacheBlock]:
        """The blocks of all points, each once per point."""
        return [block for point in self._points.values() for block in self._held_by(point)]

    def open(
        self, leader: Request, parts: Sequence[tuple[CacheGroup, BlockTable]], num_tokens: int
    ) -> None:
        """Hold what `leader`, whose groups and tables are `parts`, has of `num_tokens` tokens.

        Nothing happens if its point is open already, or if it has dropped some of them.
        """
        if leader in self._points or not all(g.has_before(t, num_tokens) for g, t in parts):
            return
        found = [group.blocks_before(table, num_tokens) for group, table in parts]
        blocks, tails = zip(*found, strict=True)
        point = self._points[leader] = PrefixHit(num_tokens, blocks, 0, tails)
        self._pool.touch(self._held_by(point))

    def close(self, leader: Request) -> bool:
        """Give up the point on `leader`; False if there is none."""
        point = self._points.pop(leader, None)
        if point is not None:
            self._pool.free(self._held_by(point))
        return point is not None

    def find(self, leader: Request) -> PrefixHit | None:
        """The open point on `leader`."""
        return self._points.get(leader)

    def _held_by(self, point: PrefixHit) -> list[KVCacheBlock]:
        null = self._pool.null_block
        whole = [block for blocks in point.blocks for block in blocks if block is not null]
        return whole + [tail for tail in point.tails if tail is not None]
