"""Many streams with random aborts for a while: nothing is left over, and memory stays flat."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

NUM_STREAMS = 64
CI_SECONDS = 15
# Python's allocator keeps arenas; a leak of one request's state per request is far more.
MAX_GROWTH_BYTES = 24 * 2**20


@pytest.fixture
def server(tiny_folder: Path) -> Iterator[tuple[int, str]]:
    """A server in a process of its own, whose memory is its own: process id and address."""
    options = ["--num-blocks", "400", "--backend", "reference", "--port", "0"]
    command = [sys.executable, "-m", "kvloom", "serve", str(tiny_folder), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().split()[-1]
        process.terminate()
        assert process.wait(timeout=120) == 0


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def put_load(url: str, seconds: float, seed: int) -> int:
    """Streams of random lengths, a third of them left early; how many there were."""
    rng, end, num_streams = random.Random(seed), time.monotonic() + seconds, 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal num_streams
        while time.monotonic() < end:
            num_streams += 1
            body = {
                "prompt": [rng.randrange(250) for _ in range(rng.randrange(1, 100))],
                "max_tokens": rng.randrange(1, 60),
                "stream": True,
            }
            num_lines = rng.randrange(20) if rng.random() < 1 / 3 else None
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_lines():
                    if num_lines is not None:
                        num_lines -= 1
                        if num_lines < 0:
                            break

    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        await asyncio.gather(*(one(client) for _ in range(NUM_STREAMS)))
    return num_streams


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(f"kvloom_{name}") and 'state="cached"' not in line
    )


def test_a_long_load_leaves_nothing(server: tuple[int, str], scale: int) -> None:
    pid, url = server
    asyncio.run(put_load(url, CI_SECONDS / 2, seed=1))
    warm = resident_bytes(pid)
    num_streams = asyncio.run(put_load(url, CI_SECONDS * scale, seed=2))
    assert num_streams > NUM_STREAMS
    for _ in range(1000):
        if gauge(url, "requests_running") == gauge(url, "requests_waiting") == 0:
            break
        time.sleep(0.05)
    for name in ("requests_running", "requests_waiting", "requests_preempted", "kv_blocks{"):
        assert gauge(url, name) == 0, name
    assert resident_bytes(pid) - warm < MAX_GROWTH_BYTES
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
