"""Metrics: all there at 0, then what the requests did; block histograms by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvloom.kv.events import BlockEvicted, BlockStored, CacheCleared
from kvloom.server.block_tracker import BlockTracker
from kvloom.server.metrics import METRICS, EngineMetrics
from kvloom.step import CachedRequestData, NewRequestData, SchedulerOutput
from live_server import TINY_OPTIONS, LiveServer, run_server

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"kvloom_{name}", tuple(sorted(labels.items()))]


def read(live: LiveServer) -> Values:
    return parse(live.get("/metrics").text)


def test_all_are_there_at_zero() -> None:
    values = parse(EngineMetrics().text().decode())
    names = {name for name, _ in values}
    for metric in METRICS:
        full = f"kvloom_{metric.name}"
        assert full in names or f"{full}_count" in names, full
    assert {v for (name, _), v in values.items() if not name.endswith("_created")} == {0.0}


def test_requests_are_counted(tiny_folder: Path) -> None:
    with run_server({"model": str(tiny_folder), **TINY_OPTIONS}) as live:
        usable = live.engine.stats.cache.num_usable_blocks
        assert value(read(live), "kv_blocks_free") == usable
        prompt = list(range(40))
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            assert live.post("/v1/completions", body).status_code == 200
        live.check_idle()
        values = read(live)
        assert value(values, "prompt_tokens_total") == 80
        assert value(values, "generated_tokens_total") == 10
        assert value(values, "prefix_queried_tokens_total") == 80
        assert value(values, "prefix_hit_tokens_total") == 32  # two whole blocks of 16
        assert value(values, "requests_finished_total", reason="length") == 2
        assert value(values, "time_to_first_token_seconds_count") == 2
        assert value(values, "queue_seconds_count") == 2
        assert value(values, "time_per_output_token_seconds_count") == 2
        # 44 tokens are stored: two full blocks, which both requests share.
        assert value(values, "kv_blocks", group="0", state="cached") == 2
        assert value(values, "kv_blocks", group="0", state="used") == 0
        assert value(values, "kv_blocks_free") == usable - 2
        steps = live.engine.stats.steps.num_steps
        assert value(values, "step_host_seconds_count") == steps
        assert value(values, "step_device_seconds_count") == steps


def test_preemptions_are_told_apart(tiny_folder: Path) -> None:
    """Two requests of 8 blocks over 9 usable ones: the younger one gives way to the older."""
    options = {"model": str(tiny_folder), **TINY_OPTIONS, "num_blocks": 10, "block_size": 16}
    with run_server({**options, "max_model_len": 128, "has_prefix_cache": False}) as live:
        body = {"prompt": [[1] * 40, [2] * 40], "max_tokens": 80, "ignore_eos": True}
        assert live.post("/v1/completions", body).status_code == 200
        live.check_idle()
        values = read(live)
        count = live.engine.stats.scheduler.num_preemptions
        assert count >= 1
        assert (
            value(values, "preemptions_total", reason="older_request")
            + value(values, "preemptions_total", reason="own_growth")
            == count
        )
        assert value(values, "requests_preempted") == 0


def test_drafts_are_counted_and_change_no_answer(tiny_folder: Path) -> None:
    body = {"prompt": [1, 2, 3] * 9, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body["logprobs"] = 1
    answers = []
    for drafts in ({}, {"num_draft_tokens": 4, "min_ngram_tokens": 1}):
        with run_server({"model": str(tiny_folder), **TINY_OPTIONS, **drafts}) as live:
            answer = live.post("/v1/completions", body).json()
            stats = live.engine.stats.scheduler
            values = read(live)
            assert value(values, "draft_tokens_total") == stats.num_draft_tokens
            assert value(values, "accepted_draft_tokens_total") == stats.num_accepted_tokens
            assert value(values, "generated_tokens_total") == 40
        [choice] = answer["choices"]
        answers.append((choice["text"], choice["logprobs"]["tokens"], answer["usage"]))
    assert answers[0] == answers[1]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_padding_is_counted_and_changes_no_answer(tiny_folder: Path) -> None:
    """Steps of 8: the prompt's first 8 tokens, its last one, and four of the tokens generated."""
    body = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9], "max_tokens": 5, "temperature": 0}
    texts = []
    for shapes in ({}, {"num_batched_tokens_buckets": (8,)}):
        with run_server({"model": str(tiny_folder), **TINY_OPTIONS, **shapes}) as live:
            answer = live.post("/v1/completions", {**body, "ignore_eos": True}).json()
            texts.append(answer["choices"][0]["text"])
            padding = value(read(live), "padding_tokens_total")
            assert padding == (5 * 7 if shapes else 0)
    assert texts[0] == texts[1]


def output(*new: NewRequestData) -> SchedulerOutput:
    return SchedulerOutput(
        list(new), CachedRequestData(), {}, 0, {}, {}, [0], set(), [], {}, None, None, []
    )


def new_request(block_ids: tuple[list[int], ...], num_computed: int) -> NewRequestData:
    return NewRequestData("r", [], [], None, block_ids, num_computed)  # type: ignore[arg-type]


def test_blocks_live_from_their_hash_to_their_eviction() -> None:
    evicted: list[tuple[float, int]] = []
    tracker = BlockTracker(lambda seconds, reuses: evicted.append((seconds, reuses)))
    tracker.group_block_sizes = (4, 8)
    stored = [BlockStored(1, 0, b"a"), BlockStored(2, 0, b"b"), BlockStored(3, 1, b"c")]
    tracker.take_events(stored, now=10.0)
    # 8 computed tokens: two blocks of group 0, one of group 1 whose column is null.
    tracker.count_hits(output(new_request(([1, 2, 9], [0, 7]), 8)))
    tracker.count_hits(output(new_request(([1, 8], [3]), 4)))
    assert {i: b.num_reuses for i, b in tracker.cached.items()} == {1: 2, 2: 1, 3: 0}
    tracker.take_events([BlockEvicted(2, 0, b"b")], now=15.0)
    assert evicted == [(5.0, 1)]
    tracker.take_events([CacheCleared(2)], now=20.0)
    assert sorted(evicted[1:]) == [(10.0, 0), (10.0, 2)]
    assert not tracker.cached


def test_the_readme_has_the_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    if "kvloom_requests_running" not in readme:
        pytest.skip("the README has no server section yet")
    rows = dict(re.findall(r"\| `kvloom_(\w+)`[^|]*\| (\w+) \|", readme))
    assert rows == {m.name: m.kind.__name__.lower() for m in METRICS}
