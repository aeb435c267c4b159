"""Cache blocks, and the queue of free ones threaded through them."""

from __future__ import annotations

from collections.abc import Iterator

BlockKey = tuple[int, bytes]
"""(group, block hash): what the index of cached blocks is asked for."""


class KVCacheBlock:
    """The book-keeping of one block. Only BlockPool and FreeBlockQueue change it.

    Attributes:
        ref_count: block tables that hold the block.
        key: what the block is indexed by once it is full; None while it is not.
        previous_free, next_free: its neighbours in the free queue; None outside it.
    """

    __slots__ = ("block_id", "key", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.previous_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, key={self.key})"


class FreeBlockQueue:
    """Blocks nobody holds, in the order they will be taken.

    The links live in the blocks, so that a block in the middle leaves in O(1) when the prefix
    cache finds it. A sentinel closes the ring: there is no special case at either end.
    """

    def __init__(self) -> None:
        self._num_blocks = 0
        self._sentinel = KVCacheBlock(-1)
        self._sentinel.previous_free = self._sentinel.next_free = self._sentinel

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._sentinel.next_free
        while block is not None and block is not self._sentinel:
            yield block
            block = block.next_free

    @property
    def first(self) -> KVCacheBlock | None:
        """The block that is taken next; None when the queue is empty."""
        return self._sentinel.next_free if self._num_blocks else None

    def prepend(self, block: KVCacheBlock) -> None:
        """Put `block` where it is taken next."""
        self._link(self._sentinel, block)

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` where it is taken last."""
        last = self._sentinel.previous_free
        assert last is not None
        self._link(last, block)

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out, wherever it stands."""
        before, after = block.previous_free, block.next_free
        assert before is not None, f"{block} is not in the free queue"
        assert after is not None
        before.next_free, after.previous_free = after, before
        block.previous_free = block.next_free = None
        self._num_blocks -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        assert block.next_free is None, f"{block} is in the free queue already"
        after = before.next_free
        assert after is not None
        block.previous_free, block.next_free = before, after
        before.next_free = after.previous_free = block
        self._num_blocks += 1
