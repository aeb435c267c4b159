"""Ranks in one process: the texts of one rank, and errors that surface once, without a hang."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from kvloom.config import EngineConfig
from kvloom.errors import ParallelSizeError
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import PlanRequest, plan_kv_cache
from kvloom.kv.spec import KVLimits
from kvloom.request import Request
from kvloom.runner.executor import InProcessExecutor
from kvloom.sched.scheduler import Scheduler


@contextmanager
def started(fakes, **options):
    """An executor with an initialised KV cache, and the scheduler that goes with it."""
    options = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "max_model_len": 200, **options}
    config = EngineConfig.from_options(options)
    executor = InProcessExecutor(config, fakes.checkpoint(fakes.llama))
    memory, specs = executor.determine_available_memory(), executor.get_kv_cache_specs()
    budget = config.scheduler.max_num_batched_tokens
    request = PlanRequest(
        config.model.max_model_len,
        executor.model_max_len,
        budget,
        config.cache.num_blocks,
        executor.memory_budgets,
    )
    plan = plan_kv_cache(request, specs, memory)
    executor.initialize_kv_cache(plan.configs)
    limits = KVLimits(plan.max_model_len, budget)
    manager = KVCacheManager(
        plan.configs[0], limits, has_prefix_cache=config.cache.has_prefix_cache
    )
    try:
        yield executor, Scheduler(config.scheduler, manager, plan.max_model_len)
    finally:
        executor.shutdown()


def generate(fakes, prompts, num_tokens=12, **options):
    """Greedy texts and their log-probabilities."""
    texts = {f"r{i}": [] for i in range(len(prompts))}
    scores = {req_id: [] for req_id in texts}
    with started(fakes, **options) as (executor, scheduler):
        for req_id, prompt in zip(texts, prompts, strict=True):
            params = fakes.params(max_tokens=num_tokens, logprobs=1, prompt_logprobs=0)
            scheduler.add_request(Request(req_id, prompt, params))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            result = executor.sample_tokens(executor.execute_model(output))
            for event in scheduler.update(output, result):
                texts[event.req_id] += event.new_token_ids
                scores[event.req_id] += [e.logprob for e in event.prompt_logprobs]
                scores[event.req_id] += [e.logprob for e in event.logprobs]
    return texts, scores


PROMPTS = [[1, 2, 3], [5] * 17, list(range(40)), [60, 2, 33, 8, 1, 9, 9]]


@pytest.fixture(scope="module")
def undisturbed(fakes):
    """Each prompt alone, whole, in blocks of 16, on one rank."""
    alone = [generate(fakes, [prompt]) for prompt in PROMPTS]
    texts = {f"r{i}": text["r0"] for i, (text, _) in enumerate(alone)}
    scores = {f"r{i}": score["r0"] for i, (_, score) in enumerate(alone)}
    assert len({tuple(text) for text in texts.values()}) == len(PROMPTS)
    return texts, scores


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},  # two ranks hold a copy of each KV head
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 7, "block_size": 4},
        {"max_num_batched_tokens": 5, "block_size": 1},
        {"max_num_batched_tokens": 16, "block_size": 2, "has_prefix_cache": False},
        {"block_size": 256, "max_num_seqs": 2},
        {"block_size": 128, "max_num_batched_tokens": 1},
        {"block_size": 4, "num_blocks": 16, "max_model_len": 60},
        {"block_size": 4, "num_blocks": 16, "max_model_len": 60, "tensor_parallel_size": 2},
    ],
)
def test_texts_and_scores_do_not_depend_on_ranks_blocks_or_chunks(fakes, undisturbed, options):
    texts, scores = generate(fakes, PROMPTS, **options)
    assert texts == undisturbed[0]
    for req_id, expected in undisturbed[1].items():
        assert scores[req_id] == pytest.approx(expected, abs=1e-4)


class InjectedError(Exception):
    pass


@pytest.mark.parametrize("failing_rank", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_an_error_on_any_rank_surfaces_once_and_nobody_hangs(
    fakes, monkeypatch, failing_rank, when
):
    """The rank fails before, between or after the collectives in which the others wait for it."""
    with started(fakes, tensor_parallel_size=4) as (executor, scheduler):
        scheduler.add_request(Request("r", [1, 2, 3], fakes.params(max_tokens=4)))
        output = scheduler.schedule()
        model = executor._workers[failing_rank].model
        forward = model.forward

        def fail(ops, batch):
            if when == "before":
                raise InjectedError
            if when == "inside":
                ops.all_reduce(ops.embedding(batch.token_ids, model.embedding, 0))
                raise InjectedError
            forward(ops, batch)
            raise InjectedError

        model.forward = fail
        with pytest.raises(InjectedError):
            executor.execute_model(output)
        # The ranks met again after the failure: the same step now runs on all of them.
        model.forward = forward
        handle = executor.execute_model(replayed(fakes, output))
        assert set(executor.sample_tokens(handle).sampled_token_ids) == {"r"}


def replayed(fakes, output):
    """The step again, for workers that have already taken its diffs."""
    return fakes.step(
        output.scheduled_new_reqs, scheduled=output.num_scheduled_tokens, finished=["r"]
    )


def test_shutdown_ends_the_threads(fakes):
    before = set(threading.enumerate())
    with started(fakes, tensor_parallel_size=2) as (executor, scheduler):
        scheduler.add_request(Request("r", [1, 2, 3], fakes.params(max_tokens=1)))
        executor.execute_model(scheduler.schedule())
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before


def test_one_rank_uses_no_thread(fakes):
    before = set(threading.enumerate())
    with started(fakes) as (executor, scheduler):
        scheduler.add_request(Request("r", [1, 2, 3], fakes.params(max_tokens=1)))
        executor.execute_model(scheduler.schedule())
        assert set(threading.enumerate()) == before


def test_a_wrong_parallel_size_is_refused_before_weights_are_read(fakes):
    checkpoint = fakes.checkpoint(fakes.llama)
    with pytest.raises(ParallelSizeError):
        InProcessExecutor(EngineConfig.from_options({"tensor_parallel_size": 3}), checkpoint)
    assert checkpoint.num_reads == 0


def test_a_wrong_parallel_size_is_refused_before_anything_is_made_per_rank(fakes, monkeypatch):
    from kvloom.runner import executor

    monkeypatch.setattr(executor, "make_thread_communicators", lambda size: pytest.fail("made"))
    config = EngineConfig.from_options({"tensor_parallel_size": 10**9})
    with pytest.raises(ParallelSizeError, match=r"1000000000.*valid sizes are 1, 2, 4"):
        InProcessExecutor(config, fakes.checkpoint(fakes.llama))


def test_planned_bytes_are_allocated_bytes(fakes, monkeypatch):
    """Every rank allocates what its config says, no more."""
    from kvloom.ops.reference import ReferenceBackend

    sizes = []
    allocate = ReferenceBackend.allocate_kv

    def counting(self, size_bytes):
        raw = allocate(self, size_bytes)
        sizes.append(raw.nbytes)
        return raw

    with started(fakes, tensor_parallel_size=2) as (executor, _):
        specs = executor.get_kv_cache_specs()
        request = PlanRequest(200, executor.model_max_len, 64, 20)
        plan = plan_kv_cache(request, specs, [1 << 20] * 2)
        monkeypatch.setattr(ReferenceBackend, "allocate_kv", counting)
        executor.initialize_kv_cache(plan.configs)
    planned = [tensor.size for config in plan.configs for tensor in config.kv_cache_tensors]
    assert sizes == planned
    assert sum(sizes) == 2 * 20 * plan.block_bytes[0]
