from __future__ import annotations

import pytest

from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.kv.policy import POLICIES, make_policy
from kvloom.kv.pool import BlockPool
from kvloom.kv.spec import FullAttentionSpec, KVLimits, SlidingWindowSpec

COMMON = {"num_kv_heads": 1, "head_size": 4, "dtype": DType.FLOAT32}


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_full_attention_reaches_into_every_started_block(block_size):
    spec = FullAttentionSpec(block_size=block_size, **COMMON)
    policy = make_policy(spec)
    for num_tokens in (0, 1, block_size, block_size + 1, 1000):
        positions = {position // block_size for position in range(num_tokens)}
        assert policy.num_blocks(num_tokens) == len(positions)
        # What is allocated never exceeds the bound that admission and planner share.
        assert policy.num_blocks(num_tokens) <= spec.max_num_blocks(num_tokens, KVLimits(2048, 64))


def test_full_attention_hits_end_at_the_first_gap():
    pool = BlockPool(9)
    policy = make_policy(FullAttentionSpec(block_size=4, **COMMON))
    blocks = pool.take(4)
    for block, name in zip(blocks, (b"0", b"1", b"3", b"0"), strict=True):
        pool.publish(block, (1, name))
    assert policy.longest_hit(pool, 1, [b"0", b"1", b"2", b"3"]) == blocks[:2]
    assert policy.longest_hit(pool, 1, [b"0"]) == blocks[:1]
    assert policy.longest_hit(pool, 1, []) == []
    assert policy.longest_hit(pool, 0, [b"0"]) == []


def test_kinds_without_a_policy_are_refused_by_name():
    assert set(POLICIES) == {FullAttentionSpec}
    spec = SlidingWindowSpec(block_size=4, sliding_window=8, **COMMON)
    with pytest.raises(ConfigError, match=r"SlidingWindowSpec.*FullAttentionSpec"):
        make_policy(spec)
