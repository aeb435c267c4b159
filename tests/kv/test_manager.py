from __future__ import annotations

import itertools

import pytest

from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.kv.events import BlockStored, EventLog
from kvloom.kv.hit import NO_HIT
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVLimits
from kvloom.request import Request, ResolvedSamplingParams


def make_manager(num_blocks=100, block_size=4, num_groups=1, has_prefix_cache=True, events=None):
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=4, dtype=DType.FLOAT32
    )
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i in range(num_groups)]
    config = KVCacheConfig(num_blocks, [], groups)
    return KVCacheManager(config, KVLimits(512, 512), has_prefix_cache, events)


def make_request(req_id, token_ids, salt=None, **params) -> Request:
    return Request(
        req_id, token_ids, ResolvedSamplingParams(seed=0, max_tokens=8, **params), cache_salt=salt
    )


def admit(manager, request):
    """All known tokens at once, as the scheduler does; the hit's tokens, and whether it fits."""
    hit = manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
    manager.check()
    if new is not None:
        request.num_computed_tokens = request.num_tokens
    return hit.num_tokens, new


def run_once(manager, req_id, token_ids, salt=None, **params) -> int:
    """Admit and free one request; its cached tokens."""
    request = make_request(req_id, token_ids, salt, **params)
    num_cached, new = admit(manager, request)
    assert new is not None
    manager.free(request)
    manager.check()
    return num_cached


def test_first_request_gets_block_1():
    manager = make_manager(block_size=16)
    request = make_request("r", range(8))
    assert manager.get_computed_blocks(request).num_tokens == 0
    assert manager.allocate_slots(request, 8) == ([1],)
    assert manager.get_block_ids("r") == ([1],)
    assert manager.num_common_prefix_blocks() == [1]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_r2_reusable_prefix(block_size):
    """R2: floor(min(s, n - 1) / bs) * bs, for every n and s up to 17."""
    for num_tokens in range(1, 18):
        for num_shared in range(num_tokens + 1):
            manager = make_manager(block_size=block_size)
            run_once(manager, "first", range(17))
            second = [*range(num_shared), *range(900, 900 + num_tokens - num_shared)]
            expected = min(num_shared, num_tokens - 1) // block_size * block_size
            assert run_once(manager, "second", second) == expected


def test_salts_isolate():
    """Case 6, rows 1 to 5 and 16, through the manager."""
    manager = make_manager()
    prompt = range(13)
    rows = [(None, 0), (None, 12), ("s1", 0), ("s1", 12), ("s2", 0), ("s1", 12)]
    for salt, expected in rows:
        assert run_once(manager, "r", prompt, salt) == expected


def test_no_cache_no_hit_but_the_same_slots():
    manager = make_manager(has_prefix_cache=False)
    assert [run_once(manager, "r", range(9)) for _ in range(3)] == [0, 0, 0]
    assert manager.stats.num_queried_tokens == 0
    assert manager.stats.num_peak_blocks == 3


def test_queries_and_hits_are_counted_once_per_request():
    manager = make_manager()
    for i in range(3):
        run_once(manager, f"r{i}", range(9))
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (27, 16)
    # A look-up that does not lead to an entry is not counted,
    manager.get_computed_blocks(make_request("looks", range(9)))
    # nor one that comes back from preemption, though it may find its own blocks,
    back = make_request("back", range(9))
    back.num_preemptions = 1
    assert admit(manager, back)[0] == 8
    # nor one that must compute all of its logits.
    assert run_once(manager, "prompt logprobs", range(9), prompt_logprobs=0) == 0
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (27, 16)


def test_prompt_logprobs_take_no_hit_but_leave_one():
    manager = make_manager()
    assert run_once(manager, "a", range(9), prompt_logprobs=1) == 0
    assert run_once(manager, "b", range(9), prompt_logprobs=1) == 0
    assert run_once(manager, "c", range(9)) == 8


def test_only_new_blocks_are_returned():
    manager = make_manager()
    run_once(manager, "first", range(8))
    request = make_request("second", [*range(8), 100, 101])
    assert admit(manager, request) == (8, ([3],))
    assert manager.get_block_ids("second") == ([1, 2, 3],)
    for num_tokens, expected in [(11, [[]]), (12, [[]]), (13, [[4]]), (14, [[]])]:
        request.token_ids.append(num_tokens)
        assert manager.allocate_slots(request, 1) == tuple(expected)
        request.num_computed_tokens = num_tokens
    assert manager.get_block_ids("second") == ([1, 2, 3, 4],)


def test_blocks_filled_while_growing_are_published_once():
    log = EventLog(100)
    manager = make_manager(events=log)
    request = make_request("r", range(6))
    admit(manager, request)
    for token_id in range(6, 13):
        request.token_ids.append(token_id)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.check()
    stored = [event for event in log.drain() if isinstance(event, BlockStored)]
    assert [event.block_id for event in stored] == [1, 2, 3]
    assert [event.block_hash for event in stored] == request.block_hashes
    assert run_once(manager, "other", range(13)) == 12


def test_a_chunk_publishes_only_what_it_fills():
    manager = make_manager()
    request = make_request("r", range(12))
    manager.allocate_slots(request, 6)
    twin = make_request("twin", range(12))
    assert manager.get_computed_blocks(twin).num_tokens == 4
    request.num_computed_tokens = 6
    manager.allocate_slots(request, 6)
    assert manager.get_computed_blocks(twin).num_tokens == 8


def test_not_now_changes_nothing():
    manager = make_manager(num_blocks=5)  # four usable
    admit(manager, make_request("holder", range(8)))
    late = make_request("late", range(100, 112))
    assert admit(manager, late)[1] is None
    assert manager.num_used_blocks == 2
    with pytest.raises(KeyError):
        manager.get_block_ids("late")
    assert admit(manager, make_request("fits", range(200, 208)))[1] == ([3, 4],)
    # A request that grows beyond the pool keeps what it has.
    growing = make_request("holder", range(8))
    growing.num_computed_tokens = 8
    assert manager.allocate_slots(growing, 1) is None
    assert manager.get_block_ids("holder") == ([1, 2],)


def test_entry_counts_all_known_tokens_not_the_first_chunk():
    manager = make_manager(num_blocks=5)
    admit(manager, make_request("holder", range(8)))
    assert manager.allocate_slots(make_request("late", range(100, 112)), 4) is None


def test_entry_respects_what_others_were_promised():
    manager = make_manager(num_blocks=6)  # five usable
    chunked = make_request("chunked", range(16))
    assert manager.allocate_slots(chunked, 4) == ([1],)  # three more are promised
    assert manager.allocate_slots(make_request("two", range(100, 108)), 8) is None
    assert manager.allocate_slots(make_request("one", range(100, 104)), 4) == ([2],)
    chunked.num_computed_tokens = 4
    assert manager.allocate_slots(chunked, 12) == ([3, 4, 5],)
    manager.check()


def test_hit_blocks_in_use_cost_nothing_but_cached_ones_do():
    manager = make_manager(num_blocks=4)  # three usable
    first = make_request("first", range(9))
    admit(manager, first)
    assert manager.num_used_blocks == 3
    # Two shared blocks and one more: none is left.
    assert admit(manager, make_request("second", range(9)))[1] is None
    manager.free(first)
    assert admit(manager, make_request("second", range(9))) == (8, ([3],))
    manager = make_manager(num_blocks=5)
    admit(manager, make_request("first", range(9)))
    assert admit(manager, make_request("second", range(9))) == (8, ([4],))
    assert manager.num_used_blocks == 4


def test_a_hit_survives_its_own_entry():
    """Blocks of the hit leave the free queue before new ones are taken from it."""
    manager = make_manager(num_blocks=4)
    run_once(manager, "first", range(12))
    request = make_request("second", [*range(8), 50, 51, 52, 53])
    assert admit(manager, request)[0] == 8
    assert manager.get_block_ids("second") == ([1, 2, 3],)


def test_requests_may_share_blocks_before_they_are_written():
    manager = make_manager()
    assert admit(manager, make_request("a", range(9))) == (0, ([1, 2, 3],))
    assert admit(manager, make_request("b", range(9))) == (8, ([4],))
    assert manager.get_block_ids("b") == ([1, 2, 4],)
    assert manager.num_common_prefix_blocks() == [2]


def test_common_prefix_counts_all_holders_and_partial_blocks():
    manager = make_manager(num_groups=2)
    assert manager.num_common_prefix_blocks() == [0, 0]
    one = make_request("one", range(6))
    admit(manager, one)
    assert manager.num_common_prefix_blocks() == [2, 2]
    other = make_request("other", [*range(4), *range(50, 60)])
    admit(manager, other)
    assert manager.num_common_prefix_blocks() == [1, 1]
    admit(manager, make_request("stranger", range(900, 910)))
    assert manager.num_common_prefix_blocks() == [0, 0]


def test_groups_have_disjoint_tables_and_a_joint_hit():
    log = EventLog(100)
    manager = make_manager(num_blocks=8, num_groups=2, events=log)  # seven usable
    first = make_request("first", range(9))
    assert admit(manager, first) == (0, ([1, 2, 3], [4, 5, 6]))
    manager.free(first)
    assert manager.can_ever_fit(12)
    assert not manager.can_ever_fit(13)


@pytest.mark.parametrize("group", [0, 1])
def test_the_group_that_lost_a_block_cuts_the_joint_hit(group):
    manager = make_manager(num_blocks=8, num_groups=2)  # seven usable
    run_once(manager, "first", range(9))  # two cached blocks per group, three without hash
    hit = manager.get_computed_blocks(make_request("look", range(9)))
    assert hit.num_tokens == 8
    for kept in (blocks for g, blocks in enumerate(hit.blocks) if g != group):
        manager._pool.touch(kept)  # used more recently than those of `group`
        manager._pool.free(kept)
    run_once(manager, "other", range(900, 905))  # takes four blocks: one is cached
    hit = manager.get_computed_blocks(make_request("again", range(9)))
    assert hit.num_tokens == 4
    assert [len(blocks) for blocks in hit.blocks] == [1, 1]
    assert admit(manager, make_request("again", range(9)))[0] == 4


def test_forgotten_blocks_are_not_found_again():
    manager = make_manager()
    run_once(manager, "healthy", range(4))
    failed = make_request("failed", range(13))
    admit(manager, failed)
    manager.forget(failed)
    manager.free(failed)
    manager.check()
    assert manager.num_used_blocks == 0
    assert run_once(manager, "retry", range(13)) == 0
    assert run_once(manager, "again", range(13)) == 12


def test_free_and_forget_of_a_request_without_blocks_do_nothing():
    manager = make_manager()
    manager.free(make_request("unknown", range(4)))
    manager.forget(make_request("unknown", range(4)))
    manager.check()


def test_reset_waits_for_idle():
    manager = make_manager()
    holder = make_request("holder", range(9))
    admit(manager, holder)
    assert not manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("r", range(9))).num_tokens == 8
    manager.free(holder)
    assert manager.reset_prefix_cache()
    assert run_once(manager, "cold", range(9)) == 0
    manager.check()


def test_usage_and_peak():
    manager = make_manager(num_blocks=11)
    assert manager.usage == 0.0
    request = make_request("r", range(17))
    admit(manager, request)
    assert manager.usage == 0.5
    manager.free(request)
    assert manager.usage == 0.0
    assert manager.stats.num_usable_blocks == 10
    assert manager.stats.num_peak_blocks == 5


def test_there_must_be_a_group():
    with pytest.raises(ConfigError, match="no group"):
        KVCacheManager(KVCacheConfig(10, [], []), KVLimits(64, 64), True)


def test_check_compares_tables_with_references():
    manager = make_manager()
    admit(manager, make_request("r", range(9)))
    blocks = manager._holdings["r"].parts[0][1].blocks
    blocks[1] = blocks[0]
    with pytest.raises(AssertionError, match="references"):
        manager.check()


def test_no_hit_is_empty():
    assert NO_HIT.num_tokens == NO_HIT.num_queried_tokens == 0
    assert list(itertools.chain(*NO_HIT.blocks)) == []
