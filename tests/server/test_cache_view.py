"""What the live cache page is told, and `kvloom top` draws."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvloom.cli.main import main
from live_server import LiveServer, slow_steps


@contextmanager
def follow(live: LiveServer) -> Iterator[Iterator[dict[str, Any]]]:
    with httpx.stream("GET", f"{live.url}/cache/events", timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        yield (json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: "))


def apply(blocks: dict[int, list[Any]], update: dict[str, Any]) -> None:
    for block_id in update["freed"]:
        del blocks[block_id]
    for block_id, *block in update["blocks"]:
        blocks[block_id] = block


def test_changes_add_up_to_what_the_pool_holds(live: LiveServer) -> None:
    """A prompt and its twin: two shared blocks, then nothing but cached ones."""
    live.inspect(lambda core: core.manager.reset_prefix_cache())
    prompt = list(range(100, 140))
    body = {"prompt": [prompt, prompt], "max_tokens": 200, "ignore_eos": True, "stream": True}
    blocks: dict[int, list[Any]] = {}
    with follow(live) as events:
        pool = next(events)
        assert (pool["type"], pool["num_blocks"]) == ("pool", 200)
        assert pool["groups"] == [{"kind": "full", "block_size": 16, "num_layers": 2}]
        apply(blocks, next(events))
        assert blocks == {}

        is_seen = slow_steps(live)
        try:
            with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60):
                for update in events:
                    apply(blocks, update)
                    running = [r for r in update["requests"] if r["status"] == "running"]
                    if len(running) == 2:
                        break
        finally:
            is_seen.set()
        shared = [block for block in blocks.values() if len(block[2]) == 2]
        assert sorted(block[3] for block in shared) == [0, 1]
        assert all(block[1] for block in shared), "shared blocks carry a hash"
        assert {r["num_cached_tokens"] for r in running} == {0, 32}
        live.check_idle()
        for update in events:
            apply(blocks, update)
            if not update["requests"]:
                break
        assert blocks, "full blocks stay cached"
        assert all(block[2] == [] and block[1] for block in blocks.values())
        assert blocks.keys() == live.state.metrics.tracker.cached.keys()


def test_the_page_is_one_file(live: LiveServer) -> None:
    page = live.get("/cache")
    assert page.headers["content-type"].startswith("text/html")
    assert "src=" not in page.text
    assert "https://" not in page.text
    assert "cache/events" in page.text


def test_top_draws_the_state_once(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", live.url, "--once"]) == 0
    text = capsys.readouterr().out
    assert "of 199 in use" in text
    assert "0 run, 0 wait" in text


def test_top_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
