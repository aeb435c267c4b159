"""The input batch against definitions: slot = table[pos // bs] * bs + pos % bs, and a rebuild."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvloom.runner.input_batch import InputBatch


def make_batch(fakes, max_num_seqs, max_model_len, block_sizes):
    limits = fakes.limits(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    return InputBatch(limits, block_sizes)


def run(batch, output):
    batch.update(output)
    return batch.prepare(output.num_scheduled_tokens, {})


@pytest.mark.parametrize("block_sizes", [[4], [4, 4, 4], [4, 8, 12]])
def test_block_tables_take_no_more_than_is_counted(fakes, block_sizes):
    batch = make_batch(fakes, 7, 300, block_sizes)
    limits = fakes.limits(max_num_seqs=7, max_model_len=300, block_size=4)
    num_bytes = sum(table.nbytes for table in batch.block_tables)
    assert num_bytes <= limits.batch_bytes(len(block_sizes))
    if set(block_sizes) == {4}:
        assert num_bytes == limits.batch_bytes(len(block_sizes))


def test_slots_of_a_block_table(fakes):
    batch = make_batch(fakes, 1, 256, [64])
    prompt = list(range(200, 330))
    inputs = run(
        batch,
        fakes.step(new=[fakes.new_request("a", prompt, ([10, 15, 22],))], scheduled={"a": 101}),
    )
    slots = batch.slot_mapping(0, inputs)
    assert slots.dtype == np.int64
    assert slots[100] == 15 * 64 + 36 == 996
    assert slots[62:66].tolist() == [702, 703, 960, 961]
    assert inputs.token_ids.tolist() == prompt[:101]
    assert batch.block_table(0, inputs).tolist() == [[10, 15]]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_slots_follow_the_definition_at_every_block_size(fakes, block_size):
    batch = make_batch(fakes, 2, 300, [block_size])
    num_blocks = -(-299 // block_size)
    table = random.Random(1).sample(range(1, 1000), num_blocks)
    prompt = list(range(299))
    inputs = run(
        batch,
        fakes.step(
            new=[fakes.new_request("a", prompt, (table,), num_computed=131)],
            scheduled={"a": 168},
        ),
    )
    expected = [table[p // block_size] * block_size + p % block_size for p in range(131, 299)]
    assert batch.slot_mapping(0, inputs).tolist() == expected
    assert inputs.positions.tolist() == list(range(131, 299))
    assert inputs.is_complete.tolist() == [True]


def test_prefill_chunks_and_decodes_lie_flat_in_the_order_of_the_step(fakes):
    batch = make_batch(fakes, 4, 32, [4])
    run(
        batch,
        fakes.step(
            new=[
                fakes.new_request("a", [1, 2, 3], ([1],)),
                fakes.new_request("b", list(range(40, 50)), ([2],)),
            ],
            scheduled={"a": 3, "b": 4},
        ),
    )
    batch.append_tokens({"a": [7]})
    inputs = run(
        batch,
        fakes.step(
            new=[fakes.new_request("c", [91, 92], ([5],))],
            cached=[("b", False, [], ([3],), 4), ("a", False, [], ([],), 3)],
            scheduled={"b": 3, "a": 1, "c": 2},
        ),
    )
    assert [s.req_id for s in inputs.states] == ["b", "a", "c"]
    assert inputs.token_ids.tolist() == [44, 45, 46, 7, 91, 92]
    assert inputs.positions.tolist() == [4, 5, 6, 3, 0, 1]
    assert inputs.query_start.tolist() == [0, 3, 4, 6]
    assert inputs.seq_lens.tolist() == [7, 4, 2]
    assert inputs.num_computed_tokens.tolist() == [4, 3, 0]
    assert inputs.is_complete.tolist() == [False, True, True]
    assert batch.slot_mapping(0, inputs).tolist() == [12, 13, 14, 7, 20, 21]
    assert batch.block_table(0, inputs).tolist() == [[2, 3], [1, 0], [5, 0]]


def test_each_group_has_its_own_table_and_block_size(fakes):
    batch = make_batch(fakes, 2, 32, [4, 8])
    inputs = run(
        batch,
        fakes.step(
            new=[fakes.new_request("a", list(range(10)), ([3, 1, 2], [9, 8]))], scheduled={"a": 10}
        ),
    )
    assert batch.block_table(0, inputs).tolist() == [[3, 1, 2]]
    assert batch.block_table(1, inputs).tolist() == [[9, 8]]
    assert batch.slot_mapping(0, inputs)[[0, 4, 9]].tolist() == [12, 4, 9]
    assert batch.slot_mapping(1, inputs)[[0, 7, 8]].tolist() == [72, 79, 64]


def test_a_reused_row_shows_nothing_of_its_last_request(fakes):
    batch = make_batch(fakes, 1, 16, [2])
    run(
        batch,
        fakes.step(new=[fakes.new_request("a", [1] * 8, ([4, 5, 6, 7],))], scheduled={"a": 8}),
    )
    inputs = run(
        batch,
        fakes.step(
            new=[fakes.new_request("b", [2, 2, 2], ([9],))], scheduled={"b": 2}, finished=["a"]
        ),
    )
    assert batch.block_tables[0][inputs.rows[0]].tolist() == [9, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.is_complete.tolist() == [False]


def test_a_finished_id_can_be_added_again_in_the_same_step(fakes):
    batch = make_batch(fakes, 1, 16, [2])
    run(batch, fakes.step(new=[fakes.new_request("a", [1, 2], ([4],))], scheduled={"a": 2}))
    inputs = run(
        batch,
        fakes.step(
            new=[fakes.new_request("a", [5, 6, 7], ([1, 2],))], scheduled={"a": 3}, finished=["a"]
        ),
    )
    assert inputs.token_ids.tolist() == [5, 6, 7]
    assert batch.block_table(0, inputs).tolist() == [[1, 2]]


def test_finishing_an_unknown_request_is_no_error(fakes):
    batch = make_batch(fakes, 1, 16, [2])
    batch.update(fakes.step(finished=["never scheduled"]))


def test_a_resumed_request_gets_a_new_table_and_all_of_its_output(fakes):
    batch = make_batch(fakes, 2, 16, [2])
    run(batch, fakes.step(new=[fakes.new_request("a", [1, 2, 3], ([1, 2],))], scheduled={"a": 3}))
    batch.append_tokens({"a": [8]})
    run(
        batch, fakes.step(new=[fakes.new_request("b", [4], ([3],))], scheduled={"b": 1})
    )  # a is preempted
    inputs = run(batch, fakes.step(cached=[("a", True, [8], ([6, 5],), 0)], scheduled={"a": 4}))
    assert inputs.token_ids.tolist() == [1, 2, 3, 8]
    assert batch.block_tables[0][inputs.rows[0]].tolist() == [6, 5, 0, 0, 0, 0, 0, 0]
    assert inputs.is_complete.tolist() == [True]
    assert inputs.states[0].output_token_ids == [8]


def test_requests_without_a_row_keep_their_state(fakes):
    """Two rows, three requests: each returns with its tokens and blocks after losing its row."""
    batch = make_batch(fakes, 2, 16, [2])
    run(batch, fakes.step(new=[fakes.new_request("a", [1, 2], ([1],))], scheduled={"a": 2}))
    batch.append_tokens({"a": [3]})
    run(batch, fakes.step(new=[fakes.new_request("b", [4], ([2],))], scheduled={"b": 1}))
    batch.append_tokens({"b": [5]})
    both = [("b", False, [], ([],), 1)]
    run(
        batch,
        fakes.step(
            new=[fakes.new_request("c", [6], ([3],))], cached=both, scheduled={"c": 1, "b": 1}
        ),
    )
    batch.append_tokens({"b": [7], "c": [9]})
    inputs = run(
        batch,
        fakes.step(
            cached=[("a", False, [], ([4],), 2), ("c", False, [], ([],), 1)],
            scheduled={"a": 1, "c": 1},
        ),
    )
    assert inputs.token_ids.tolist() == [3, 9]
    assert batch.block_table(0, inputs).tolist() == [[1, 4], [3, 0]]
    assert inputs.is_complete.tolist() == [True, True]


def test_tokens_the_worker_did_not_sample_arrive_with_the_diff(fakes):
    batch = make_batch(fakes, 1, 16, [4])
    run(batch, fakes.step(new=[fakes.new_request("a", [1, 2], ([1],))], scheduled={"a": 2}))
    cached = [("a", False, [30, 31], ([],), 2)]
    inputs = run(batch, fakes.step(cached=cached, scheduled={"a": 1}))
    assert inputs.token_ids.tolist() == [30]
    assert inputs.is_complete.tolist() == [False]
    cached = [("a", False, [], ([],), 3)]
    inputs = run(batch, fakes.step(cached=cached, scheduled={"a": 1}))
    assert inputs.token_ids.tolist() == [31]
    assert inputs.is_complete.tolist() == [True]


def test_random_diffs_equal_a_rebuild_from_plain_lists(fakes):
    """300 steps of arrivals, chunks, decodes, pauses, preemptions and ends, against plain lists."""
    rng = random.Random(5)
    sizes, max_len = [2, 8], 64
    batch = make_batch(fakes, 4, max_len, sizes)
    live: dict[str, dict] = {}
    for number in range(300):
        finished = [r for r in live if rng.random() < 0.08]
        for req_id in finished:
            del live[req_id]
        new, cached, scheduled = [], [], {}
        for req_id in rng.sample(list(live), min(len(live), rng.randint(0, 3))):
            request = live[req_id]
            resumed = rng.random() < 0.2
            if resumed:
                request["computed"], request["blocks"] = 0, [[], []]
            room = len(request["tokens"]) - request["computed"]
            if room == 0:
                continue
            count = rng.randint(1, room)
            fresh = grow(request, count, sizes, rng)
            output = request["tokens"][request["num_prompt"] :] if resumed else []
            cached.append((req_id, resumed, output, fresh, request["computed"]))
            scheduled[req_id] = count
        if len(live) < 9:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            request = {"tokens": prompt, "num_prompt": len(prompt), "computed": 0}
            request["blocks"] = [[], []]
            live[f"r{number}"] = request
            count = rng.randint(1, len(prompt))
            new.append(
                fakes.new_request(f"r{number}", list(prompt), grow(request, count, sizes, rng))
            )
            scheduled[f"r{number}"] = count
        check_step(batch, fakes.step(new, cached, scheduled, finished), live, sizes)
        sampled = {}
        for req_id, count in scheduled.items():
            request = live[req_id]
            request["computed"] += count
            full = request["computed"] == len(request["tokens"])
            if full and len(request["tokens"]) < max_len - 1:
                sampled[req_id] = [rng.randrange(1000)]
                request["tokens"] = request["tokens"] + sampled[req_id]
        batch.append_tokens(sampled)


def grow(request, count, sizes, rng):
    """Give a request blocks for `count` more tokens; returns the new ones per group."""
    fresh = []
    for blocks, size in zip(request["blocks"], sizes, strict=True):
        missing = -(-(request["computed"] + count) // size) - len(blocks)
        fresh.append([rng.randint(1, 10_000) for _ in range(missing)])
        blocks += fresh[-1]
    return tuple(fresh)


def check_step(batch, output, live, sizes):
    batch.update(output)
    if not output.num_scheduled_tokens:
        return
    inputs = batch.prepare(output.num_scheduled_tokens, {})
    tokens, slots, complete = [], [[], []], []
    for req_id, count in output.num_scheduled_tokens.items():
        request = live[req_id]
        span = range(request["computed"], request["computed"] + count)
        tokens += [request["tokens"][p] for p in span]
        complete.append(span.stop == len(request["tokens"]))
        for group, size in enumerate(sizes):
            table = request["blocks"][group]
            slots[group] += [table[p // size] * size + p % size for p in span]
    assert inputs.token_ids.tolist() == tokens
    assert inputs.is_complete.tolist() == complete
    for group in range(len(sizes)):
        assert batch.slot_mapping(group, inputs).tolist() == slots[group]
        table = batch.block_table(group, inputs)
        for row, req_id in zip(table, output.num_scheduled_tokens, strict=True):
            blocks = live[req_id]["blocks"][group]
            assert row.tolist() == (blocks + [0] * len(row))[: len(row)]
