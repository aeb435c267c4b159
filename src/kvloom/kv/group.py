"""One KV cache group: the block tables of its requests, and its share of the pool's books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.kv.block import BlockKey, KVCacheBlock
from kvloom.kv.policy import NEVER, make_policy
from kvloom.kv.pool import BlockPool, require
from kvloom.kv.spec import KVCacheSpec, KVLimits, cdiv


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group; column i is logical block i.

    ```
    null null | 7 12 | 3        num_null_blocks 2: no later query sees what they held
                     ^          num_published 4: the last one is not full yet
    ```

    Attributes:
        blocks: grows at its end; the null block takes the place of a block that is dropped.
        num_null_blocks: leading columns without a block.
        num_published: leading columns whose blocks carry, or carried, their hash.
        num_promised: blocks that admission saw free for the request, taken or not.
        num_owed: promised blocks that it does not hold now.
        num_transient: blocks it holds above the steady ones.
        dropped: the blocks of null columns and the keys they had: whoever fails takes them along.
    """

    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_null_blocks: int = 0
    num_published: int = 0
    num_promised: int = 0
    num_owed: int = 0
    num_transient: int = 0
    dropped: list[tuple[KVCacheBlock, BlockKey]] = field(default_factory=list)

    @property
    def held(self) -> list[KVCacheBlock]:
        """All but the null columns."""
        return self.blocks[self.num_null_blocks :]

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the pool that the request holds in this group."""
        return len(self.blocks) - self.num_null_blocks


class CachedColumns:
    """What a group's cache has of one request's tokens; every column is looked up once."""

    def __init__(self, pool: BlockPool, group: int, block_hashes: Sequence[bytes]) -> None:
        """`block_hashes` has one entry per column."""
        self._pool = pool
        self._group = group
        self._hashes = block_hashes
        self._found: dict[int, KVCacheBlock] = {}

    def is_cached(self, column: int) -> bool:
        """Whether a block can be found for a column."""
        if column in self._found:
            return True
        block = self._pool.find((self._group, self._hashes[column]))
        if block is None:
            return False
        self._found[column] = block
        return True

    def table(self, first: int, num_columns: int) -> list[KVCacheBlock]:
        """The found blocks of columns `first` to `num_columns`, null blocks before them."""
        found = self._found
        return [self._pool.null_block] * first + [found[c] for c in range(first, num_columns)]


class CacheGroup:
    """Block tables of one group over the pool that all groups share, kept by its policy.

    A request is charged its steady blocks. What it holds above them while a chunk of its tokens is
    in flight is transient: over all requests, never more than the group's part of the reserve.
    """

    def __init__(
        self, index: int, spec: KVCacheSpec, hash_block_size: int, limits: KVLimits, pool: BlockPool
    ) -> None:
        """Block hashes are made per `hash_block_size` tokens, which divides the block size."""
        self.block_size = spec.block_size
        self.policy = make_policy(spec)
        self.can_drop = self.policy.first_blind_position(0) < NEVER
        self.num_reserved_blocks = spec.num_transient_blocks(limits)
        self.num_transient_blocks = 0  # over all requests
        self.num_owed_blocks = 0  # over all requests
        self._index = index
        self._spec = spec
        self._num_steady_blocks = spec.num_steady_blocks(limits.max_stored_tokens)
        self._hashes_per_block = spec.block_size // hash_block_size
        self._pool = pool

    # --- counts -----------------------------------------------------------------------------

    def num_steady_blocks(self, num_tokens: int) -> int:
        """What a request of `num_tokens` stored tokens is charged."""
        return self._spec.num_steady_blocks(num_tokens)

    def num_missing_blocks(self, table: BlockTable, num_stored: int) -> int:
        """Columns that `num_stored` tokens reach into and the table does not have."""
        return cdiv(num_stored, self.block_size) - len(table.blocks)

    def num_new_transient_blocks(self, table: BlockTable, num_new_blocks: int) -> int:
        """How many of `num_new_blocks` would be held above the steady blocks."""
        num_held = table.num_held_blocks + num_new_blocks
        return max(num_held - self._num_steady_blocks, 0) - table.num_transient

    def max_chunk(self, num_computed: int) -> int:
        """Tokens after `num_computed` whose blocks the steady ones and the reserve's rest allow.

        At least one: the steady blocks are those of one token.
        """
        num_blocks = self._num_steady_blocks + self.num_reserved_blocks - self.num_transient_blocks
        first = self.policy.first_visible_column(num_computed)
        return (first + num_blocks) * self.block_size - num_computed

    def next_change(self, table: BlockTable, has_prefix_cache: bool) -> int:
        """Stored tokens from which the table needs a block, fills one, or can drop one."""
        size = self.block_size
        num_tokens = len(table.blocks) * size + 1
        if has_prefix_cache and table.num_published < len(table.blocks):
            num_tokens = (table.num_published + 1) * size
        if not self.can_drop:
            return num_tokens
        last_token = (table.num_null_blocks + 1) * size - 1
        # The query at a position is there once position + 1 tokens are stored.
        return min(num_tokens, self.policy.first_blind_position(last_token) + 1)

    # --- tables -----------------------------------------------------------------------------

    def cached_columns(self, block_hashes: Sequence[bytes]) -> CachedColumns:
        """What the cache has of the tokens that `block_hashes` stand for."""
        stride = self._hashes_per_block
        return CachedColumns(self._pool, self._index, block_hashes[stride - 1 :: stride])

    def has_before(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether the table still has what the query behind its first `num_tokens` tokens sees."""
        return table.num_null_blocks <= self.policy.first_visible_column(num_tokens)

    def blocks_before(
        self, table: BlockTable, num_tokens: int
    ) -> tuple[list[KVCacheBlock], KVCacheBlock | None]:
        """What the query behind the first `num_tokens` tokens of a table sees.

        Returns:
            A table of whole blocks, and the block of the tokens behind them, if there are any.
        """
        num_whole, num_left = divmod(num_tokens, self.block_size)
        first = min(self.policy.first_visible_column(num_tokens), num_whole)
        whole = [self._pool.null_block] * first + table.blocks[first:num_whole]
        has_tail = num_left > 0 and self.policy.first_visible_token(num_tokens) < num_tokens
        return whole, table.blocks[num_whole] if has_tail else None

    def open_table(self, hit: Sequence[KVCacheBlock], num_tokens: int) -> BlockTable:
        """A table that begins with the blocks of a hit, for a request of `num_tokens` tokens."""
        null = self._pool.null_block
        table = BlockTable(list(hit), sum(block is null for block in hit), len(hit))
        table.num_promised = self.num_steady_blocks(num_tokens)
        self._pool.touch(table.held)
        self._update_books(table)
        return table

    def close_table(self, table: BlockTable) -> None:
        """Free all blocks; the full ones stay cached."""
        self._pool.free(table.held)
        table.blocks.clear()
        table.num_null_blocks = table.num_promised = 0
        self._update_books(table)

    def grow(self, table: BlockTable, num_blocks: int) -> list[int]:
        """Append blocks from the pool; their ids."""
        blocks = self._pool.take(num_blocks)
        table.blocks += blocks
        self._update_books(table)
        assert self.num_transient_blocks <= self.num_reserved_blocks, "the chunk was not limited"
        return [block.block_id for block in blocks]

    def drop_unseen(self, table: BlockTable, num_computed: int) -> None:
        """Free the blocks that no query from position `num_computed` on sees.

        They stay cached: a prefix that ends near them may still be asked for. So the next one is
        needed longer, and the first goes first.
        """
        first, num_null = self.policy.first_visible_column(num_computed), table.num_null_blocks
        if first <= num_null:
            return
        unseen = table.blocks[num_null:first]
        table.dropped += [(block, block.key) for block in unseen if block.key is not None]
        table.blocks[num_null:first] = [self._pool.null_block] * len(unseen)
        table.num_null_blocks = first
        self._pool.free(unseen[::-1])
        self._update_books(table)

    def publish(self, table: BlockTable, block_hashes: Sequence[bytes], num_stored: int) -> None:
        """Let the full blocks be found by their hashes.

        Tokens may become known several at a time, and leave the window before their block is
        published: then it is gone.
        """
        stride, num_full = self._hashes_per_block, num_stored // self.block_size
        for column in range(max(table.num_published, table.num_null_blocks), num_full):
            block_hash = block_hashes[(column + 1) * stride - 1]
            self._pool.publish(table.blocks[column], (self._index, block_hash))
        table.num_published = num_full

    def forget(self, table: BlockTable) -> None:
        """Let no block be found that the table holds or held."""
        self._pool.forget(table.held)
        # A dropped block may have become another's since: then it has another key.
        self._pool.forget([block for block, key in table.dropped if block.key == key])

    def num_common_blocks(self, table: BlockTable, num_holders: int) -> int:
        """Leading blocks that every table has; a null column is no block, so it ends them."""
        if table.num_null_blocks:
            return 0
        if num_holders == 1:
            return len(table.blocks)
        for column, block in enumerate(table.blocks):
            if block.ref_count != num_holders:
                return column
        return len(table.blocks)

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Prove that the tables and the books agree.

        Raises:
            AssertionError: naming what does not hold.
        """
        null = self._pool.null_block
        for table in tables:
            nulls = [column for column, block in enumerate(table.blocks) if block is null]
            require(nulls == list(range(table.num_null_blocks)), f"null blocks in columns {nulls}")
            num_columns = len(table.blocks)
            require(table.num_published <= num_columns, f"published {table.num_published} blocks")
            num_held = table.num_held_blocks
            num_transient = max(num_held - self._num_steady_blocks, 0)
            require(table.num_transient == num_transient, f"transient: {table.num_transient}")
            num_owed = max(table.num_promised - num_held, 0)
            require(table.num_owed == num_owed, f"owed blocks: {table.num_owed}, not {num_owed}")
        num_transient = sum(table.num_transient for table in tables)
        require(self.num_transient_blocks == num_transient, "transient blocks are miscounted")
        require(num_transient <= self.num_reserved_blocks, "the reserve is overdrawn")
        num_owed = sum(table.num_owed for table in tables)
        require(self.num_owed_blocks == num_owed, "owed blocks are miscounted")

    def _update_books(self, table: BlockTable) -> None:
        num_held = len(table.blocks) - table.num_null_blocks
        num_transient = max(num_held - self._num_steady_blocks, 0)
        if num_transient != table.num_transient:
            self.num_transient_blocks += num_transient - table.num_transient
            table.num_transient = num_transient
        num_owed = max(table.num_promised - num_held, 0)
        if num_owed != table.num_owed:
            self.num_owed_blocks += num_owed - table.num_owed
            table.num_owed = num_owed
