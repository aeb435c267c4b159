"""The pool of blocks: the only place where reference counts, free queue and hash index change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvloom.kv.block import BlockKey, FreeBlockQueue, KVCacheBlock
from kvloom.kv.events import BlockEvicted, BlockStored, CacheCleared, EventLog

NULL_BLOCK_ID = 0


class BlockPool:
    """`num_blocks` blocks, block 0 included, which is the null block and never handed out.

    ```
    never used --take--> in use --free--> free, or cached if it has a hash
                           ^                 |
                           +---take, touch---+      take() evicts the hash, touch() keeps it
    ```
    Blocks are taken in this order: free ones, never used ones (ids 1, 2, 3, ...), cached ones,
    least recently used first. Cached blocks can be found until they are taken: eviction is lazy.
    """

    def __init__(self, num_blocks: int, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_peak_blocks = 0
        self._blocks = [KVCacheBlock(NULL_BLOCK_ID)]  # the others are created on first use
        self._free = FreeBlockQueue()  # free blocks, then cached ones, oldest first
        # A hash may be on several blocks: tables only grow, so that equal blocks stay apart.
        self._index: dict[BlockKey, dict[int, KVCacheBlock]] = {}
        self._events = events

    @property
    def null_block(self) -> KVCacheBlock:
        """What stands in a table's column where there is no block; nobody holds it."""
        return self._blocks[NULL_BLOCK_ID]

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some table holds."""
        return len(self._blocks) - 1 - len(self._free)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now: free, never used, or cached."""
        return self.num_usable_blocks - self.num_used_blocks

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out `num_blocks` blocks of any content; `num_free_blocks` says if there are."""
        taken = [self._take_one() for _ in range(num_blocks)]
        self._note_peak()
        return taken

    def find(self, key: BlockKey) -> KVCacheBlock | None:
        """A block that carries `key`: the one published first, if there are several."""
        same = self._index.get(key)
        return next(iter(same.values())) if same else None

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Count one more holder of each block that `find` gave."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
        self._note_peak()

    def free(self, table: Sequence[KVCacheBlock]) -> None:
        """Count one holder less of each block of a table.

        ```
        table:  h0 h1 h2 --     (-- has no hash)      queue:  -- | older cached | h2 h1 h0
        ```
        The tail of a chain is evicted before its head, without which it could not be found.
        """
        for block in reversed(table):
            assert block.ref_count > 0, f"{block} is freed more often than it was taken"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.key is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def publish(self, block: KVCacheBlock, key: BlockKey) -> None:
        """Let `block`, full and in use, be found by `key`."""
        assert block.key is None, f"{block} is published already"
        block.key = key
        self._index.setdefault(key, {})[block.block_id] = block
        if self._events is not None:
            self._events.record(BlockStored(block.block_id, *key))

    def forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let none of `blocks` be found again."""
        for block in blocks:
            if block.key is None:
                continue
            self._drop_key(block, block.key)
            if block.ref_count == 0:  # it was cached, and is just free now
                self._free.remove(block)
                self._free.prepend(block)

    def clear(self) -> None:
        """Forget every cached block; none may be in use."""
        assert self.num_used_blocks == 0, "blocks in use cannot be forgotten"
        num_cached = sum(len(same) for same in self._index.values())
        self._index.clear()
        for block in self._blocks:
            block.key = None
        if self._events is not None:
            self._events.record(CacheCleared(num_cached))

    def check(self, ref_counts: Counter[int]) -> None:
        """Prove the pool's invariants; `ref_counts` is what the tables hold, by block id.

        Raises:
            AssertionError: naming the invariant that does not hold.
        """
        queue = list(self._free)
        cached = [block for block in queue if block.key is not None]
        num_fresh = self.num_blocks - len(self._blocks)
        num_free = num_fresh + len(queue) - len(cached)
        num_in_use = sum(block.ref_count > 0 for block in self._blocks)
        total = num_free + len(cached) + num_in_use + 1
        require(total == self.num_blocks, f"free + cached + in use + null = {total}")
        require(queue[len(queue) - len(cached) :] == cached, "a cached block is taken too early")
        require(len(queue) == len(self._free), "the free queue lost count")
        require(all(block.ref_count == 0 for block in queue), "a free block is held")
        held = Counter({b.block_id: b.ref_count for b in self._blocks if b.ref_count})
        require(held == ref_counts, f"references {held} differ from tables {ref_counts}")
        require(NULL_BLOCK_ID not in held and self._blocks[0].key is None, "block 0 is in use")
        self._check_index()

    def _check_index(self) -> None:
        indexed = 0
        for key, same in self._index.items():
            require(bool(same), f"{key} is indexed without a block")
            for block_id, block in same.items():
                require(block is self._blocks[block_id], f"{block} is not the pool's")
                require(block.key == key, f"{block} does not carry {key}")
                indexed += 1
        carriers = sum(block.key is not None for block in self._blocks)
        require(carriers == indexed, f"{carriers} blocks carry a hash, {indexed} are indexed")

    def _take_one(self) -> KVCacheBlock:
        block = self._free.first
        has_fresh = len(self._blocks) < self.num_blocks
        if block is None or (block.key is not None and has_fresh):
            assert has_fresh, "no block is left; ask num_free_blocks first"
            block = KVCacheBlock(len(self._blocks))
            self._blocks.append(block)
        else:
            self._free.remove(block)
            if block.key is not None:
                self._drop_key(block, block.key)
        block.ref_count = 1
        return block

    def _drop_key(self, block: KVCacheBlock, key: BlockKey) -> None:
        same = self._index[key]
        del same[block.block_id]
        if not same:
            del self._index[key]
        block.key = None
        if self._events is not None:
            self._events.record(BlockEvicted(block.block_id, *key))

    def _note_peak(self) -> None:
        self.num_peak_blocks = max(self.num_peak_blocks, self.num_used_blocks)


def require(is_true: bool, message: str) -> None:
    """Raise an AssertionError. Not `assert`: check() must also work in optimised mode."""
    if not is_true:
        raise AssertionError(message)
