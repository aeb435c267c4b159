"""`kvloom bench`: steps are measured in the shapes asked for, and kept for the simulation."""

from __future__ import annotations

import json

import pytest

from kvloom.cli import bench_profile
from kvloom.cli.bench_profile import StepMeter, count_work_of, measure_profile
from kvloom.cli.main import main
from kvloom.config import EngineConfig
from kvloom.engine.loading import load_engine
from kvloom.simulate.profile import attention_bytes, attention_flops, read_profile
from kvloom.simulate.work import StepShape
from tiny_folder import make_tiny_folder

OPTIONS = {"backend": "reference", "max_num_batched_tokens": 48, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


class CostClock:
    """A clock that a step moves by what it holds: made-up costs that the profile must find."""

    IDLE_SECONDS = 0.004  # per token

    def __init__(self, work) -> None:
        self.now, self.work = 0.0, work
        self.is_idle = False
        self.steps: list[list[tuple[int, int]] | None] = []  # their chunks; None: a pause

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.is_idle = True
        self.steps.append(None)

    def step(self, chunks) -> None:
        self.now += self.cost(chunks)
        self.steps.append(chunks)
        if self.is_idle:
            self.now += self.IDLE_SECONDS * sum(num_tokens for _, num_tokens in chunks)
        self.is_idle = False

    def cost(self, chunks) -> float:
        seconds = 0.0
        for chunk in chunks:
            seconds += 0.001 * chunk[1] + 0.01
            if chunk[1] == 1:
                seconds += 1e-6 * attention_bytes(self.work, chunk)
            else:
                seconds += 1e-7 * attention_flops(self.work, chunk)
        return seconds


def make_config(folder, **options) -> EngineConfig:
    return EngineConfig.from_options({"model": str(folder), **OPTIONS, **options})


@pytest.fixture
def profile(folder, monkeypatch):
    return profile_by_clock(make_config(folder), monkeypatch)


def profile_by_clock(config, monkeypatch):
    clock = CostClock(count_work_of(config))
    step = bench_profile.EngineCore.step

    def timed_step(core):
        update = core.scheduler.update

        def watched(output, result):
            scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
            chunks = [
                (r.num_computed_tokens, scheduled[r.req_id]) for r in output.scheduled_new_reqs
            ]
            chunks += [
                (n, scheduled[r])
                for n, r in zip(cached.num_computed_tokens, cached.req_ids, strict=True)
            ]
            if chunks:
                clock.step(chunks)
            return update(output, result)

        core.scheduler.update = watched
        try:
            return step(core)
        finally:
            core.scheduler.update = update

    monkeypatch.setattr(bench_profile.EngineCore, "step", timed_step)
    monkeypatch.setattr(bench_profile.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(bench_profile.time, "sleep", clock.sleep)
    return measure_profile(config, 1), clock


def test_made_up_costs_are_found(profile):
    measured, clock = profile
    assert [count for count, _ in measured.chunk_seconds] == [1, 2, 4, 8, 16, 32, 48]
    assert [count for count, _ in measured.decode_seconds] == [1, 2, 4]
    for count, seconds in measured.chunk_seconds:
        assert seconds == pytest.approx(clock.cost([(0, count)]))
    assert measured.decode_seconds_per_byte == pytest.approx(1e-6, rel=0.01)
    assert measured.chunk_seconds_per_flop == pytest.approx(1e-7, rel=0.01)
    assert [count for count, _ in measured.idle_seconds] == [16, 48]
    for count, seconds in measured.idle_seconds:
        assert seconds == pytest.approx(count * clock.IDLE_SECONDS)


@pytest.mark.parametrize(
    "chunks",
    [[(0, 16)], [(0, 40)], [(48, 48)], [(100, 20)], [(200, 1)], [(20, 1)] * 4, [(200, 1)] * 3],
)
def test_the_simulation_reckons_what_steps_took(profile, chunks):
    """Between points there are straight lines; the attention of few tokens is next to nothing."""
    measured, clock = profile
    cost = measured.cost(clock.work, 1)
    step = StepShape(chunks, len(chunks))
    assert cost.step_seconds(step) == pytest.approx(clock.cost(chunks), rel=0.02)


def test_prompts_between_pauses_get_an_answer(profile):
    """As those of requests do: processors that are hardly used sleep more deeply."""
    steps = profile[1].steps
    pauses = [i for i, step in enumerate(steps) if step is None]
    for pause in pauses:
        (prompt,), *answer = steps[pause + 1 : pause + 9]
        assert (prompt[0], prompt[1]) in [(0, 16), (0, 48)]
        assert answer == [[(prompt[1] + i, 1)] for i in range(7)]
    assert len(pauses) == 10


@pytest.mark.parametrize(("max_num_seqs", "num_requests"), [(2, 2), (4, 4), (16, 16), (32, 16)])
def test_contexts_are_measured_with_many_requests(folder, monkeypatch, max_num_seqs, num_requests):
    """As many as a busy engine has: up to 16."""
    run_decode, calls = StepMeter._run_decode, []

    def watched(meter, count, num_prompt):
        calls.append((num_prompt, count))
        return run_decode(meter, count, num_prompt)

    monkeypatch.setattr(StepMeter, "_run_decode", watched)
    measure_profile(make_config(folder, max_num_seqs=max_num_seqs), 1)
    assert max(calls)[1] == num_requests  # of those with the longest prompt


def test_a_second_meter_finds_the_same(folder, profile):
    """Its prompts are those of the first, and still no hits."""
    measured, clock = profile
    core = load_engine(make_config(folder)).core
    for _ in range(2):
        meter = StepMeter(core)
        meter.measure()
        again = meter.profile(clock.work)
        assert dict(again.chunk_seconds) == pytest.approx(dict(measured.chunk_seconds))
    core.shutdown()


def test_a_profile_is_printed_saved_and_used(folder, tmp_path, capsys):
    file = tmp_path / "here.json"
    options = ["--backend", "reference", "--max-num-batched-tokens", "48", "--max-num-seqs", "4"]
    args = ["--model", str(folder), *options, "--num-blocks", "100", "--rounds", "1"]
    assert main(["bench", *args, "--save-profile", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "One more token each" in printed
    assert "after a pause" in printed
    saved = read_profile(file)
    assert (saved.model, saved.tensor_parallel_size) == (str(folder), 1)
    steps = ["--max-num-batched-tokens", "48", "--max-num-seqs", "4", "--dtype", "float32"]
    requests = ["--num-requests", "5", "--prompt-tokens", "8-30", "--output-tokens", "4"]
    assert main(["simulate", str(folder), "--profile", str(file), *steps, *requests, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["num_failed"] == 0
    assert data["per_token"]["p50"] > saved.decode_seconds[0][1] / 2


def test_drafts_are_refused(folder, capsys):
    assert main(["bench", "--model", str(folder), "--num-draft-tokens", "2"]) == 1
    assert "leave out --num-draft-tokens" in capsys.readouterr().err
