from __future__ import annotations

from collections import Counter

import pytest

from kvloom.kv.block import KVCacheBlock
from kvloom.kv.events import BlockEvicted, BlockStored, CacheCleared, EventLog
from kvloom.kv.pool import BlockPool


def key(name: str) -> tuple[int, bytes]:
    return (0, name.encode())


def block_ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def take_ids(pool: BlockPool, num_blocks: int) -> list[int]:
    return block_ids(pool.take(num_blocks))


def cache_chain(pool: BlockPool, *names: str):
    """Take, publish and free one chain of blocks."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, key(name))
    pool.free(blocks)
    return blocks


def test_fresh_ids_come_in_order_and_block_0_never():
    pool = BlockPool(5)
    assert pool.num_usable_blocks == pool.num_free_blocks == 4
    assert take_ids(pool, 2) == [1, 2]
    assert take_ids(pool, 2) == [3, 4]
    assert pool.num_free_blocks == 0
    with pytest.raises(AssertionError, match="no block is left"):
        pool.take(1)


def test_blocks_exist_from_first_use_on():
    pool = BlockPool(10**12)
    assert take_ids(pool, 1) == [1]
    assert pool.num_free_blocks == 10**12 - 2
    pool.check(Counter({1: 1}))


def test_freed_blocks_without_hash_are_taken_before_fresh_ones():
    pool = BlockPool(10)
    blocks = pool.take(3)
    pool.free(blocks[1:2])
    assert take_ids(pool, 2) == [2, 4]


def test_cached_blocks_are_taken_last_least_recently_used_first_tail_first():
    pool = BlockPool(7)
    cache_chain(pool, "a0", "a1")  # 1, 2
    cache_chain(pool, "b0", "b1")  # 3, 4: fresh ones before cached ones
    pool.touch([pool.find(key("a0"))])  # used again: younger than b0, b1
    pool.free([pool.find(key("a0"))])
    plain = pool.take(2)  # 5, 6: the last fresh ones
    assert block_ids(plain) == [5, 6]
    pool.free(plain)
    assert sorted(take_ids(pool, 2)) == [5, 6]
    # a1 was used least recently; then b's tail, b's head, a's head.
    assert take_ids(pool, 4) == [2, 4, 3, 1]


def test_freeing_a_partly_published_table_takes_the_rest_first():
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.publish(blocks[0], key("a0"))
    pool.publish(blocks[1], key("a1"))
    pool.free(blocks)
    assert take_ids(pool, 3) == [3, 2, 1]


def test_a_cached_block_is_found_until_it_is_taken():
    pool = BlockPool(3)
    cache_chain(pool, "a0", "a1")
    assert pool.find(key("a0")) is not None
    assert pool.find((1, b"a0")) is None  # of another group
    assert take_ids(pool, 1) == [2]
    assert pool.find(key("a1")) is None
    found = pool.find(key("a0"))
    assert found is not None
    pool.touch([found])
    assert pool.num_free_blocks == 0
    pool.check(Counter({1: 1, 2: 1}))


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    pool = BlockPool(3)
    [block] = pool.take(1)
    pool.publish(block, key("a"))
    pool.touch([block])
    pool.free([block])
    assert pool.num_used_blocks == 1
    pool.free([block])
    assert pool.num_used_blocks == 0
    with pytest.raises(AssertionError, match="more often"):
        pool.free([block])


def test_several_blocks_carry_one_hash():
    pool = BlockPool(4)
    one, other, _ = pool.take(3)
    pool.publish(one, key("same"))
    pool.publish(other, key("same"))
    pool.check(Counter({1: 1, 2: 1, 3: 1}))
    assert pool.find(key("same")) is one
    pool.free([one])
    assert take_ids(pool, 1) == [1]  # evicts one of the two
    assert pool.find(key("same")) is other
    pool.check(Counter({1: 1, 2: 1, 3: 1}))
    with pytest.raises(AssertionError, match="published already"):
        pool.publish(other, key("again"))


def test_forgotten_blocks_stay_with_their_holders():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.publish(blocks[0], key("a"))
    pool.forget(blocks)
    assert pool.find(key("a")) is None
    pool.check(Counter({1: 1, 2: 1}))
    pool.free(blocks)
    assert sorted(take_ids(pool, 2)) == [1, 2]  # as blocks without hash, before fresh ones


def test_clear_forgets_all_but_only_when_idle():
    pool = BlockPool(4)
    cache_chain(pool, "a0", "a1")
    [block] = pool.take(1)
    with pytest.raises(AssertionError, match="in use"):
        pool.clear()
    pool.free([block])
    pool.clear()
    assert pool.find(key("a0")) is None
    pool.check(Counter())
    assert sorted(take_ids(pool, 3)) == [1, 2, 3]


def test_peak_counts_taken_and_touched_blocks():
    pool = BlockPool(9)
    chain = cache_chain(pool, "a", "b")
    assert pool.num_peak_blocks == 2
    pool.free(pool.take(3))
    assert pool.num_peak_blocks == 3
    pool.take(2)
    pool.touch(chain)
    assert pool.num_peak_blocks == 4


def test_events_tell_what_happened():
    log = EventLog(capacity=10)
    pool = BlockPool(3, log)
    cache_chain(pool, "a", "b")
    pool.free(pool.take(1))
    pool.clear()
    assert log.drain() == [
        BlockStored(1, *key("a")),
        BlockStored(2, *key("b")),
        BlockEvicted(2, *key("b")),
        CacheCleared(1),
    ]
    assert log.drain() == []


def test_the_event_log_is_bounded():
    log = EventLog(capacity=2)
    for num_blocks in range(5):
        log.record(CacheCleared(num_blocks))
    assert log.num_dropped == 3
    assert log.drain() == [CacheCleared(3), CacheCleared(4)]


def sound_pool() -> BlockPool:
    """Blocks 1, 2 and 5 without holder, 1 and 2 cached; blocks 3 and 4 in use."""
    pool = BlockPool(7)
    cache_chain(pool, "a", "b")
    pool.free(pool.take(3)[2:])
    pool.check(Counter({3: 1, 4: 1}))
    return pool


def lose_a_free_block(pool):
    pool._free.remove(pool._free.first)


def put_a_cached_block_first(pool):
    block = pool.find(key("a"))
    pool._free.remove(block)
    pool._free.prepend(block)


def free_a_held_block(pool):
    pool._free.remove(pool._blocks[5])
    pool._free.prepend(pool._blocks[3])


def hold_the_null_block(pool):
    pool._blocks[0].ref_count = 1
    pool._blocks[3].ref_count = 0


def drop_a_hash(pool):
    pool._blocks[3].key = key("c")


def drop_an_index_entry(pool):
    del pool._index[key("a")]


def index_under_a_wrong_hash(pool):
    pool._index[key("c")] = pool._index.pop(key("a"))


def index_a_stranger(pool):
    pool._index[key("a")][1] = KVCacheBlock(1)


def leave_an_empty_entry(pool):
    pool._index[key("gone")] = {}


def miscount_the_queue(pool):
    pool._free._num_blocks += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_free_block, "free . cached . in use . null = 6"),
        (put_a_cached_block_first, "too early"),
        (free_a_held_block, "a free block is held"),
        (hold_the_null_block, "references"),
        (drop_a_hash, "blocks carry a hash"),
        (drop_an_index_entry, "blocks carry a hash"),
        (index_under_a_wrong_hash, "does not carry"),
        (index_a_stranger, "is not the pool's"),
        (leave_an_empty_entry, "without a block"),
        (miscount_the_queue, "lost count"),
    ],
)
def test_check_sees_every_kind_of_damage(damage, message):
    pool = sound_pool()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check(Counter({3: 1, 4: 1}))


def test_check_compares_with_the_tables():
    pool = sound_pool()
    with pytest.raises(AssertionError, match="references"):
        pool.check(Counter({3: 1, 4: 2}))
    pool._blocks[0].ref_count = 1
    pool._blocks[3].ref_count = 0
    with pytest.raises(AssertionError, match="block 0"):
        pool.check(Counter({0: 1, 4: 1}))
