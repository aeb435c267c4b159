"""KVCacheManager: who holds which blocks, over all groups of the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvloom.errors import ConfigError
from kvloom.kv.block import KVCacheBlock
from kvloom.kv.events import EventLog
from kvloom.kv.hashing import extend_block_hashes, root_hash
from kvloom.kv.policy import make_policy
from kvloom.kv.pool import BlockPool
from kvloom.kv.spec import KVCacheConfig, KVLimits
from kvloom.request import Request

BlockTables = tuple[list[KVCacheBlock], ...]
"""One block table per group; column i is logical block i."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache has of a request: good until the next call that changes the manager.

    Attributes:
        num_tokens: leading tokens whose KV is cached; whole blocks.
        blocks: the blocks that hold them, per group; empty where there is nothing.
        num_queried_tokens: tokens the user's request asked for; 0 where nothing was asked.
    """

    num_tokens: int
    blocks: BlockTables
    num_queried_tokens: int


NO_HIT = PrefixHit(num_tokens=0, blocks=(), num_queried_tokens=0)


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
        num_slots: tokens that every table has a block for.
        num_published: leading blocks of every table that carry their hash.
        num_promised: blocks that admission saw free for it, taken or not.
    """

    tables: BlockTables
    num_slots: int
    num_published: int
    num_promised: int

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.tables))


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
            ConfigError: no group, groups of different block sizes, or a kind without a policy.
        """
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        block_sizes = {spec.block_size for spec in self._specs}
        if len(block_sizes) != 1:
            raise ConfigError(
                f"the groups' block sizes are {sorted(block_sizes)}; "
                "plan at least one group, and one block size for all"
            )
        self.block_size = block_sizes.pop()
        self._limits = limits
        self._policies = [make_policy(spec) for spec in self._specs]
        self._pool = BlockPool(kv_cache_config.num_blocks, events)
        self._has_prefix_cache = has_prefix_cache
        self._holdings: dict[str, _Holding] = {}
        # Most steps of most requests need no block: they share this answer.
        self._nothing_new: tuple[list[int], ...] = tuple([] for _ in self._specs)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_groups(self) -> int:
        """Block tables per request."""
        return len(self._specs)

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
        """Blocks, and prompt tokens looked up and found in the prefix cache."""
        return CacheStats(
            self._pool.num_usable_blocks,
            self._pool.num_used_blocks,
            self._pool.num_peak_blocks,
            self._num_queried_tokens,
            self._num_hit_tokens,
        )

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an otherwise empty pool holds `num_tokens` stored tokens of one request."""
        return self._max_num_blocks(num_tokens) <= self._pool.num_usable_blocks

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Find the longest cached prefix of a request that holds no blocks.

        Whole blocks, and never the whole request: the logits of its last token must be computed.
        A request for prompt log-probabilities needs the logits of every token and gets no hit. A
        preempted request may find its own blocks again, but that is no query of its user's.
        """
        if not self._has_prefix_cache or request.sampling_params.prompt_logprobs is not None:
            return NO_HIT
        self._extend_block_hashes(request)
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        found: list[list[KVCacheBlock]] = []
        for group, policy in enumerate(self._policies):
            found.append(policy.longest_hit(self._pool, group, hashes))
            hashes = hashes[: len(found[-1])]
        return PrefixHit(
            num_tokens=len(hashes) * self.block_size,
            blocks=tuple(blocks[: len(hashes)] for blocks in found),
            num_queried_tokens=0 if request.num_preemptions else request.num_tokens,
        )

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT
    ) -> tuple[list[int], ...] | None:
        """Give `request` the blocks for its next tokens; None means "not now" and changes nothing.

        ```
        |  computed, or hit if new  |  num_new_tokens  |       known tokens
        |<----- blocks held ----->|<-- new blocks -->|
        ```
        A request without blocks enters only if all of its known tokens fit beside what others
        were promised when they entered; one that grows takes any free block.

        Returns:
            The ids of the new blocks per group; those of the hit are not among them.
        """
        holding = self._holdings.get(request.req_id)
        if holding is None:
            if not self._can_enter(request, hit):
                return None
            holding = self._enter(request, hit)
        num_stored = request.num_computed_tokens + hit.num_tokens + num_new_tokens
        new_block_ids = self._nothing_new
        if num_stored > holding.num_slots:
            grown = self._grow(holding, num_stored)
            if grown is None:
                return None
            new_block_ids = grown
        if self._has_prefix_cache:
            self._publish(request, holding, num_stored // self.block_size)
        return new_block_ids

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        """The block tables of a request that holds blocks."""
        return tuple([block.block_id for block in t] for t in self._holdings[req_id].tables)

    def free(self, request: Request) -> None:
        """Take all blocks from `request`, if it has any; its full blocks stay cached."""
        holding = self._holdings.pop(request.req_id, None)
        if holding is not None:
            for table in holding.tables:
                self._pool.free(table)

    def discard(self, request: Request) -> None:
        """Free the blocks of a failed request and let none be found: they may hold the cause."""
        holding = self._holdings.get(request.req_id)
        if holding is not None:
            for table in holding.tables:
                self._pool.forget(table)
            self.free(request)

    def num_common_prefix_blocks(self, num_running: int) -> list[int]:
        """Per group, the leading blocks, full or not, that all `num_running` holders share."""
        if not self._holdings:
            return [0] * self.num_groups
        # Any holder will do: a block that all hold is in its table, too.
        tables = next(iter(self._holdings.values())).tables
        return [_count_leading(table, num_running) for table in tables]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing changes, while requests hold blocks."""
        if self._holdings:
            return False
        self._pool.clear()
        return True

    def check(self) -> None:
        """Prove that the books are right; meant for tests and for idle moments.

        Raises:
            AssertionError: free + cached + in use + null differ from the total, references differ
                from the tables, or the hash index differs from the blocks.
        """
        tables = [table for holding in self._holdings.values() for table in holding.tables]
        self._pool.check(Counter(block.block_id for table in tables for block in table))

    def _max_num_blocks(self, num_tokens: int) -> int:
        return sum(spec.max_num_blocks(num_tokens, self._limits) for spec in self._specs)

    def _can_enter(self, request: Request, hit: PrefixHit) -> bool:
        num_promised = sum(
            max(holding.num_promised - holding.num_blocks, 0) for holding in self._holdings.values()
        )
        # Blocks of the hit that others hold cost nothing; cached ones leave the free queue.
        num_shared = sum(block.ref_count > 0 for blocks in hit.blocks for block in blocks)
        num_needed = self._max_num_blocks(request.num_tokens) - num_shared
        return num_needed + num_promised <= self._pool.num_free_blocks

    def _grow(self, holding: _Holding, num_stored: int) -> tuple[list[int], ...] | None:
        """Extend the tables to `num_stored` tokens; None if the pool has not enough blocks."""
        num_missing = [
            policy.num_blocks(num_stored) - len(table)
            for policy, table in zip(self._policies, holding.tables, strict=True)
        ]
        if sum(num_missing) > self._pool.num_free_blocks:
            return None
        new_block_ids = []
        for table, num_blocks in zip(holding.tables, num_missing, strict=True):
            blocks = self._pool.take(num_blocks)
            table += blocks
            new_block_ids.append([block.block_id for block in blocks])
        holding.num_slots = min(map(len, holding.tables)) * self.block_size
        return tuple(new_block_ids)

    def _enter(self, request: Request, hit: PrefixHit) -> _Holding:
        for blocks in hit.blocks:
            self._pool.touch(blocks)
        holding = _Holding(
            tables=tuple(map(list, hit.blocks)) or tuple([] for _ in self._specs),
            num_slots=hit.num_tokens,
            num_published=hit.num_tokens // self.block_size,
            num_promised=self._max_num_blocks(request.num_tokens),
        )
        self._holdings[request.req_id] = holding
        if hit.num_queried_tokens:
            self._num_queried_tokens += hit.num_queried_tokens
            self._num_hit_tokens += hit.num_tokens
        return holding

    def _publish(self, request: Request, holding: _Holding, num_full_blocks: int) -> None:
        if num_full_blocks == holding.num_published:
            return
        self._extend_block_hashes(request)
        for column in range(holding.num_published, num_full_blocks):
            for group, table in enumerate(holding.tables):
                self._pool.publish(table[column], (group, request.block_hashes[column]))
        holding.num_published = num_full_blocks

    def _extend_block_hashes(self, request: Request) -> None:
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            self.block_size,
            root_hash(request.cache_salt),
        )


def _count_leading(table: list[KVCacheBlock], num_holders: int) -> int:
    for column, block in enumerate(table):
        if block.ref_count != num_holders:
            return column
    return len(table)
