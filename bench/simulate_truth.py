"""The simulation's times against the engine's, on this machine, for three workloads.

A round is: profile, serve on the engine, profile again, simulate with both. Rounds in which
the memory bandwidth moved by more than 10 %, or other processes used more than 4 % of the
processors, are discarded; medians of the others count.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from peers_probe import Probe
from peers_process import TICK_SECONDS, busy_seconds
from peers_report import QUIET_SHARE
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
MAX_DISCARDED = 3  # rounds per round asked for
NUM_PROBES = 5  # of the bandwidth, whose median counts: it comes in bursts
NUM_ROUNDS = 3
OPTIONS = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 2048}

# By seed; the lengths of the first and the whole of the second are given.
WORKLOADS: dict[str, Callable[[int], list[TraceRequest]]] = {
    "32 x 128+128": lambda seed: generate(
        Workload(32, 0.0, Lengths(128, 128), Lengths(128, 128)), seed
    ),
    "azure / 16": lambda _seed: read_trace(AZURE, Selection(num_requests=200, shrink=16)),
    "shared-prefix chat": lambda seed: generate(
        Workload(60, 4.0, Lengths(16, 64), Lengths(24, 48), Lengths(384, 384), 3), seed
    ),
}
Result = TypeVar("Result")


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

    @classmethod
    def mean(cls, several: Iterable[Figures]) -> Figures:
        """Of each figure."""
        return cls(*map(fmean, zip(*map(astuple, several), strict=True)))

    def over(self, other: Figures) -> tuple[float, ...]:
        """The ratio of each figure to the other's."""
        return tuple(a / b for a, b in zip(astuple(self), astuple(other), strict=True))

    def __str__(self) -> str:
        first, each = (f"{1000 * value:.2f}" for value in (self.first_token, self.per_token))
        return f"{self.output_tokens_per_second:.1f} tokens/s, {first} ms, {each} ms"


def say_ratios(ratios: Iterable[float]) -> str:
    """Those of `Figures.over`."""
    names = ("throughput", "first token", "per token")
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True))


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
        prompts = [self._prompt_of(request) for request in requests]  # a client's, not our work
        num_arrived, start = 0, time.perf_counter()
        while num_arrived < len(requests) or self._core.has_unfinished_requests():
            now = time.perf_counter() - start
            while num_arrived < len(requests) and requests[num_arrived].arrival <= now:
                request, prompt = requests[num_arrived], prompts[num_arrived]
                records[self._add(num_arrived, request, prompt)] = RequestRecord(
                    num_arrived, 0, request.arrival, request.num_prompt_tokens, request.arrival
                )
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

    def _prompt_of(self, request: TraceRequest) -> list[int]:
        """Any ids will do: what makes prompts alike are equal runs of them."""
        vocab_size = self._core.executor.vocab_size
        return [100 + token_id * 7 % (vocab_size - 100) for token_id in request.prompt_token_ids()]

    def _add(self, index: int, request: TraceRequest, prompt: list[int]) -> str:
        params = ResolvedSamplingParams(
            seed=0, max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
        )
        req_id = f"{self._num_runs}-{index}"
        self._core.add_requests([Request(req_id, prompt, params)])
        return req_id


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


@dataclass(frozen=True, slots=True)
class Round:
    """What one round found, and how steady the machine was.

    Attributes:
        real: what the engine did.
        simulated: with the profiles from before and from after.
        bandwidth: bytes per second before and after.
        foreign_share: of the processors that others used while the round measured, at worst.
    """

    real: Figures
    simulated: tuple[Figures, Figures]
    bandwidth: tuple[float, float]
    foreign_share: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Simulated, as the mean of both, to real."""
        return Figures.mean(self.simulated).over(self.real)

    @property
    def is_steady(self) -> bool:
        """Whether it counts."""
        before, after = self.bandwidth
        return abs(after / before - 1) <= MAX_BANDWIDTH_MOVE and self.foreign_share <= QUIET_SHARE

    def __str__(self) -> str:
        before, after = (f"{value / 1e9:.1f}" for value in self.bandwidth)
        return (
            f"real {self.real}; simulated {' and '.join(map(str, self.simulated))}; "
            f"{say_ratios(self.ratios)}; "
            f"{before} and {after} GB/s, others used {self.foreign_share:.1%}"
            f"{'' if self.is_steady else '; discarded'}"
        )


class Truth:
    """The engine, its profile as it is at the moment, and what a simulation makes of it."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self._core = core
        self._work = count_work_of(config)
        self._engine = SimulatedEngine(config, core.plan, self._work, 0)
        self._num_cores = len(os.sched_getaffinity(0))
        self._probe = Probe(self._num_cores)
        self._foreign_share = 0.0  # of the round that runs
        StepMeter(core).warm_up()

    def compare(self, name: str, num_rounds: int) -> None:
        """Print a line for each round, and a row for the workload. Seeds are 0, 1, 2, ..."""
        found: list[tuple[float, ...]] = []
        num_discarded = 0
        while len(found) < num_rounds and num_discarded <= MAX_DISCARDED * num_rounds:
            seed = len(found)
            measured = self._round(WORKLOADS[name](seed))
            print(f"{name}, seed {seed}: {measured}", flush=True)
            if measured.is_steady:
                found.append(measured.ratios)
            else:
                num_discarded += 1
        rounds = f"{len(found)} rounds, {num_discarded} discarded"
        if found:
            medians = say_ratios(map(median, zip(*found, strict=True)))
            rounds = f"{medians} ({rounds})"
        print_row(f"simulated / real, {name}", rounds)

    def _round(self, requests: Sequence[TraceRequest]) -> Round:
        self._foreign_share = 0.0
        before = self._bandwidth()
        first = self._alone(self._profile)
        real = self._alone(lambda: self._serve(requests))
        second = self._alone(self._profile)
        after = self._bandwidth()
        simulated = self._simulate(first, requests), self._simulate(second, requests)
        return Round(real, simulated, (before, after), self._foreign_share)

    def _bandwidth(self) -> float:
        return median(self._probe.read_bytes_per_s() for _ in range(NUM_PROBES))

    def _alone(self, measure: Callable[[], Result]) -> Result:
        """Measure, and take note of what other processes used meanwhile."""
        start, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        result = measure()
        foreign = (busy_seconds() - busy) - (time.process_time() - own) - TICK_SECONDS
        share = foreign / ((time.perf_counter() - start) * self._num_cores)
        self._foreign_share = max(self._foreign_share, share)
        return result

    def _profile(self) -> Profile:
        meter = StepMeter(self._core)
        meter.measure()
        return meter.profile(self._work)

    def _serve(self, requests: Sequence[TraceRequest]) -> Figures:
        records = RealEngine(self._core).serve(requests)
        # The replica never ran: only the records count.
        idle = Simulation(self._engine, _NoCost(), 1, round_robin).replicas
        return Figures.of(summarise(SimulationResult(records, idle, [], 0.0), Limits()))

    def _simulate(self, profile: Profile, requests: Sequence[TraceRequest]) -> Figures:
        cost = profile.cost(self._work, 1)
        result = Simulation(self._engine, cost, 1, round_robin).run(requests)
        return Figures.of(summarise(result, Limits()))


class _NoCost:
    """Of replicas that never run."""

    def step_seconds(self, step: object) -> float:
        raise AssertionError(f"a replica ran {step}")


if __name__ == "__main__":
    main()
