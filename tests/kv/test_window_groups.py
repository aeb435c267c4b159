"""The manager over groups that see less than everything, beside groups that see all."""

from __future__ import annotations

import itertools
import random
from math import lcm

import pytest

from kvloom.kv.hit import NO_HIT
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import KVLimits, cdiv
from kvloom.request import Request, ResolvedSamplingParams
from visibility import Kind, cache_of, joint_hit

FULL = Kind("full", 16)


def make_manager(kinds, num_blocks=1000, max_model_len=4096, budget=64, has_prefix_cache=True):
    limits = KVLimits(max_model_len, budget)
    return KVCacheManager(cache_of(kinds, num_blocks), limits, has_prefix_cache)


def make_request(req_id, token_ids, **params) -> Request:
    return Request(req_id, token_ids, ResolvedSamplingParams(seed=0, max_tokens=8, **params))


def advance(manager, request, num_tokens):
    """One step of one request: how many tokens it computed, and its tables while it runs."""
    manager.start_step()
    hit = NO_HIT
    if request.num_computed_tokens == 0:
        hit = manager.get_computed_blocks(request)
    num_tokens = manager.limit_chunk(request, num_tokens, hit)
    assert manager.allocate_slots(request, num_tokens, hit) is not None
    request.num_computed_tokens += hit.num_tokens + num_tokens
    return num_tokens, manager.get_block_ids(request.req_id)


def prefill(manager, request, budget=64):
    """Compute all known tokens in chunks."""
    while request.num_computed_tokens < request.num_tokens:
        missing = request.num_tokens - request.num_computed_tokens
        advance(manager, request, min(budget, missing))
    manager.check()


def run_once(manager, token_ids) -> None:
    request = make_request("once", token_ids)
    prefill(manager, request)
    manager.free(request)
    manager.check()


def hit_of(manager, token_ids) -> int:
    return manager.get_computed_blocks(make_request("looks", token_ids)).num_tokens


def block_of(manager, group, token_ids, column):
    """The cached block of a column of a prompt."""
    request = make_request("finds", token_ids)
    manager._extend_block_hashes(request)
    stride = manager._groups[group].block_size // manager.block_size
    block = manager._pool.find((group, request.block_hashes[(column + 1) * stride - 1]))
    assert block is not None
    return block


def columns_held(table) -> set[int]:
    return {column for column, block_id in enumerate(table) if block_id}


@pytest.mark.parametrize("window_kinds", [1, 3])
@pytest.mark.parametrize("budget", [256, 2048])
def test_a_long_prompt_holds_its_window_and_one_chunk(budget, window_kinds):
    windows = [Kind("window", 16 << i, 512) for i in range(window_kinds)]
    manager = make_manager([FULL, *windows], 10_000, 40_000, budget)
    request = make_request("r", range(32_768))
    while request.num_computed_tokens < request.num_tokens:
        first = request.num_computed_tokens
        num_tokens, (full, *tables) = advance(manager, request, budget)
        assert num_tokens == budget
        assert len(columns_held(full)) == cdiv(first + budget, 16)
        for kind, table in zip(windows, tables, strict=True):
            num_held = len(columns_held(table))
            assert num_held <= (512 + budget) // kind.block_size + 1  # of 32768 / block_size
            assert num_held >= min(512 + budget, first + budget) // kind.block_size


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind("window", size, window) for size in (1, 4) for window in (1, 2, 4, 7, 20)),
        *(Kind("chunk", size, chunk) for size in (1, 4) for chunk in (1, 4, 6, 20)),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_blocks_are_nulled_as_soon_as_no_later_query_sees_them(kind, has_prefix_cache):
    manager = make_manager([kind], budget=8, has_prefix_cache=has_prefix_cache)
    # A request without a hit: some kinds need nothing cached to go on from the middle.
    request = make_request("r", range(100), prompt_logprobs=0)
    rng = random.Random(str(kind))
    tables = []
    while request.num_computed_tokens < request.num_tokens:
        first = request.num_computed_tokens
        room = min(rng.choice([1, 1, 1, 8]), request.num_tokens - first)
        num_tokens, [table] = advance(manager, request, room)
        manager.check()
        assert len(table) == cdiv(first + num_tokens, kind.block_size)
        assert columns_held(table) == kind.columns_seen(first, first + num_tokens)
        tables.append(table)
    for before, after in itertools.pairwise(tables):
        # Columns never move: one that is held later was not another block before.
        assert all(b in (0, a) for a, b in zip(before, after, strict=False))
    manager.free(request)
    assert manager.num_used_blocks == 0
    manager.check()


@pytest.mark.parametrize("kind", [Kind("window", 16, 24), Kind("chunk", 16, 32)], ids=str)
@pytest.mark.parametrize(("num_tokens", "hit"), [(31, 16), (32, 16), (33, 32)])
def test_a_resent_prompt_hits_whole_blocks_but_not_the_last_token(kind, num_tokens, hit):
    manager = make_manager([FULL, kind])
    run_once(manager, range(num_tokens))
    assert hit_of(manager, range(num_tokens)) == hit


@pytest.mark.parametrize("kind", [Kind("window", 16, 40), Kind("chunk", 16, 64)], ids=str)
def test_a_follow_up_that_diverges_in_the_last_block_hits_up_to_the_block_before(kind):
    manager = make_manager([FULL, kind])
    run_once(manager, range(160))
    for num_shared in (145, 150, 159):
        follow_up = [*range(num_shared), *range(900, 950)]
        assert hit_of(manager, follow_up) == 144
    assert hit_of(manager, [*range(160), 900]) == 160


def test_a_hit_has_null_columns_before_its_window():
    manager = make_manager([FULL, Kind("window", 16, 33)])
    run_once(manager, range(161))
    request = make_request("r", [*range(160), 900])
    hit = manager.get_computed_blocks(request)
    # The query at 160 sees tokens 128 to 159: columns 8 and 9 of the window's group.
    assert [[block.block_id > 0 for block in blocks] for blocks in hit.blocks] == [
        [True] * 10,
        [False] * 8 + [True] * 2,
    ]
    num_used = manager.num_used_blocks
    advance(manager, request, 1)
    assert manager.num_used_blocks == num_used + 10 + 2 + 2


def test_only_visible_blocks_are_asked_of_a_window():
    manager = make_manager([FULL, Kind("window", 16, 33)])
    run_once(manager, range(161))
    for column in range(8):
        manager._pool.forget([block_of(manager, 1, range(161), column)])
        assert hit_of(manager, range(161)) == 160
    manager._pool.forget([block_of(manager, 1, range(161), 8)])
    # Block 9 alone is left: no query sees it alone, and those before lack theirs.
    assert hit_of(manager, range(161)) == 0
    manager.check()


MIXTURES = [
    [Kind("window", 4, 7)],
    [Kind("full", 4), Kind("window", 4, 9)],
    [Kind("full", 2), Kind("window", 4, 5), Kind("window", 6, 11)],
    [Kind("latent", 8), Kind("chunk", 4, 16), Kind("window", 2, 3)],
    [Kind("chunk", 3, 12), Kind("window", 2, 8), Kind("window", 1, 1)],
]


@pytest.mark.parametrize("kinds", MIXTURES, ids=lambda kinds: "+".join(map(str, kinds)))
def test_joint_hits_are_the_longest_that_suit_all_groups(kinds):
    """The fixed point against trying out every length, over caches with random holes."""
    rng = random.Random(str(kinds))
    hits = set()
    for _ in range(60):
        manager = make_manager(kinds, budget=32)
        prompt = range(rng.randrange(1, 100))
        run_once(manager, prompt)
        cached = {
            (group, column)
            for group, kind in enumerate(kinds)
            for column in range(len(prompt) // kind.block_size)
        }
        lost = {place for place in sorted(cached) if rng.random() < rng.choice([0.0, 0.1, 0.4])}
        for group, column in lost:
            manager._pool.forget([block_of(manager, group, prompt, column)])
        manager.check()
        hit = hit_of(manager, prompt)
        brute = joint_hit(
            kinds, len(prompt), lambda group, c, left=cached - lost: (group, c) in left
        )
        assert hit == brute
        assert hit % lcm(*(kind.block_size for kind in kinds)) == 0
        hits.add(hit)
        # The tables of the hit hold what the next query sees, and nothing else.
        request = make_request("r", prompt)
        num_tokens, tables = advance(manager, request, 1)
        for kind, table in zip(kinds, tables, strict=True):
            assert columns_held(table) == kind.columns_seen(hit, hit + num_tokens)
    assert len(hits) > 2


def test_groups_of_different_block_sizes_share_hashes_and_ids():
    manager = make_manager([Kind("full", 32), Kind("window", 16, 20)])
    request = make_request("r", range(70))
    _, (full, window) = advance(manager, request, 50)
    assert (full, window) == ([1, 2], [3, 4, 5, 6])
    assert manager.block_size == 16
    advance(manager, request, 20)
    assert manager.get_block_ids("r") == ([1, 2, 7], [0, 4, 5, 6, 8])
    manager.free(request)
    # 64 is two blocks of 32; 48 would suit the window alone.
    assert hit_of(manager, range(70)) == 64
    assert hit_of(manager, range(64)) == 32


def test_what_left_the_window_first_is_evicted_first():
    """A follow-up is likelier to need what comes last, and needs nothing before it."""
    manager = make_manager([Kind("window", 4, 8)], num_blocks=12, max_model_len=40, budget=20)
    run_once(manager, range(40))  # ten of eleven blocks: one is fresh
    prompt = make_request("finds", range(40))
    manager._extend_block_hashes(prompt)
    assert all(manager._pool.find((0, key)) for key in prompt.block_hashes)
    manager._pool.take(1 + 3)
    found = [manager._pool.find((0, key)) is not None for key in prompt.block_hashes]
    assert found == [False] * 3 + [True] * 7


def test_failed_requests_take_what_they_dropped_along():
    """A block that left the window is still cached; what made its request fail may be in it."""
    manager = make_manager([Kind("window", 4, 8)], budget=16)
    run_once(manager, range(500, 540))
    failed = make_request("failed", range(40))
    prefill(manager, failed, budget=16)
    assert hit_of(manager, range(21)) == 20  # columns 3 and 4: dropped, but cached
    manager.forget(failed)
    manager.free(failed)
    manager.check()
    assert [hit_of(manager, range(n)) for n in range(1, 41)] == [0] * 40
    assert hit_of(manager, range(500, 540)) == 36


def test_a_dropped_block_that_became_another_s_is_not_forgotten():
    kind = Kind("window", 4, 4)
    reserve = kind.spec.num_transient_blocks(KVLimits(100, 4))
    manager = make_manager([kind], 1 + 2 * 2 + reserve, 100, budget=4)
    failed = make_request("failed", range(40))
    prefill(manager, failed, budget=4)
    other = make_request("other", range(500, 540))
    prefill(manager, other, budget=4)  # takes the blocks that the first dropped
    num_cached = hit_of(manager, range(500, 540))
    assert num_cached == 36
    manager.forget(failed)
    manager.free(failed)
    manager.check()
    assert hit_of(manager, range(500, 540)) == 36


def test_one_token_fits_whatever_the_chunks_of_others_took():
    kinds = [FULL, Kind("window", 16, 64), Kind("window", 32, 50)]
    manager = make_manager(kinds, 3000, budget=512)
    limits = KVLimits(4096, 512)
    requests = [make_request(str(i), range(i * 10_000, i * 10_000 + 4000)) for i in range(6)]
    taken = [advance_together(manager, requests, budget=512) for _ in range(7)]
    assert any(0 < num_tokens < 100 for step in taken for num_tokens in step)
    assert all(num_tokens > 0 for step in taken for num_tokens in step)
    # A chunk of the whole budget uses the whole reserve.
    assert [kind.spec.num_transient_blocks(limits) for kind in kinds] == [0, 32, 16]


def advance_together(manager, requests, budget):
    """One step in which every request asks for the whole budget; what each of them gets."""
    manager.start_step()
    taken = []
    for request in requests:
        num_tokens = manager.limit_chunk(request, budget)
        assert manager.allocate_slots(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens
        taken.append(num_tokens)
        manager.check()
    return taken


def test_growth_leaves_the_reserve_alone():
    kinds = [Kind("full", 4), Kind("window", 4, 8)]
    limits = KVLimits(400, 32)
    reserve = kinds[1].spec.num_transient_blocks(limits)  # touched by 39 tokens, less those by 8
    assert reserve == 11 - 3
    manager = make_manager(kinds, 1 + 20 + reserve, 400, budget=32)
    # 17 full columns and a window of 3 blocks: 68 stored tokens.
    assert manager.can_ever_fit(68)
    assert not manager.can_ever_fit(69)
    request = make_request("r", range(68))
    prefill(manager, request, budget=32)
    assert manager.num_used_blocks == 17 + 3
    request.token_ids.append(0)
    # 9 blocks are free, 8 of them the reserve; one more token takes a block of either group.
    assert manager.allocate_slots(request, 1) is None
    assert manager.num_used_blocks == 17 + 2


def test_others_enter_beside_the_steady_blocks_and_the_reserve():
    kind = Kind("window", 4, 8)
    reserve = kind.spec.num_transient_blocks(KVLimits(400, 32))
    manager = make_manager([kind], 1 + 2 * 3 + reserve, 400, budget=32)
    requests = [make_request(str(i), range(i * 1000, i * 1000 + 100)) for i in range(3)]
    # The first holds 8 blocks, 5 of the reserve's 8; the other may hold 3 + 3.
    assert advance_together(manager, requests[:2], budget=32) == [32, 24]
    assert manager.allocate_slots(requests[2], 1) is None
    manager.free(requests[0])
    assert manager.allocate_slots(requests[2], 1) is not None


def test_nobody_holds_what_a_null_column_stands_for():
    kinds = [Kind("full", 4), Kind("window", 4, 6)]
    manager = make_manager(kinds, budget=8)
    one = make_request("one", range(8))
    prefill(manager, one)
    assert manager.num_common_prefix_blocks() == [2, 2]
    other = make_request("other", [*range(8), 50])
    advance(manager, other, 1)  # its query at 8 sees tokens 3 to 7: columns 0 and 1
    assert manager.num_common_prefix_blocks() == [2, 2]
    one.token_ids += range(60, 64)
    advance(manager, one, 4)
    assert manager.num_common_prefix_blocks() == [2, 2]
    one.token_ids += [64]
    advance(manager, one, 1)  # its query at 12 sees tokens 7 to 11: column 0 is null
    assert manager.num_common_prefix_blocks() == [2, 0]
    manager.free(other)
    assert manager.num_common_prefix_blocks() == [4, 0]


@pytest.mark.parametrize("field", ["num_transient", "num_owed", "num_null_blocks"])
def test_check_proves_the_books(field):
    manager = make_manager([FULL, Kind("window", 4, 8)])
    request = make_request("r", range(60))
    advance(manager, request, 60)
    manager.check()
    table = manager._holdings["r"].parts[1][1]
    setattr(table, field, getattr(table, field) + 1)
    with pytest.raises(AssertionError):
        manager.check()


def test_check_finds_null_columns_between_others():
    manager = make_manager([FULL, Kind("window", 4, 8)])
    advance(manager, make_request("r", range(60)), 60)
    table = manager._holdings["r"].parts[1][1]
    table.blocks[3] = manager._pool.null_block
    with pytest.raises(AssertionError, match="null"):
        manager.check()
