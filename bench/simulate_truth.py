"""The simulation's times against the engine's, on this machine, for three workloads.

A round is: profile, serve on the engine, profile again, simulate with both. Rounds in which
the memory bandwidth moved by more than 10 % are discarded; medians of the others count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean, median

from peers_probe import Probe
from report import print_row

from kvloom.cli.bench_profile import StepMeter, count_work_of
from kvloom.config import DEFAULT_MODEL, EngineConfig
from kvloom.engine.core import EngineCore
from kvloom.engine.loading import load_engine
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.simulate.profile import Profile
from kvloom.simulate.replica import RequestRecord
from kvloom.simulate.results import Limits, Summary, summarise
from kvloom.simulate.routing import round_robin
from kvloom.simulate.run import Simulation, SimulationResult
from kvloom.simulate.setup import SimulatedEngine
from kvloom.simulate.trace import (
    Lengths,
    Selection,
    TraceRequest,
    Workload,
    generate,
    read_trace,
)

AZURE = Path(__file__).parents[2] / "shared" / "traces" / "azure_conv_2023.csv"
MAX_BANDWIDTH_MOVE = 0.10
NUM_ROUNDS = 3
OPTIONS = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 2048}

WORKLOADS: dict[str, Callable[[], list[TraceRequest]]] = {
    "32 x 128+128": lambda: generate(
        Workload(32, 0.0, Lengths(128, 128), Lengths(128, 128)), seed=0
    ),
    "azure / 16": lambda: read_trace(AZURE, Selection(num_requests=200, shrink=16)),
    "shared-prefix chat": lambda: generate(
        Workload(60, 4.0, Lengths(16, 64), Lengths(24, 48), Lengths(384, 384), 3), seed=0
    ),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared: medians over requests."""

    output_tokens_per_second: float
    first_token: float
    per_token: float

    @classmethod
    def of(cls, summary: Summary) -> Figures:
        """The three of a run."""
        assert summary.first_token is not None
        assert summary.per_token is not None
        return cls(summary.output_tokens_per_second, summary.first_token.p50, summary.per_token.p50)


class RealEngine:
    """Serves a trace in real time."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_runs = 0

    def serve(self, requests: Sequence[TraceRequest]) -> list[RequestRecord]:
        """Records like the simulation's."""
        self._core.manager.reset_prefix_cache()
        self._num_runs += 1
        records: dict[str, RequestRecord] = {}
        num_arrived, start = 0, time.perf_counter()
        while num_arrived < len(requests) or self._core.has_unfinished_requests():
            now = time.perf_counter() - start
            while num_arrived < len(requests) and requests[num_arrived].arrival <= now:
                self._add(num_arrived, requests[num_arrived], records)
                num_arrived += 1
            if not self._core.has_unfinished_requests():
                time.sleep(max(requests[num_arrived].arrival - now, 0.0))
                continue
            events = self._core.step()
            now = time.perf_counter() - start
            for event in events:
                record = records[event.req_id]
                record.num_output_tokens += len(event.new_token_ids)
                record.first_token = record.first_token or now
                if event.finish_reason is not None:
                    record.finished = now
        return list(records.values())

    def _add(self, index: int, request: TraceRequest, records: dict[str, RequestRecord]) -> None:
        req_id, num_prompt = f"{self._num_runs}-{index}", request.num_prompt_tokens
        params = ResolvedSamplingParams(
            seed=0, max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
        )
        vocab_size = self._core.executor.vocab_size
        # Any id will do: what makes prompts alike are equal runs of them.
        ids = [100 + token_id * 7 % (vocab_size - 100) for token_id in request.prompt_token_ids()]
        records[req_id] = RequestRecord(index, 0, request.arrival, num_prompt, request.arrival)
        self._core.add_requests([Request(req_id, ids, params)])


def main() -> None:
    """Print, per workload, the ratios of simulated to real figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    config = EngineConfig.from_options({"model": args.model, **OPTIONS})
    core = load_engine(config).core
    truth = Truth(core, config)
    for name in args.workload or WORKLOADS:
        truth.compare(name, args.rounds)
    core.shutdown()


class Truth:
    """The engine, its profile as it is at the moment, and what a simulation makes of it."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self._core = core
        self._work = count_work_of(config)
        self._engine = SimulatedEngine(config, core.plan, self._work, 0)
        self._probe = Probe(2)
        StepMeter(core).warm_up()

    def compare(self, name: str, num_rounds: int) -> None:
        """Print a row for one workload."""
        requests = WORKLOADS[name]()
        rounds: list[tuple[Figures, Figures]] = []
        num_discarded = 0
        while len(rounds) < num_rounds and num_discarded <= 2 * num_rounds:
            before = self._probe.read_bytes_per_s()
            profile = self._profile()
            real = self._serve(requests)
            profiles = (profile, self._profile())
            after = self._probe.read_bytes_per_s()
            if abs(after / before - 1) > MAX_BANDWIDTH_MOVE:
                num_discarded += 1
                continue
            rounds.append((self._simulate(profiles, requests), real))
        if rounds:
            ratios = (
                f"{what} {median(getattr(a, field) / getattr(b, field) for a, b in rounds):.2f}"
                for what, field in (
                    ("throughput", "output_tokens_per_second"),
                    ("first token", "first_token"),
                    ("per token", "per_token"),
                )
            )
            measured = f"{', '.join(ratios)} ({len(rounds)} rounds, {num_discarded} discarded)"
        else:
            measured = f"no steady round out of {num_discarded}"
        print_row(f"simulated / real, {name}", measured)

    def _profile(self) -> Profile:
        meter = StepMeter(self._core)
        meter.measure()
        return meter.profile(self._work)

    def _serve(self, requests: Sequence[TraceRequest]) -> Figures:
        records = RealEngine(self._core).serve(requests)
        return Figures.of(summarise(self._result(records), Limits()))

    def _simulate(self, profiles: Sequence[Profile], requests: Sequence[TraceRequest]) -> Figures:
        """The mean over the profiles from before and from after."""
        found = []
        for profile in profiles:
            cost = profile.cost(self._work, 1)
            result = Simulation(self._engine, cost, 1, round_robin).run(requests)
            found.append(astuple(Figures.of(summarise(result, Limits()))))
        return Figures(*map(fmean, zip(*found, strict=True)))

    def _result(self, records: list[RequestRecord]) -> SimulationResult:
        """The records in the shape that is summed up; its replica never ran."""
        idle = Simulation(self._engine, _NoCost(), 1, round_robin).replicas
        return SimulationResult(records, idle, [], 0.0)


class _NoCost:
    """Of replicas that never run."""

    def step_seconds(self, step: object) -> float:
        raise AssertionError(f"a replica ran {step}")


if __name__ == "__main__":
    main()
