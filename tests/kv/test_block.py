from __future__ import annotations

import random
from collections import deque

import pytest

from kvloom.kv.block import FreeBlockQueue, KVCacheBlock


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_queue_gives_blocks_in_order():
    queue = FreeBlockQueue()
    assert queue.first is None
    for i in (1, 2, 3):
        queue.append(KVCacheBlock(i))
    queue.prepend(KVCacheBlock(4))
    assert queue.first is not None
    assert queue.first.block_id == 4
    assert ids(queue) == [4, 1, 2, 3]
    assert len(queue) == 4


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_block_leaves_from_anywhere_and_may_come_back(position):
    queue = FreeBlockQueue()
    blocks = [KVCacheBlock(i) for i in range(3)]
    for block in blocks:
        queue.append(block)
    queue.remove(blocks[position])
    assert ids(queue) == [i for i in range(3) if i != position]
    queue.append(blocks[position])
    assert ids(queue)[-1] == position


def test_a_block_is_in_the_queue_once():
    queue = FreeBlockQueue()
    block = KVCacheBlock(1)
    queue.append(block)
    with pytest.raises(AssertionError, match="already"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(block)


def test_queue_equals_a_deque_under_random_operations():
    rng = random.Random(1)
    queue, model = FreeBlockQueue(), deque[KVCacheBlock]()
    outside = [KVCacheBlock(i) for i in range(12)]
    for _ in range(2000):
        if outside and rng.random() < 0.5:
            block = outside.pop(rng.randrange(len(outside)))
            if rng.random() < 0.5:
                queue.append(block)
                model.append(block)
            else:
                queue.prepend(block)
                model.appendleft(block)
        elif model:
            block = rng.choice(model)
            queue.remove(block)
            model.remove(block)
            outside.append(block)
        assert list(queue) == list(model)
        assert len(queue) == len(model)
