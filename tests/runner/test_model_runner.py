"""The model runner on a model that reads its whole prefix back through the metadata it gets."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from drafting import Guesser
from kvloom.config import SchedulerConfig
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import KVCacheTensor, KVLimits, SharedKVSpec
from kvloom.request import Request, RequestStatus
from kvloom.sampling.sampler import Sampler
from kvloom.sched.drafts import Speculation
from kvloom.sched.scheduler import Scheduler
from kvloom.step import TokenMask


def run(runner, output):
    return runner.sample_tokens(runner.execute_model(output))


# --- ahead ------------------------------------------------------------------------------------


def test_a_step_is_prepared_before_the_one_before_it_is_sampled(fakes):
    model = fakes.model()
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]), model)
    texts = {"x": fakes.continue_text([5, 6, 7], 3), "y": fakes.continue_text([9, 8], 3)}
    new = [
        fakes.new_request("x", [5, 6, 7], ([2, 3],)),
        fakes.new_request("y", [9, 8], ([4, 5],)),
    ]
    handle = runner.execute_model(fakes.step(new, scheduled={"x": 3, "y": 2}))
    for i in range(2):
        runner.start_sampling(handle)
        cached = [("x", False, [], ([],), 3 + i), ("y", False, [], ([],), 2 + i)]
        step = fakes.step(cached=cached, scheduled={"x": 1, "y": 1})
        assert not runner.prepare_step(step)  # this backend has computed all when it returns
        result = runner.sample_tokens(handle)
        assert result.sampled_token_ids == {name: [text[i]] for name, text in texts.items()}
        handle = runner.execute_model(step)
        assert model.batches[-1].token_ids.tolist() == [texts["x"][i], texts["y"][i]]


def test_what_has_ended_meanwhile_is_sampled_for_nobody(fakes):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    new = [fakes.new_request("x", [5, 6], ([2],)), fakes.new_request("y", [9], ([4],))]
    handle = runner.execute_model(fakes.step(new, scheduled={"x": 2, "y": 1}))
    step = fakes.step(cached=[("y", False, [], ([],), 1)], scheduled={"y": 1}, finished=["x"])
    runner.prepare_step(step)
    first = runner.sample_tokens(handle).sampled_token_ids["y"]
    second = run(runner, step).sampled_token_ids
    assert {"y": first + second["y"]} == {"y": fakes.continue_text([9], 2)}


def test_a_step_that_was_prepared_for_another_is_prepared_anew(fakes):
    """One that was given up: its requests have ended."""
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    runner.prepare_step(fakes.step([fakes.new_request("x", [5], ([2],))], scheduled={"x": 1}))
    new = [fakes.new_request("y", [9], ([4],))]
    result = run(runner, fakes.step(new, scheduled={"y": 1}, finished=["x"]))
    assert result.sampled_token_ids == {"y": fakes.continue_text([9], 1)}


# --- metadata ---------------------------------------------------------------------------------


def test_metadata_of_a_request_in_the_middle_of_its_prompt(fakes):
    """Block size 64, table [10, 15, 22]: position 100 is slot 996, 62..65 are 702 703 960 961."""
    model = fakes.model()
    runner = fakes.runner(fakes.kv_config([(64, ["a"])]), model)
    prompt = [n % fakes.vocab_size for n in range(190)]
    run(runner, fakes.step([fakes.new_request("r", prompt, ([10, 15],))], scheduled={"r": 62}))
    cached = [("r", False, [], ([22],), 62)]
    run(runner, fakes.step(cached=cached, scheduled={"r": 100}))
    [meta] = model.batches[-1].attention
    assert meta.slot_mapping[[0, 1, 2, 3, 38]].tolist() == [702, 703, 960, 961, 996]
    assert meta.slot_mapping.dtype == np.int64
    assert meta.block_table.tolist() == [[10, 15, 22]]
    assert meta.query_start.tolist() == [0, 100]
    assert meta.seq_lens.tolist() == [162]
    assert meta.num_computed_tokens.tolist() == [62]
    assert meta.block_size == 64
    for array in (meta.block_table, meta.query_start, meta.seq_lens, meta.num_computed_tokens):
        assert array.dtype == np.int32


def test_two_groups_have_tables_of_their_own_in_one_batch(fakes):
    model = fakes.model(layers=("full", "other"))
    runner = fakes.runner(fakes.kv_config([(4, ["full"]), (8, ["other"])]), model)
    new = [
        fakes.new_request("x", [1, 2, 3, 4, 5], ([3, 7], [2])),
        fakes.new_request("y", list(range(20, 29)), ([5, 1, 9], [4, 6])),
    ]
    result = run(runner, fakes.step(new, scheduled={"y": 9, "x": 5}))
    first, second = model.batches[-1].attention
    assert first.block_table.tolist() == [[5, 1, 9], [3, 7, 0]]
    assert second.block_table.tolist() == [[4, 6], [2, 0]]
    assert first.slot_mapping[[0, 4, 8, 9, 13]].tolist() == [20, 4, 36, 12, 28]
    assert second.slot_mapping[[0, 7, 8, 9, 13]].tolist() == [32, 39, 48, 16, 20]
    assert result.sampled_token_ids == {
        "x": fakes.continue_text([1, 2, 3, 4, 5], 1),
        "y": fakes.continue_text(range(20, 29), 1),
    }


# --- which rows are sampled -------------------------------------------------------------------


def test_only_requests_that_reach_their_last_known_token_are_sampled(fakes):
    model = fakes.model()
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]), model)
    prompt = list(range(10))
    result = run(
        runner, fakes.step([fakes.new_request("r", prompt, ([1, 2],))], scheduled={"r": 6})
    )
    assert result.sampled_token_ids == {}
    assert len(model.batches[-1].logits_rows) == 0
    new = [fakes.new_request("s", [50, 51], ([4],))]
    cached = [("r", False, [], ([3],), 6)]
    result = run(runner, fakes.step(new, cached, scheduled={"s": 2, "r": 4}))
    assert model.batches[-1].logits_rows.tolist() == [1, 5]
    assert result.sampled_token_ids == {
        "s": fakes.continue_text([50, 51], 1),
        "r": fakes.continue_text(prompt, 1),
    }


def test_sampled_tokens_are_fed_back_without_the_scheduler_sending_them(fakes):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    run(runner, fakes.step([fakes.new_request("r", [5, 6, 7], ([2],))], scheduled={"r": 3}))
    texts = []
    for computed, new_blocks in ((3, []), (4, [6]), (5, [])):
        cached = [("r", False, [], (new_blocks,), computed)]
        texts += run(runner, fakes.step(cached=cached, scheduled={"r": 1})).sampled_token_ids["r"]
    assert texts == fakes.continue_text([5, 6, 7], 4)[1:]


def test_a_step_without_tokens_runs_no_forward_pass(fakes):
    model = fakes.model()
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]), model)
    result = run(runner, fakes.step(finished=["gone"]))
    assert model.batches == []
    assert result.sampled_token_ids == {}


def test_nan_logits_end_one_request_and_leave_its_mates_alone(fakes):
    model = fakes.model()
    model.nan_token = 77
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]), model)
    new = [fakes.new_request("bad", [1, 77], ([1],)), fakes.new_request("good", [1, 2], ([2],))]
    result = run(runner, fakes.step(new, scheduled={"bad": 2, "good": 2}))
    assert "NaN" in result.errors["bad"]
    assert result.sampled_token_ids == {"good": fakes.continue_text([1, 2], 1)}


def test_a_mask_leaves_only_its_tokens_to_those_who_obey_it(fakes):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    new = [fakes.new_request("free", [1, 2], ([1],)), fakes.new_request("bound", [1, 2], ([2],))]
    handle = runner.execute_model(fakes.step(new, scheduled={"free": 2, "bound": 2}))
    bits = np.zeros((2, 4), np.uint32)  # 101 tokens
    bits[1, 70 // 32] = 1 << 70 % 32
    result = runner.sample_tokens(handle, TokenMask({"bound": 1}, bits))
    assert result.sampled_token_ids == {"free": fakes.continue_text([1, 2], 1), "bound": [70]}


def test_a_mask_that_was_not_announced_is_refused_where_the_best_logits_alone_were_kept(fakes):
    class KeepingBackend(fakes.backend):
        def compile(self, *arguments):
            executable = super().compile(*arguments)
            executable.keeps_best = True
            return executable

    class Reader(Sampler):
        def asks_best_only(self, params):
            return all(one.is_greedy for one in params)

    config = fakes.kv_config([(4, ["a"])])
    runner = fakes.runner(config, backend=KeepingBackend(), sampler=Reader(fakes.vocab_size))
    mask = TokenMask({"a": 0}, np.zeros((1, 4), np.uint32))
    new = [fakes.new_request("a", [1, 2], ([1],))]
    handle = runner.execute_model(fakes.step(new, scheduled={"a": 2}))
    assert handle.are_best_only
    with pytest.raises(ValueError, match="structured_output_request_ids"):
        runner.sample_tokens(handle, mask)
    step = fakes.step(cached=[("a", False, [5], ([],), 2)], scheduled={"a": 1})
    step.structured_output_request_ids["a"] = 0
    assert not runner.execute_model(step).are_best_only


# --- log-probabilities ------------------------------------------------------------------------


def test_logprobs_belong_to_those_who_ask(fakes):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    new = [
        fakes.new_request("with", [1, 2], ([1],), logprobs=2),
        fakes.new_request("without", [1, 3], ([2],)),
    ]
    result = run(runner, fakes.step(new, scheduled={"with": 2, "without": 2}))
    [entry] = result.logprobs["with"]
    assert entry.token_id == result.sampled_token_ids["with"][0]
    assert (entry.rank, len(entry.top)) == (1, 2)
    assert list(result.logprobs) == ["with"]


def prompt_scores(fakes, prompt):
    """For each prompt token but the first: its id, and whether the model expected it."""
    return [(prompt[p], prompt[p] == fakes.next_token(prompt[:p])) for p in range(1, len(prompt))]


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [3, 4, 4], [10, 1]])
def test_prompt_logprobs_cover_the_prompt_once_whatever_the_chunks(fakes, chunks):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    prompt = [3, 9, *fakes.continue_text([3, 9], 4), 1, 2, 3, 4, 5]
    request = fakes.new_request("r", prompt, ([4, 5, 6],), prompt_logprobs=1)
    entries, done = [], 0
    for chunk in chunks:
        new = [request] if done == 0 else []
        cached = [("r", False, [], ([],), done)] if done else []
        mate = fakes.new_request(f"mate{done}", [done, 1], ([7],))
        scheduled = {"r": chunk, f"mate{done}": 2}
        result = run(runner, fakes.step([*new, mate], cached, scheduled))
        entries += result.prompt_logprobs.get("r", [])
        assert result.sampled_token_ids[f"mate{done}"] == fakes.continue_text([done, 1], 1)
        done += chunk
    assert [(e.token_id, e.rank == 1) for e in entries] == prompt_scores(fakes, prompt)
    assert result.sampled_token_ids["r"] == fakes.continue_text(prompt, 1)


def test_prompt_logprobs_are_not_repeated_after_a_preemption(fakes):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    prompt = [3, 9, 4, 8, 5, 7, 6]
    new = [fakes.new_request("r", prompt, ([1],), prompt_logprobs=0)]
    entries = run(runner, fakes.step(new, scheduled={"r": 4})).prompt_logprobs["r"]
    assert len(entries) == 4
    cached = [("r", True, [], ([2, 3],), 0)]
    result = run(runner, fakes.step(cached=cached, scheduled={"r": 7}))
    entries += result.prompt_logprobs["r"]
    assert [e.token_id for e in entries] == prompt[1:]
    assert all(e.top == () for e in entries)


def test_a_one_token_prompt_has_no_prompt_logprobs(fakes):
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]))
    new = [fakes.new_request("r", [3], ([1],), prompt_logprobs=1)]
    result = run(runner, fakes.step(new, scheduled={"r": 1}))
    assert result.prompt_logprobs == {}
    assert result.sampled_token_ids == {"r": fakes.continue_text([3], 1)}


# --- allocation and binding -------------------------------------------------------------------


def test_layers_are_bound_to_their_group_and_sharing_layers_to_one_view(fakes):
    model = fakes.model(layers=("a", "b", "c"), shared={"c": "a"})
    config = fakes.kv_config([(4, ["a", "c"]), (8, ["b"])])
    runner = fakes.runner(config, model)
    a, b, c = model.attention_layers
    assert a.storage is c.storage
    assert a.storage is not b.storage
    assert [layer.group for layer in (a, b, c)] == [0, 1, 0]
    assert [layer.spec.block_size for layer in (a, b, c)] == [4, 8, 4]
    assert runner.get_kv_cache_spec()["c"] == SharedKVSpec(block_size=4, target="a")


def test_groups_may_overlay_one_tensor(fakes):
    """Two groups on one allocation: one raw buffer, one view per group."""
    model = fakes.model(layers=("a", "b"))
    config = fakes.kv_config([(4, ["a"]), (4, ["b"])], is_overlaid=True)
    backend = fakes.backend()
    allocated = []
    allocate = backend.allocate_kv
    backend.allocate_kv = lambda size: allocated.append(allocate(size)) or allocated[-1]
    fakes.runner(config, model, backend)
    [raw] = allocated
    a, b = model.attention_layers
    assert [id(view) for view in raw["views"]] == [id(a.storage), id(b.storage)]
    assert raw["size_bytes"] == config.kv_cache_tensors[0].size
    assert raw["offsets"] == [0, 0]


def test_layers_of_a_group_lie_one_after_another_in_each_block(fakes):
    """A float32 page of 1 head of 8 + 8 values has 64 bytes per token. Layer d reads what c has."""
    model = fakes.model(layers=("a", "b", "c", "d", "e"), shared={"d": "c"})
    config = fakes.kv_config([(4, ["a", "c", "d", "e"]), (8, ["b"])])
    config = replace(config, kv_cache_tensors=[KVCacheTensor(40 * 3 * 256, list("abcde"))])
    backend = fakes.backend()
    allocated = []
    allocate = backend.allocate_kv
    backend.allocate_kv = lambda size: allocated.append(allocate(size)) or allocated[-1]
    fakes.runner(config, model, backend)
    [raw] = allocated
    a, b, c, d, e = model.attention_layers
    assert [id(view) for view in raw["views"]] == [id(x.storage) for x in (a, b, c, e)]
    assert raw["offsets"] == [0, 0, 256, 512]
    assert d.storage is c.storage
    assert [layer.group for layer in (a, b, c, d, e)] == [0, 1, 0, 0, 0]


def test_copies_happen_before_the_forward_pass_on_every_tensor(fakes):
    model = fakes.model(layers=("a", "b"))
    backend = fakes.backend()
    runner = fakes.runner(fakes.kv_config([(4, ["a"]), (4, ["b"])]), model, backend)
    prompt = [8, 9, 10, 11]
    new = [fakes.new_request("r", prompt, ([1], [2]))]
    run(runner, fakes.step(new, scheduled={"r": 4}))
    # A second request finds the same prompt in copies of both blocks.
    new = [fakes.new_request("s", [*prompt, 12], ([11, 5], [12, 6]), num_computed=4)]
    copies = [(1, 11), (2, 12)]
    result = run(runner, fakes.step(new, scheduled={"s": 1}, copies=copies))
    assert result.sampled_token_ids["s"] == fakes.continue_text([*prompt, 12], 1)
    assert [len(c) for _, c in backend.copies] == [2, 2]


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([(1, 3), (2, 1)], [2, 2, 1, 4, 5]),  # the second writes what the first has read
        ([(1, 3), (3, 4)], [1, 2, 1, 1, 5]),  # the second reads what the first has written
        ([(1, 3), (2, 3), (3, 5)], [1, 2, 2, 4, 2]),
    ],
)
def test_copies_are_made_in_order_where_layers_overlay_each_other(fakes, copies, expected):
    backend = fakes.backend()
    blocks = np.arange(40 * 4 * 2).reshape(40, 4, 2)
    backend.view_kv = lambda *_: blocks  # of both groups
    model = fakes.model(layers=("a", "b"))
    runner = fakes.runner(
        fakes.kv_config([(4, ["a"]), (4, ["b"])], is_overlaid=True), model, backend
    )
    before = blocks.copy()
    run(runner, fakes.step(scheduled={}, copies=copies))
    np.testing.assert_array_equal(blocks[1:6], before[expected])


# --- under kvloom's scheduler -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "budget", "max_num_seqs", "is_tight"),
    [
        (1, 60, 7, 3, True),
        (2, 24, 16, 4, True),
        (4, 12, 5, 8, True),
        (4, 80, 64, 8, False),
        (8, 8, 3, 2, True),
        (16, 6, 64, 8, True),
        (64, 4, 64, 3, False),
        (256, 3, 512, 4, False),
    ],
)
@pytest.mark.parametrize(("has_prefix_cache", "has_drafts"), [(1, 0), (0, 0), (1, 1)])
def test_texts_do_not_depend_on_blocks_budget_mates_or_preemption(
    fakes, block_size, num_blocks, budget, max_num_seqs, is_tight, has_prefix_cache, has_drafts
):
    """Every token is a function of the whole prefix, read back from blocks the scheduler gave."""
    rng = random.Random(block_size * 1000 + num_blocks)
    config = fakes.kv_config([(block_size, ["a"])], num_blocks)
    runner = fakes.runner(config, max_num_seqs=max_num_seqs, block_size=block_size)
    max_len = min(50, (num_blocks - 1) * block_size)
    manager = KVCacheManager(config, KVLimits(max_len, budget), bool(has_prefix_cache))
    guesser = Guesser(0.2, 0, fakes.next_token, fakes.vocab_size)
    drafts = Speculation(guesser, 5, max_len) if has_drafts else None
    step_limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    scheduler = Scheduler(step_limits, manager, max_len, None, drafts)
    stems = [[rng.randrange(90) for _ in range(20)] for _ in range(2)]
    expected, texts, aborted, num_resumed = {}, {}, set(), 0
    for number in range(24):
        length = rng.randint(1, 25)
        prompt = (rng.choice(stems)[: rng.randint(0, 20)] + [number] * 25)[:length]
        num_tokens = rng.randint(1, max_len - length)
        expected[f"r{number}"] = fakes.continue_text(prompt, num_tokens)
        texts[f"r{number}"] = []
        params = fakes.params(max_tokens=num_tokens, ignore_eos=True)
        scheduler.add_request(Request(f"r{number}", prompt, params))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        result = run(runner, output)
        num_resumed += sum(output.scheduled_cached_reqs.resumed_from_preemption)
        for event in scheduler.update(output, result):
            texts[event.req_id] += event.new_token_ids
        manager.check()
        if rng.random() < 0.02:
            victim = rng.choice([r for r in texts if len(texts[r]) < len(expected[r])])
            aborted.add(victim)
            scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORT)
    assert (num_resumed > 0) == is_tight
    for req_id, text in texts.items():
        if req_id in aborted:
            assert text == expected[req_id][: len(text)]
        else:
            assert text == expected[req_id]
