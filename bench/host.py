"""What a decode step costs besides the model: schedule, input batch, update; and detokenising.

The model is replaced by made-up tokens, so nothing but the host's own work is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from report import print_row

from kvloom.config import DEFAULT_MODEL, SchedulerConfig
from kvloom.dtypes import DType
from kvloom.engine.inputs import PreparedPrompt
from kvloom.engine.outputs import Generation
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import PlanRequest, make_kv_cache_spec, plan_kv_cache
from kvloom.kv.spec import KVLimits
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.runner.input_batch import InputBatch, RunnerLimits
from kvloom.sched.scheduler import Scheduler
from kvloom.step import ModelRunnerOutput
from kvloom.tokenizer import Tokenizer, load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.source import resolve_model

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
NUM_WORDS = 4_000  # different tokens of the output: a text repeats its words
NUM_ROUNDS = 5
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
CONFIG = SchedulerConfig(max_num_seqs=256)


@dataclass(frozen=True, slots=True)
class Bars:
    """The most microseconds a step may take; None where nothing is asked.

    Attributes:
        host: all but detokenising.
        scheduler: schedule and update; shares of what vLLM 0.32 takes (21, 257 and 2,030).
    """

    host: int | None
    scheduler: int


HOST_PARTS = ("schedule", "input batch", "sampled tokens", "update")
BARS_US = {1: Bars(60, 17), 32: Bars(200, 154), 256: Bars(None, 1218)}


@dataclass(slots=True)
class Clock:
    """Seconds per part, one entry per step."""

    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time a part of a step."""
        start = time.perf_counter()
        yield
        self.parts[part].append(time.perf_counter() - start)


class HostSide:
    """Scheduler, KV cache manager and input batch of one engine, without a model."""

    def __init__(self, model: Model) -> None:
        layers = model.get_kv_spec().layers
        specs = {layer.name: make_kv_cache_spec(layer, BLOCK_SIZE) for layer in layers}
        budget = CONFIG.max_num_batched_tokens
        num_blocks = 1 + CONFIG.max_num_seqs * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE
        request = PlanRequest(MAX_MODEL_LEN, model.max_model_len, budget, num_blocks, ())
        plan = plan_kv_cache(request, [specs], [1 << 40])
        limits = KVLimits(MAX_MODEL_LEN, budget)
        manager = KVCacheManager(plan.configs[0], limits, has_prefix_cache=True)
        self.scheduler = Scheduler(CONFIG, manager, MAX_MODEL_LEN)
        sizes = [group.kv_cache_spec.block_size for group in plan.configs[0].kv_cache_groups]
        self.batch = InputBatch(
            RunnerLimits(BLOCK_SIZE, MAX_MODEL_LEN, CONFIG.max_num_seqs, budget), sizes
        )
        self._num_tokens = 0  # made up so far

    def step(self, generations: dict[str, Generation], clock: Clock) -> None:
        """One step as the engine and its runner take it, the tokens made up."""
        with clock.of("schedule"):
            output = self.scheduler.schedule()
        with clock.of("input batch"):
            self.batch.update(output)
            inputs = self.batch.prepare(output.num_scheduled_tokens, {})
            for group in range(len(self.batch.block_sizes)):
                self.batch.block_table(group, inputs)
                self.batch.slot_mapping(group, inputs)
        complete = [inputs.states[i].req_id for i in np.flatnonzero(inputs.is_complete)]
        result = ModelRunnerOutput({req_id: [self._next_token()] for req_id in complete})
        with clock.of("sampled tokens"):
            self.batch.append_tokens(result.sampled_token_ids)
        with clock.of("update"):
            events = self.scheduler.update(output, result)
        with clock.of("detokenise"):
            for event in events:
                generations[event.req_id].push(event)

    def _next_token(self) -> int:
        self._num_tokens += 1
        return 1000 + self._num_tokens * 7919 % NUM_WORDS


def run(model: Model, tokenizer: Tokenizer, num_requests: int) -> Clock:
    """Clock of the decode steps of NUM_ROUNDS batches."""
    host = HostSide(model)
    clock = Clock()
    for number in range(NUM_ROUNDS):
        generations = {}
        for i in range(num_requests):
            req_id = f"{number}-{i}"
            prompt = [
                1000 + (number * 31 + i * 7919 + j * 17) % 40_000 for j in range(PROMPT_TOKENS)
            ]
            params = ResolvedSamplingParams(
                seed=0, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
            )
            request = Request(req_id, prompt, params)
            generations[req_id] = Generation(tokenizer, PreparedPrompt(None, prompt), [request])
            host.scheduler.add_request(request)
        is_prefilled = False
        while host.scheduler.has_unfinished_requests():
            host.step(generations, clock if is_prefilled else Clock())
            is_prefilled = all(g.output.outputs[0].token_ids for g in generations.values())
        tokens = [g.output.outputs[0].token_ids for g in generations.values()]
        assert all(len(ids) == OUTPUT_TOKENS for ids in tokens)
    return clock


def median_us(clock: Clock, *parts: str) -> float:
    """Microseconds of the parts together, the median over steps."""
    steps = zip(*(clock.parts[part] for part in parts), strict=True)
    return statistics.median(map(sum, steps)) * 1e6


def main() -> None:
    """Print what a step of each batch size takes."""
    checkpoint = open_checkpoint(resolve_model(DEFAULT_MODEL))
    dtypes = ModelDTypes(weights=DType.BFLOAT16, kv=DType.BFLOAT16)
    model = build_model(checkpoint.config, TensorParallelRank(0, 1), dtypes)
    tokenizer = load_tokenizer(checkpoint)
    for num_requests, bars in BARS_US.items():
        clock = run(model, tokenizer, num_requests)
        what = f"{num_requests} at once"
        for name, bar_us, parts in (
            ("host side of a decode step", bars.host, HOST_PARTS),
            ("scheduler", bars.scheduler, ("schedule", "update")),
            ("detokenising of a step", None, ("detokenise",)),
        ):
            bar = "" if bar_us is None else f" (at most {bar_us})"
            shares = ", ".join(f"{part} {median_us(clock, part):.0f}" for part in parts)
            print_row(f"{name}, {what}{bar}", f"{median_us(clock, *parts):.0f} us ({shares})")


if __name__ == "__main__":
    main()
