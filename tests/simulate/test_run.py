"""The clock, the routes and the counts: by hand where steps take a second, else by definition."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvloom.kv.memory import GIB
from kvloom.simulate.cost import RooflineCost
from kvloom.simulate.devices import find_device
from kvloom.simulate.results import Distribution, Limits, as_data, summarise
from kvloom.simulate.routing import ROUTES
from kvloom.simulate.run import MAX_SAMPLES, Sample, Simulation, SimulationResult, Timeline
from kvloom.simulate.trace import Selection, TraceRequest, read_trace
from kvloom.simulate.work import StepShape
from simulated_engines import UnitCost, make_engine, requests_of

DATA = Path(__file__).parents[1] / "data"
SHARED_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def run(requests, num_replicas=1, route="round-robin", **options) -> SimulationResult:
    """Each step is scheduled when the one before it has ended, unless `options` say otherwise."""
    engine = make_engine(**{"has_async_stepping": False, **options})
    simulation = Simulation(engine, UnitCost(), num_replicas, ROUTES[route])
    result = simulation.run(requests)
    for replica in simulation.replicas:
        replica._manager.check()
        assert not replica.live
    return result


def times(result: SimulationResult) -> list[tuple[float | None, ...]]:
    return [(r.started, r.first_token, r.finished) for r in result.records]


def test_a_request_begins_with_the_step_after_its_arrival():
    """Steps 0-1 and 1-2 are the first one's; what arrives at 0.5 begins at 1, at 7.5 at once."""
    result = run(requests_of((0.0, 3, 2), (0.5, 3, 3), (7.5, 3, 1)))
    assert times(result) == [(0.0, 1.0, 2.0), (1.0, 2.0, 4.0), (7.5, 8.5, 8.5)]


class PauseCost:
    """Steps of a second; those before which the engine was idle take another half."""

    def step_seconds(self, step: StepShape) -> float:
        return 1.5 if step.is_after_idle else 1.0


def test_the_first_step_after_a_pause_is_told_apart():
    """The engine is idle before 0, and from 4.5 to 7.5; at 10 there is no pause between."""
    requests = requests_of((0.0, 3, 2), (0.5, 3, 3), (7.5, 3, 2), (10.0, 3, 1))
    engine = make_engine(has_async_stepping=False)
    result = Simulation(engine, PauseCost(), 1, ROUTES["round-robin"]).run(requests)
    assert times(result) == [(0.0, 1.5, 2.5), (1.5, 2.5, 4.5), (7.5, 9.0, 10.0), (10.0, 11.0, 11.0)]


def test_each_replica_pauses_by_itself():
    requests = requests_of((0.0, 3, 4), (1.0, 3, 1), (1.5, 3, 1))
    engine = make_engine(has_async_stepping=False)
    result = Simulation(engine, PauseCost(), 2, ROUTES["round-robin"]).run(requests)
    assert times(result) == [(0.0, 1.5, 4.5), (1.0, 2.5, 2.5), (1.5, 2.5, 2.5)]


def test_what_arrives_when_a_step_ends_joins_the_next():
    result = run(requests_of((0.0, 3, 2), (1.0, 3, 1)))
    assert times(result) == [(0.0, 1.0, 2.0), (1.0, 2.0, 2.0)]


def test_a_step_that_was_scheduled_ahead_takes_nobody_new():
    """What arrives at 0.5 finds step 1-2 scheduled, and begins at 2; at 7.5 the engine is idle."""
    requests = requests_of((0.0, 3, 4), (0.5, 3, 2), (7.5, 3, 1))
    result = run(requests, has_async_stepping=True)
    assert times(result) == [(0.0, 1.0, 4.0), (2.0, 3.0, 4.0), (7.5, 8.5, 8.5)]


def test_a_prompt_beyond_the_budget_takes_several_steps():
    result = run(requests_of((0.0, 10, 1)), max_num_batched_tokens=4)
    assert times(result) == [(0.0, 3.0, 3.0)]


def test_seats_are_waited_for():
    result = run(requests_of((0.0, 3, 4), (0.0, 3, 1)), max_num_seqs=1)
    assert times(result) == [(0.0, 1.0, 4.0), (4.0, 5.0, 5.0)]


def test_requests_that_can_never_run_are_counted_and_the_others_served():
    result = run(requests_of((0.0, 40, 1), (0.0, 3, 1)), num_blocks=6, max_model_len=16)
    first, second = result.records
    assert "shorten" in first.error
    assert second.error is None
    summary = summarise(result, Limits())
    assert (summary.num_requests, summary.num_failed) == (2, 1)


def test_summary_by_hand():
    """Three requests; the second waits 4 s for its seat and then has its only token at once."""
    rows = ((0.0, 3, 4), (0.0, 5, 1), (10.0, 2, 3))
    summary = summarise(run(requests_of(*rows), max_num_seqs=1), Limits(2.0, 1.0))
    assert summary.seconds == 13.0
    assert summary.output_tokens_per_second == pytest.approx(8 / 13)
    assert summary.prompt_tokens_per_second == pytest.approx(10 / 13)
    assert summary.requests_per_second == pytest.approx(3 / 13)
    assert summary.queueing == Distribution(mean=4 / 3, p50=0.0, p90=4.0, p99=4.0, max=4.0)
    assert summary.first_token == Distribution(mean=7 / 3, p50=1.0, p90=5.0, p99=5.0, max=5.0)
    assert summary.per_token == Distribution(mean=1.0, p50=1.0, p90=1.0, p99=1.0, max=1.0)
    assert summary.goodput == pytest.approx(2 / 13)
    assert summary.good_share == pytest.approx(2 / 3)
    assert summary.num_steps == 8
    assert summary.busy_share == pytest.approx(8 / 13)


def test_percentiles_are_values_that_occurred():
    values = [float(value) for value in range(1, 201)]
    assert Distribution.of(values[::-1]) == Distribution(100.5, 100.0, 180.0, 198.0, 200.0)
    assert Distribution.of([]) is None


def test_preempted_requests_are_counted_and_finish():
    """Two requests of 8 + 12 tokens need 5 blocks each at their end; there are 7."""
    result = run(requests_of((0.0, 8, 12), (0.0, 8, 12)), num_blocks=8, max_model_len=24)
    summary = summarise(result, Limits())
    assert summary.num_preemptions == result.records[1].num_preemptions == 1
    assert summary.num_lost_tokens > 0
    assert [r.num_output_tokens for r in result.records] == [12, 12]
    assert summary.peak_used_share == 1.0


def test_made_up_outputs_are_in_no_prompt():
    """The first's blocks are its prompt's one, and one of outputs, which no later prompt has."""
    first = TraceRequest(0.0, ((0, 4),), 8)
    rest = [TraceRequest(20.0, ((token_id, 12),), 1) for token_id in (0, 1, 2)]
    result = run([first, *rest])
    assert [record.num_cached_tokens for record in result.records] == [0, 4, 0, 0]


def test_round_robin_takes_turns():
    result = run(requests_of(*[(0.0, 3, 2)] * 5), 2)
    assert [r.replica for r in result.records] == [0, 1, 0, 1, 0]


def test_the_least_loaded_replica_is_taken():
    """Tokens to come: 103 | 0, then 103 | 6, 103 | 12, and so on."""
    result = run(requests_of((0.0, 3, 100), *[(0.0, 3, 3)] * 5), 2, "least-loaded")
    assert [r.replica for r in result.records] == [0, 1, 1, 1, 1, 1]


def test_a_prefix_draws_requests_unless_the_line_is_long():
    first = TraceRequest(0.0, ((7, 40),), 1)
    again = TraceRequest(5.0, ((7, 40), (8, 4)), 1)
    other = TraceRequest(5.0, ((9, 40),), 60)
    assert [r.replica for r in run([first, other, again], 2, "longest-prefix").records] == [0, 0, 1]
    short = replace(other, prompt=((9, 4),), num_output_tokens=4)
    assert [r.replica for r in run([first, short, again], 2, "longest-prefix").records] == [0, 0, 0]


def test_the_timeline_samples_evenly_and_never_too_often():
    timeline = Timeline(1.0)
    for _ in range(3 * MAX_SAMPLES):
        timeline.add(Sample(timeline.next_seconds, 0, 0, []))
    assert len(timeline.samples) < MAX_SAMPLES
    distances = {
        b.seconds - a.seconds for a, b in zip(timeline.samples, timeline.samples[1:], strict=False)
    }
    assert distances == {timeline.interval}
    assert timeline.samples[0].seconds == 0.0


def test_samples_show_who_runs_who_waits_and_whose_blocks():
    """At most one runs. It holds 2 blocks (5 of 4 tokens each), then 3 of 10 usable ones."""
    result = run(requests_of((0.0, 5, 6), (0.0, 5, 6)), num_blocks=11, max_num_seqs=1)
    by_time = {round(s.seconds, 3): s for s in result.samples}
    assert (by_time[0.5].num_running, by_time[0.5].num_waiting) == (1, 1)
    assert by_time[0.5].used_shares == [0.2]
    assert by_time[5.5].used_shares == [0.3]
    assert (by_time[7.5].num_running, by_time[7.5].num_waiting) == (1, 0)
    # Each stores 5 to 10 tokens in 6 s: 4 s in 2 blocks, 2 s in 3. Samples are 0.1 s apart.
    (mean,) = summarise(result, Limits()).mean_used_shares
    assert mean == pytest.approx(0.2 + 0.1 * 2 / 6, abs=0.01)


def hits_by_hash_ids(requests: list[TraceRequest]) -> list[int]:
    """Tokens of each prompt whose full hash blocks were asked for before, but for its last one."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        full = [hash_id for hash_id, count in request.prompt if count == 512]
        is_known = [hash_id in seen for hash_id in full]
        num_known = is_known.index(False) if False in is_known else len(full)
        hits.append(min(num_known, (request.num_prompt_tokens - 1) // 512) * 512)
        seen.update(full)
    return hits


def check_mooncake_hits(trace: Path, num_requests: int) -> None:
    requests = read_trace(trace, Selection(num_requests))
    engine = make_engine(
        block_size=512, kv_bytes=1 << 59, max_num_seqs=1000, max_num_batched_tokens=8192
    )
    cost = RooflineCost(engine.work, find_device("h100"))
    result = Simulation(engine, cost, 1, ROUTES["round-robin"]).run(requests)
    expected = hits_by_hash_ids(requests)
    assert [record.num_cached_tokens for record in result.records] == expected
    summary = summarise(result, Limits())
    assert summary.num_hit_tokens == sum(expected) > 0
    assert summary.num_queried_tokens == sum(r.num_prompt_tokens for r in requests)


def test_mooncake_hits_are_those_of_its_hash_ids():
    check_mooncake_hits(DATA / "mooncake_conversation_300.jsonl", 300)


@pytest.mark.full
@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the whole trace is not here")
def test_mooncake_hits_are_those_of_its_hash_ids_in_the_whole_trace():
    check_mooncake_hits(SHARED_TRACE, 12_000)


@pytest.mark.full
@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the whole trace is not here")
def test_the_whole_trace_is_served_by_16_replicas():
    """As in bench/simulate_scale.py, which says how long it takes."""
    requests = read_trace(SHARED_TRACE, Selection(12_000))
    engine = make_engine(
        "llama-3.3-70b",
        block_size=16,
        kv_bytes=110 * GIB,
        tensor_parallel_size=8,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    cost = RooflineCost(engine.work, find_device("h100"), 8)
    simulation = Simulation(engine, cost, 16, ROUTES["round-robin"])
    result = simulation.run(requests)
    for replica in simulation.replicas:
        replica._manager.check()
        assert replica.cache_stats.num_used_blocks == 0
    assert [r.num_output_tokens for r in result.records] == [r.num_output_tokens for r in requests]


def test_the_same_input_gives_the_same_numbers():
    requests = read_trace(DATA / "mooncake_conversation_300.jsonl", Selection(40, shrink=16))
    engine = make_engine("llama-3.1-8b", block_size=16, kv_bytes=GIB)
    cost = RooflineCost(engine.work, find_device("h100"))

    def observe(route: str) -> str:
        result = Simulation(engine, cost, 3, ROUTES[route]).run(requests)
        records = [asdict(record) for record in result.records]
        return json.dumps([as_data(summarise(result, Limits()), result.samples), records])

    for route in ROUTES:
        assert observe(route) == observe(route)
