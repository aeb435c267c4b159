"""The simulation against the engine: the same blocks, step by step.

A tiny model answers requests on the real engine. The simulation is given their arrivals, by step,
and what was generated; all that it schedules must be the same, and so must every event.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM
from kvloom.kv.events import BlockEvicted, BlockStored, CacheEvent, EventLog, RequestPreempted
from kvloom.kv.manager import KVCacheManager
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.sched.scheduler import Scheduler
from kvloom.simulate.routing import round_robin
from kvloom.simulate.run import Simulation, SimulationResult
from kvloom.simulate.trace import TraceRequest, runs_of
from kvloom.step import SchedulerOutput
from simulated_engines import UnitCost, make_engine
from tiny_folder import make_tiny_folder
from tiny_hybrids import HYBRID_CASES

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": HYBRID_CASES["gemma3_pattern"],
    "shared": HYBRID_CASES["gemma3n"],
}
OPTIONS = {
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "max_model_len": 64,
}
NUM_BLOCKS = {"full": 30, "window": 66, "shared": 44}


@dataclass(frozen=True)
class Arrival:
    """A request of the workload; `step` is the first that may schedule it."""

    step: int
    prompt: list[int]
    max_tokens: int


@dataclass
class Watch:
    """Everything that scheduler and cache do, step by step."""

    steps: list[tuple[SchedulerOutput, list[CacheEvent]]] = field(default_factory=list)

    def attach(self, scheduler: Scheduler, manager: KVCacheManager) -> None:
        events = EventLog(100_000)
        scheduler._events = manager._pool._events = events
        schedule = scheduler.schedule

        def watched() -> SchedulerOutput:
            output = schedule()
            self.steps.append((output, events.drain()))
            return output

        scheduler.schedule = watched

    @property
    def kinds(self) -> set[type]:
        return {type(event) for _, events in self.steps for event in events}


def make_arrivals(seed: int) -> list[Arrival]:
    """Prompts that often begin alike, in bursts and with pauses in which all ends."""
    rng = random.Random(seed)
    stems = [[rng.randrange(40) for _ in range(40)] for _ in range(3)]
    arrivals, step = [], 0
    for _ in range(60):
        step += rng.choice((0, 0, 1, 2, 5, 40))
        stem = rng.choice(stems)[: rng.randrange(33)]
        own = [rng.randrange(40) for _ in range(rng.randrange(1, 9))]
        arrivals.append(Arrival(step, stem + own, rng.randrange(1, 20)))
    return arrivals


def run_engine(
    folder: Path, arrivals: list[Arrival], options: dict[str, Any], eos_token_ids: frozenset[int]
) -> tuple[Watch, Any, Any]:
    """Serve on the real engine; what it did, the outputs of each request, and its plan."""
    llm = LLM(model=str(folder), backend="reference", **options)
    core, watch = llm._core, Watch()
    watch.attach(core.scheduler, core.manager)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(arrivals))}
    pending = list(enumerate(arrivals))
    step = 0
    while pending or core.has_unfinished_requests():
        if not core.has_unfinished_requests():
            step = max(step, pending[0][1].step)
        while pending and pending[0][1].step <= step:
            index, arrival = pending.pop(0)
            params = ResolvedSamplingParams(
                seed=0,
                max_tokens=arrival.max_tokens,
                temperature=0.0,
                eos_token_ids=eos_token_ids,
            )
            core.add_requests([Request(str(index), arrival.prompt, params)])
        for event in core.step():
            outputs[event.req_id] += event.new_token_ids
        step += 1
    core.manager.check()
    llm.shutdown()
    return watch, outputs, core.plan


def replay(
    config: dict[str, Any], requests: list[TraceRequest], options: dict[str, Any]
) -> tuple[Watch, SimulationResult, Any]:
    """The same on the simulation, whose steps take a second each."""
    engine = make_engine(config, **options)
    simulation, watch = Simulation(engine, UnitCost(), 1, round_robin), Watch()
    replica = simulation.replicas[0]
    watch.attach(replica._scheduler, replica._manager)
    result = simulation.run(requests)
    replica._manager.check()
    return watch, result, engine.plan


# A text that ends early was run one token ahead, which the simulation, to which all lengths are
# known, does not do.
@pytest.mark.parametrize(
    ("has_async_stepping", "eos_token_ids"), [(False, frozenset({3, 5})), (True, frozenset())]
)
@pytest.mark.parametrize("case", CASES)
def test_blocks_and_events_are_those_of_the_engine(
    case, has_async_stepping, eos_token_ids, tmp_path, scale
):
    changes = {**CASES[case], "vocab_size": 258, "max_position_embeddings": 256}
    folder = make_tiny_folder(tmp_path, **changes)
    fields = json.loads((folder / "config.json").read_text())
    options = {
        **OPTIONS,
        "num_blocks": NUM_BLOCKS[case],
        "has_async_stepping": has_async_stepping,
    }
    for seed in range(scale):
        arrivals = make_arrivals(seed)
        engine, outputs, plan = run_engine(folder, arrivals, options, eos_token_ids)
        requests = [
            TraceRequest(float(a.step), runs_of(a.prompt), len(output), tuple(output))
            for a, output in zip(arrivals, outputs.values(), strict=True)
        ]
        simulated, result, simulated_plan = replay(fields, requests, options)
        assert simulated_plan.configs == plan.configs
        assert len(simulated.steps) == len(engine.steps)
        for (ours, our_events), (theirs, their_events) in zip(
            simulated.steps, engine.steps, strict=True
        ):
            assert our_events == their_events
            assert plain(ours) == plain(theirs)
        assert [r.num_output_tokens for r in result.records] == list(map(len, outputs.values()))
        # All kinds of events took part, or the test shows little.
        assert engine.kinds == {BlockStored, BlockEvicted, RequestPreempted}


def plain(output: SchedulerOutput) -> tuple[Any, ...]:
    """A step but for sampling parameters, which say how long an answer may be."""
    new = [
        (r.req_id, r.prompt_token_ids, r.block_ids, r.num_computed_tokens)
        for r in output.scheduled_new_reqs
    ]
    return (
        new,
        output.scheduled_cached_reqs,
        output.num_scheduled_tokens,
        output.num_common_prefix_blocks,
        output.finished_req_ids,
        output.block_copies,
    )
