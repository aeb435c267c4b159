"""The concurrency of a plan is true: so many requests run to full length together, and no more.

Each hybrid model's layout on the real scheduler, scaled down by 16: blocks of 1 token for 16, and
windows, chunks, lengths and the step's budget as much shorter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import floor
from pathlib import Path

import pytest

from config_specs import layer_specs
from kvloom.config import SchedulerConfig
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import KVCachePlan, PlanRequest, make_kv_cache_specs, plan_kv_cache
from kvloom.kv.spec import KVCacheSpec, KVLimits, KVSpec
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.scheduler import Scheduler
from kvloom.step import ModelRunnerOutput

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
HYBRIDS = {
    "gemma-2-9b",
    "gemma-3-270m",
    "gemma-3-27b-text",
    "gemma-3n-e4b-text",
    "gpt-oss-20b",
    "llama-4-scout-text",
    "mistral-7b-v0.1",
}
SCALE = 16
BUDGET = 2048 // SCALE


def scaled_specs(model: str) -> dict[str, KVCacheSpec]:
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    layers = [
        replace(
            layer,
            sliding_window_size=layer.sliding_window_size and layer.sliding_window_size // SCALE,
            chunk_size=layer.chunk_size and layer.chunk_size // SCALE,
        )
        for layer in layer_specs(config)
    ]
    return make_kv_cache_specs(KVSpec(layers), block_size=1)


def make_plan(model: str, max_model_len: int) -> KVCachePlan:
    """With room for three requests and about half of another, more than prompts lie apart."""
    specs = scaled_specs(model)
    request = PlanRequest(max_model_len, max_model_len, BUDGET)
    roomy = plan_kv_cache(request, [specs], [1 << 34])
    num_blocks = 1 + roomy.num_reserved_blocks + roomy.num_blocks_per_request * 7 // 2
    plan = plan_kv_cache(request, [specs], [num_blocks * roomy.block_bytes[0]])
    assert 3.4 < plan.max_concurrency < 3.6
    return plan


def run_together(
    plan: KVCachePlan, num_requests: int, prompt_len: int
) -> tuple[list[Request], Scheduler, int]:
    """Run requests that arrive together, to full length; also: how many ran at once."""
    limits = KVLimits(plan.max_model_len, BUDGET)
    manager = KVCacheManager(plan.configs[0], limits, has_prefix_cache=False)
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=BUDGET)
    scheduler = Scheduler(config, manager, plan.max_model_len)
    params = ResolvedSamplingParams(seed=0, max_tokens=plan.max_model_len - prompt_len)
    requests = [Request(f"r{i}", [i] * prompt_len, params) for i in range(num_requests)]
    for request in requests:
        scheduler.add_request(request)
    most_running = num_steps = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        most_running = max(most_running, scheduler.num_running)
        num_steps += 1
        if num_steps % 16 == 0:
            manager.check()
        sampled = {
            r.req_id: [7]
            for r in requests
            if r.req_id in output.num_scheduled_tokens and r.num_computed_tokens == r.num_tokens
        }
        scheduler.update(output, ModelRunnerOutput(sampled_token_ids=sampled))
        assert num_steps < 100_000, "the scheduler makes no progress"
    return requests, scheduler, most_running


@pytest.mark.parametrize("max_model_len", [4096 // SCALE, 32_768 // SCALE])
@pytest.mark.parametrize("model", sorted(HYBRIDS))
def test_the_planned_concurrency_is_true(model, max_model_len):
    plan = make_plan(model, max_model_len)
    num_requests = floor(plan.max_concurrency)
    requests, scheduler, most_running = run_together(plan, num_requests, max_model_len // 2)
    assert {request.status for request in requests} == {RequestStatus.FINISHED_LENGTH}
    assert {request.num_tokens for request in requests} == {max_model_len}
    assert most_running == num_requests
    assert scheduler.stats.num_preemptions == 0

    requests, scheduler, most_running = run_together(plan, num_requests + 1, max_model_len // 2)
    assert {request.num_tokens for request in requests} == {max_model_len}
    assert most_running <= num_requests or scheduler.stats.num_preemptions > 0
