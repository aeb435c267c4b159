"""Scheduling over groups that see less than everything."""

from __future__ import annotations

import pytest

from kvloom.kv.spec import KVLimits
from visibility import Kind

MAX_MODEL_LEN = 256
MIXTURES = [
    [Kind("window", 4, 40)],
    [Kind("full", 8), Kind("window", 4, 30)],
    [Kind("full", 4), Kind("window", 8, 16), Kind("window", 4, 33)],
    [Kind("latent", 4), Kind("chunk", 8, 64)],
    [Kind("full", 16), Kind("chunk", 4, 24), Kind("window", 8, 100)],
]


def run(setup, fresh, kinds, num_requests, num_held, budget):
    """Requests of half prompt, half output, over a pool for `num_held` of them by the books."""
    limits = KVLimits(MAX_MODEL_LEN, budget)
    specs = [kind.spec for kind in kinds]
    steady = sum(spec.num_steady_blocks(limits.max_stored_tokens) for spec in specs)
    reserve = sum(spec.num_transient_blocks(limits) for spec in specs)
    s = setup(
        1 + reserve + num_held * steady,
        max_model_len=MAX_MODEL_LEN,
        kinds=kinds,
        max_num_batched_tokens=budget,
    )
    half = MAX_MODEL_LEN // 2
    requests = [s.add(str(i), fresh(half), max_tokens=half) for i in range(num_requests)]
    most_running = 0
    while s.scheduler.has_unfinished_requests():
        s.step()
        most_running = max(most_running, s.scheduler.num_running)
    assert [r.num_tokens for r in requests] == [MAX_MODEL_LEN] * num_requests
    return most_running, s.scheduler.stats.num_preemptions


@pytest.mark.parametrize("kinds", MIXTURES, ids=lambda kinds: "+".join(map(str, kinds)))
@pytest.mark.parametrize("budget", [16, 64, 300])
@pytest.mark.parametrize("num_held", [1, 4])
def test_the_pool_holds_what_its_books_say(setup, fresh, kinds, budget, num_held):
    assert run(setup, fresh, kinds, num_held, num_held, budget) == (num_held, 0)
    most_running, num_preemptions = run(setup, fresh, kinds, num_held + 1, num_held, budget)
    assert most_running == num_held or num_preemptions > 0


def test_the_reserve_cuts_the_chunks_of_a_step(setup, fresh):
    """Window 8 at block size 4: 3 steady blocks; a request of 63 stored tokens has 16."""
    s = setup(kinds=[Kind("window", 4, 8)], max_model_len=64, max_num_batched_tokens=640)
    for i in range(4):
        s.add(str(i), fresh(40))
    output = s.schedule()
    # Of 13 reserved blocks the first takes 7 and the second the rest; then 3 blocks each.
    assert list(output.num_scheduled_tokens.values()) == [40, 36, 12, 12]
    s.update(output)
    output = s.schedule()
    # The reserve is whole again. The third sees back to token 5, in column 1, and has 7 above 3.
    assert list(output.num_scheduled_tokens.values()) == [4, 28, 28]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_failed_step_leaves_nothing_to_be_found(setup, has_ended):
    s = setup(kinds=[Kind("window", 4, 8)], max_num_batched_tokens=16)
    s.add("r", range(40), max_tokens=4)
    s.step()
    output = s.schedule()
    s.scheduler.fail_step(output, "as told")
    s.manager.check()
    assert s.manager.num_used_blocks == 0
    [event] = s.update(s.schedule())
    assert (event.req_id, event.finish_reason) == ("r", "error")
    # Its first chunk ran well, but what its second one read is in doubt as a whole.
    for num_tokens in (9, 17, 33):
        request = s.add(f"after {num_tokens}", range(num_tokens), max_tokens=1)
        s.finish_all()
        assert request.num_cached_tokens <= max(num_tokens - 9, 0)
        s.manager.reset_prefix_cache()


def test_a_preempted_request_finds_its_window_again(setup, fresh):
    kinds = [Kind("full", 4), Kind("window", 4, 8)]
    # 16 full blocks, 2 x 3 steady ones, and the reserve of 2 for 8 tokens per step.
    s = setup(1 + 16 + 6 + 2, kinds=kinds, max_model_len=64, max_num_batched_tokens=8)
    old = s.add("old", fresh(16), max_tokens=24)
    new = s.add("new", fresh(16), max_tokens=24)
    steps = s.run_out()
    assert s.scheduler.stats.num_preemptions == 1
    assert (old.num_output_tokens, new.num_output_tokens) == (24, 24)
    resumed = [
        (output, output.scheduled_cached_reqs.resumed_from_preemption.index(True))
        for output, _ in steps
        if any(output.scheduled_cached_reqs.resumed_from_preemption)
    ]
    [(output, index)] = resumed
    full, window = output.scheduled_cached_reqs.new_block_ids[index]
    num_hit = output.scheduled_cached_reqs.num_computed_tokens[index]
    assert num_hit > 0
    assert all(full)
    assert [bool(b) for b in window[: num_hit // 4]] == [
        any(kinds[1].sees(num_hit, 4 * column + i) for i in range(4))
        for column in range(num_hit // 4)
    ]
