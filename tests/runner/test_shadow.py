"""Under kvloom's own scheduler every read finds what was written for it."""

from __future__ import annotations

import itertools
import random

import pytest

from drafting import Guesser
from kvloom.config import SchedulerConfig
from kvloom.errors import CapacityError
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import PlanRequest, plan_kv_cache
from kvloom.kv.spec import KVCacheConfig, KVLimits
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.runner.input_batch import RunnerLimits
from kvloom.sched.drafts import Speculation
from kvloom.sched.scheduler import Scheduler
from shadow import MAX_MODEL_LEN, MODELS, VOCAB_SIZE, ShadowWorker, expected_text

BLOCK_SIZE = 16
MAX_SEQS = 8
MIN_READS = 100_000  # two million with --full


def make_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts that share beginnings, some of several choices, and texts that outgrow the pool."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(300)] for _ in range(3)]
    requests = []
    for i in range(count):
        stem = rng.choice(stems)[: rng.randrange(300)]
        prompt = stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 80))]
        params = ResolvedSamplingParams(temperature=0.0, seed=0, max_tokens=rng.randrange(1, 200))
        requests.append(Request(f"r{i}", prompt, params))
        leader = requests[-1]
        for choice in range(rng.choice([0, 0, 3])):
            requests.append(Request(f"r{i}.{choice}", prompt, params))
            requests[-1].leader = leader
    return requests


def run(worker: ShadowWorker, scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        result = worker.sample_tokens(worker.execute_model(output))
        assert not result.errors
        scheduler.update(output, result)


def tight_config(worker: ShadowWorker, budget: int) -> KVCacheConfig:
    """The first that holds one request of the longest length, and a little more."""
    lengths = {"max_model_len": MAX_MODEL_LEN, "model_max_len": MAX_MODEL_LEN}
    request = PlanRequest(max_num_batched_tokens=budget, num_blocks=None, **lengths)
    for num_kib in itertools.count(64, 8):
        try:
            plan = plan_kv_cache(request, [worker.get_kv_cache_spec()], [num_kib << 10])
        except CapacityError:
            continue
        if plan.max_concurrency > 1.2:
            return plan.configs[0]
    raise AssertionError("memory has no end")


@pytest.mark.parametrize("layers", MODELS)
@pytest.mark.parametrize(("budget", "num_draft_tokens"), [(24, 4), (24, 0), (256, 0)])
def test_no_read_finds_anything_else(
    layers: str, budget: int, num_draft_tokens: int, scale: int
) -> None:
    limits = RunnerLimits(BLOCK_SIZE, MAX_MODEL_LEN, MAX_SEQS, budget)
    worker = ShadowWorker(MODELS[layers], limits)
    config = tight_config(worker, budget)
    worker.initialize_kv_cache(config)
    manager = KVCacheManager(config, KVLimits(MAX_MODEL_LEN, budget), has_prefix_cache=True)
    steps = SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=budget)
    guesser = Guesser(0.3, 0, lambda prefix: expected_text(prefix, 1)[0], VOCAB_SIZE)
    drafts = Speculation(guesser, num_draft_tokens, MAX_MODEL_LEN)
    scheduler = Scheduler(steps, manager, MAX_MODEL_LEN, None, drafts)
    rng = random.Random(f"{layers} {budget}")
    num_preemptions = 0
    while worker.counts.num_reads < MIN_READS * scale:
        requests = make_requests(rng, 24)
        run(worker, scheduler, requests)
        for one in requests:
            prompt = one.token_ids[: one.num_prompt_tokens]
            assert one.output_token_ids == expected_text(prompt, one.num_output_tokens)
        num_preemptions += sum(one.num_preemptions for one in requests)
        manager.check()
    assert worker.counts.num_bad == 0
    assert num_preemptions > 0
