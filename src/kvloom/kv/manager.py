"""KVCacheManager: who holds which blocks, over all groups of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import gcd, lcm

from kvloom.errors import ConfigError
from kvloom.kv.block import KVCacheBlock
from kvloom.kv.events import EventLog
from kvloom.kv.fork_points import ForkPoints
from kvloom.kv.group import BlockTable, CachedColumns, CacheGroup
from kvloom.kv.hashing import extend_block_hashes, root_hash
from kvloom.kv.hit import NO_HIT, PrefixHit
from kvloom.kv.pool import BlockPool
from kvloom.kv.spec import KVCacheConfig, KVLimits
from kvloom.request import Request


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, but for `num_used_blocks`, which is now."""

    num_usable_blocks: int
    num_used_blocks: int
    num_peak_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int


@dataclass(slots=True)
class _Holding:
    """What one request holds.

    Attributes:
        parts: every group with the request's table in it.
        next_change: stored tokens from which a table needs a block, fills one, or can drop one.
    """

    parts: tuple[tuple[CacheGroup, BlockTable], ...]
    next_change: int = 0


class KVCacheManager:
    """Gives requests their slots, shares equal prefixes, and proves its books with `check()`.

    A full block is published when its last slot is scheduled, not when it is written: a layer
    stores all K/V of a step before any of it is read, so that requests of one step may share
    blocks. Every step that the scheduler emits must therefore run, and in order.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        limits: KVLimits,
        has_prefix_cache: bool,
        events: EventLog | None = None,
    ) -> None:
        """Take the config that the planner made.

        Raises:
            ConfigError: no group, or one of a kind without a policy.
        """
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if not specs:
            raise ConfigError("there is no group of layers to cache; plan at least one")
        self._pool = BlockPool(kv_cache_config.num_blocks, events)
        self.block_size = gcd(*(spec.block_size for spec in specs))
        self._groups = [
            CacheGroup(index, spec, self.block_size, limits, self._pool)
            for index, spec in enumerate(specs)
        ]
        self._hit_step = lcm(*(spec.block_size for spec in specs))
        self._can_drop = any(group.can_drop for group in self._groups)
        # Only these can hold more while a chunk is in flight.
        self._reserving = [group for group in self._groups if group.num_reserved_blocks]
        self._num_reserved_blocks = sum(group.num_reserved_blocks for group in self._reserving)
        self._swollen: list[Request] = []  # those that held transient blocks in the last step
        self._has_prefix_cache = has_prefix_cache
        self._holdings: dict[str, _Holding] = {}
        self._fork_points = ForkPoints(self._pool)
        self._no_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in specs)
        # Most steps of most requests need no block: they share this answer.
        self._nothing_new: tuple[list[int], ...] = tuple([] for _ in specs)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_groups(self) -> int:
        """Block tables per request."""
        return len(self._groups)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold now."""
        return self._pool.num_used_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold."""
        return self._pool.num_used_blocks / self._pool.num_usable_blocks

    @property
    def stats(self) -> CacheStats:
        """Blocks, and prompt tokens looked up and found in the prefix cache.

        A fork has looked its prompt up and found what it shares; a beam asks for nothing.
        """
        return CacheStats(
            self._pool.num_usable_blocks,
            self._pool.num_used_blocks,
            self._pool.num_peak_blocks,
            self._num_queried_tokens,
            self._num_hit_tokens,
        )

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an otherwise empty pool holds `num_tokens` stored tokens of one request."""
        num_usable = self._pool.num_usable_blocks - self._num_reserved_blocks
        return self._num_steady_blocks(num_tokens) <= num_usable

    def start_step(self) -> None:
        """Drop what only the last step's chunks could see: the whole reserve is there again.

        Steps run in order: what the step in flight reads, the next one may write.
        """
        for request in self._swollen:
            holding = self._holdings.get(request.req_id)
            if holding is not None:
                for group, table in holding.parts:
                    group.drop_unseen(table, request.num_computed_tokens)
        self._swollen.clear()

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Find the longest cached prefix of a request that holds no blocks.

        Whole blocks, and never the whole request: the logits of its last token must be computed.
        A request for prompt log-probabilities needs the logits of every token and gets no hit. A
        preempted request may find its own blocks again, but that is no query of its user's.
        """
        if not self._has_prefix_cache or request.sampling_params.prompt_logprobs is not None:
            return NO_HIT
        self._extend_block_hashes(request)
        found = [group.cached_columns(request.block_hashes) for group in self._groups]
        num_tokens = self._joint_hit(found, request.num_tokens - 1)
        return PrefixHit(
            num_tokens=num_tokens,
            blocks=tuple(
                columns.table(
                    group.policy.first_visible_column(num_tokens), num_tokens // group.block_size
                )
                for group, columns in zip(self._groups, found, strict=True)
            ),
            num_queried_tokens=request.num_queried_tokens,
        )

    def open_fork_point(self, request: Request, num_tokens: int) -> None:
        """Hold what others need to go on behind the first `num_tokens` tokens of `request`.

        The blocks stay where they are, whatever becomes of `request`, until the point is closed.
        Nothing is held if a window has moved on and left some of them.
        """
        self._fork_points.open(request, self._holdings[request.req_id].parts, num_tokens)

    def close_fork_point(self, request: Request) -> bool:
        """Give up the fork point on `request`; False if there is none."""
        return self._fork_points.close(request)

    def get_fork(self, request: Request, leader: Request) -> PrefixHit | None:
        """What `request`, which holds no blocks, has of the fork point on `leader`, if one is open.

        Whole blocks are shared as those of a prefix hit are. The tokens behind them, less than a
        block in each group, are copied: see `tail_copies`.
        """
        fork = self._fork_points.find(leader)
        if fork is None or fork.num_tokens >= request.num_tokens:
            return None
        is_query = self._has_prefix_cache and request.num_queried_tokens
        return replace(fork, num_queried_tokens=request.num_queried_tokens) if is_query else fork

    def tail_copies(self, request: Request, hit: PrefixHit) -> list[tuple[int, int]]:
        """(source, destination) block ids to copy before `request`, which entered with `hit`."""
        tables = [table.blocks for _, table in self._holdings[request.req_id].parts]
        return [
            (tail.block_id, table[len(blocks)].block_id)
            for tail, blocks, table in zip(hit.tails, hit.blocks, tables, strict=False)
            if tail is not None
        ]

    def limit_chunk(self, request: Request, num_tokens: int, hit: PrefixHit = NO_HIT) -> int:
        """How many of the next `num_tokens` tokens of `request` this step may compute, at least 1.

        A chunk makes windows hold more than their steady blocks. The pool keeps a reserve for that,
        which all chunks of a step share: what is left of it cuts the chunk.
        """
        num_computed = request.num_computed_tokens + hit.num_tokens
        for group in self._reserving:
            num_tokens = min(num_tokens, group.max_chunk(num_computed))
        return num_tokens

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT
    ) -> tuple[list[int], ...] | None:
        """Give `request` the blocks for its next tokens; None means "not now", and nobody entered.

        ```
        |  computed, or hit if new  |  num_new_tokens  |       known tokens
        |<----- blocks held ----->|<-- new blocks -->|
        ```
        A request without blocks enters only if the steady blocks of all of its known tokens are
        free beside what others were promised when they entered; one that grows takes any block but
        the reserve's. `num_new_tokens` above 1 must have passed `limit_chunk`. Those beyond the
        known tokens may turn out otherwise: no block is published before its tokens are known.

        Returns:
            The ids of the new blocks per group; those of the hit are not among them.
        """
        holding = self._holdings.get(request.req_id)
        if holding is None:
            if not self._can_enter(request, hit):
                return None
            holding = self._enter(request, hit)
        num_computed = request.num_computed_tokens + hit.num_tokens
        num_stored = num_computed + num_new_tokens
        if num_stored < holding.next_change:
            return self._nothing_new
        if self._can_drop:
            for group, table in holding.parts:
                group.drop_unseen(table, num_computed)
        new_block_ids = self._grow(request, holding, num_stored)
        if new_block_ids is not None:
            if self._has_prefix_cache:
                self._publish(request, holding, num_stored)
            holding.next_change = min(
                [group.next_change(table, self._has_prefix_cache) for group, table in holding.parts]
            )
        return new_block_ids

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        """The block tables of a request that holds blocks."""
        parts = self._holdings[req_id].parts
        return tuple([block.block_id for block in table.blocks] for _, table in parts)

    def free(self, request: Request) -> None:
        """Take all blocks from `request`, if it has any; its full blocks stay cached."""
        holding = self._holdings.pop(request.req_id, None)
        if holding is not None:
            for group, table in holding.parts:
                group.close_table(table)

    def forget(self, request: Request) -> None:
        """Let no block of a failed request be found: they may hold the cause."""
        holding = self._holdings.get(request.req_id)
        if holding is not None:
            for group, table in holding.parts:
                group.forget(table)

    def num_common_prefix_blocks(self) -> list[int]:
        """Per group, the leading blocks, full or not, that all holders share.

        None as soon as a holder's first column is null: nobody holds what it stands for.
        """
        if not self._holdings:
            return [0] * self.num_groups
        # Any holder will do: a block that all hold is in its table, too.
        holding = next(iter(self._holdings.values()))
        num_holders = len(self._holdings)
        return [group.num_common_blocks(table, num_holders) for group, table in holding.parts]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing changes, while requests hold blocks."""
        if self._pool.num_used_blocks:
            return False
        self._pool.clear()
        return True

    def check(self) -> None:
        """Prove that the books are right; meant for tests and for idle moments.

        Raises:
            AssertionError: free + cached + in use + null differ from the total, references differ
                from the tables, null columns stand between others, blocks above the steady ones
                exceed the reserve, or the hash index differs from the blocks.
        """
        held: Counter[int] = Counter()
        for index, group in enumerate(self._groups):
            tables = [holding.parts[index][1] for holding in self._holdings.values()]
            group.check(tables)
            held.update(block.block_id for table in tables for block in table.held)
        held.update(block.block_id for block in self._fork_points.held)
        self._pool.check(held)

    def _joint_hit(self, found: Sequence[CachedColumns], num_tokens: int) -> int:
        """The longest prefix of at most `num_tokens` tokens that every group can use.

        Groups are asked in turn, each for what the others left, until all of them agree.
        """
        num_agreed = 0
        for group, columns in cycle(zip(self._groups, found, strict=True)):
            hit = group.policy.longest_hit(columns.is_cached, num_tokens, self._hit_step)
            num_agreed = num_agreed + 1 if hit == num_tokens else 1
            num_tokens = hit
            if num_agreed == len(found):
                break
        return num_tokens

    def _num_steady_blocks(self, num_tokens: int) -> int:
        return sum(group.num_steady_blocks(num_tokens) for group in self._groups)

    @property
    def _num_spare_blocks(self) -> int:
        """Free blocks but for the rest of the reserve."""
        num_spare = self._pool.num_free_blocks - self._num_reserved_blocks
        for group in self._reserving:
            num_spare += group.num_transient_blocks
        return num_spare

    def _can_enter(self, request: Request, hit: PrefixHit) -> bool:
        num_owed = sum(group.num_owed_blocks for group in self._groups)
        # Blocks of the hit that others hold cost nothing; cached ones leave the free queue.
        num_shared = sum(block.ref_count > 0 for blocks in hit.blocks for block in blocks)
        num_needed = self._num_steady_blocks(request.num_tokens) - num_shared
        return num_needed + num_owed <= self._num_spare_blocks

    def _enter(self, request: Request, hit: PrefixHit) -> _Holding:
        parts = tuple(
            (group, group.open_table(blocks, request.num_tokens))
            for group, blocks in zip(self._groups, hit.blocks or self._no_blocks, strict=True)
        )
        holding = self._holdings[request.req_id] = _Holding(parts)
        if hit.num_queried_tokens:
            self._num_queried_tokens += hit.num_queried_tokens
            self._num_hit_tokens += hit.num_tokens
        return holding

    def _grow(
        self, request: Request, holding: _Holding, num_stored: int
    ) -> tuple[list[int], ...] | None:
        """Extend the tables to `num_stored` tokens; None if the pool has not enough blocks."""
        missing = [group.num_missing_blocks(table, num_stored) for group, table in holding.parts]
        if not any(missing):
            return self._nothing_new
        num_steady = sum(missing)
        if self._reserving:
            num_transient = sum(
                group.num_new_transient_blocks(table, num_blocks)
                for (group, table), num_blocks in zip(holding.parts, missing, strict=True)
            )
            if num_transient:
                num_steady -= num_transient
                self._swollen.append(request)
        if num_steady > self._num_spare_blocks:
            return None
        return tuple(
            [
                group.grow(table, num_blocks)
                for (group, table), num_blocks in zip(holding.parts, missing, strict=True)
            ]
        )

    def _publish(self, request: Request, holding: _Holding, num_stored: int) -> None:
        num_stored = min(num_stored, request.num_tokens)
        self._extend_block_hashes(request)
        for group, table in holding.parts:
            group.publish(table, request.block_hashes, num_stored)

    def _extend_block_hashes(self, request: Request) -> None:
        hashes = request.block_hashes
        if (len(hashes) + 1) * self.block_size <= len(request.token_ids):
            root = root_hash(request.cache_salt)
            extend_block_hashes(hashes, request.token_ids, self.block_size, root)
