"""Many streams with random aborts for a while: no stall, nothing left over, and flat memory."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from raw_http import post

NUM_STREAMS = 64
CI_SECONDS = 15
# Python's allocator keeps arenas; a leak of one request's state per request is far more.
MAX_GROWTH_BYTES = 24 * 2**20
MAX_STALL_SECONDS = 2.0
# A stream may wait for so many steps: its prompt's and others' chunks, a character in many tokens.
MAX_STEPS_PER_CHUNK = 8

# `kvloom serve`, whose steps are written to a file: start and seconds, by time.perf_counter.
SERVE = """
import sys
from kvloom.cli.main import main
from kvloom.server.metrics import EngineMetrics

file, step_ended = open(sys.argv[1], "w"), EngineMetrics.step_ended

def logged(metrics, report):
    step_ended(metrics, report)
    print(report.start, report.seconds, file=file)

EngineMetrics.step_ended = logged
status = main(sys.argv[2:])
file.close()
sys.exit(status)
"""


@dataclass(slots=True)
class Served:
    """A server in a process of its own, whose memory is its own; its steps once it has ended."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self) -> list[tuple[float, float]]:
        self.process.terminate()
        assert self.process.wait(timeout=120) == 0
        lines = self.log.read_text().splitlines()
        return [(float(start), float(seconds)) for start, seconds in map(str.split, lines)]


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path) -> Iterator[Served]:
    options = ["--num-blocks", "400", "--backend", "reference", "--port", "0"]
    log = tmp_path / "steps"
    command = [sys.executable, "-c", SERVE, str(log), "serve", str(tiny_folder), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield Served(process, process.stdout.readline().split()[-1], log)
        process.terminate()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def put_load(url: str, seconds: float, seed: int) -> list[list[float]]:
    """Streams of random lengths, a third of them left early.

    Returns:
        When each was asked for and when its chunks came, by time.perf_counter.
    """
    rng, end = random.Random(seed), time.monotonic() + seconds
    host, port = url.removeprefix("http://").split(":")

    async def one() -> list[float]:
        body = {
            "prompt": [rng.randrange(250) for _ in range(rng.randrange(1, 100))],
            "max_tokens": rng.randrange(1, 60),
            "stream": True,
        }
        num_chunks = rng.randrange(20) if rng.random() < 1 / 3 else -1
        reader, writer = await asyncio.open_connection(host, int(port))
        times = [time.perf_counter()]
        writer.write(post("/v1/completions", body, ["Connection: close"]))
        assert (await reader.readline()).split()[1] == b"200"
        while num_chunks != 0 and (line := await reader.readline()):
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                num_chunks -= 1
        writer.close()
        return times

    async def one_after_another() -> list[list[float]]:
        streams = []
        while time.monotonic() < end:
            streams.append(await one())
        return streams

    found = await asyncio.gather(*(one_after_another() for _ in range(NUM_STREAMS)))
    return [times for streams in found for times in streams]


def longest_stall(
    streams: Sequence[Sequence[float]], steps: Sequence[tuple[float, float]]
) -> float:
    """The longest wait for a chunk, less the time of the steps that it may take, in seconds.

    Load of the machine makes steps longer, and a wait may be as much longer. What is left over is
    time in which a chunk was made and not sent, or steps in which its stream had no turn.
    """
    starts = [start for start, _ in steps]

    def unexplained(begin: float, end: float) -> float:
        first, last = bisect_right(starts, begin), bisect_right(starts, end)
        seconds = (seconds for _, seconds in steps[max(first - 1, 0) : last])
        return end - begin - sum(heapq.nlargest(MAX_STEPS_PER_CHUNK, seconds))

    return max(unexplained(*wait) for times in streams for wait in itertools.pairwise(times))


def test_what_steps_explain_is_no_stall() -> None:
    steps = [(float(start), 0.5) for start in range(100)]
    assert longest_stall([[10.0, 10.5, 14.0]], steps) == 3.5 - 5 * 0.5
    assert longest_stall([[10.0, 40.0], [1.0, 2.0]], steps) == 30.0 - MAX_STEPS_PER_CHUNK * 0.5
    assert longest_stall([[10.0, 40.0]], [(9.0, 31.0)]) < 0


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(f"kvloom_{name}") and 'state="cached"' not in line
    )


def test_a_long_load_leaves_nothing(server: Served, scale: int) -> None:
    pid, url = server.process.pid, server.url
    asyncio.run(put_load(url, CI_SECONDS / 2, seed=1))
    warm = resident_bytes(pid)
    streams = asyncio.run(put_load(url, CI_SECONDS * scale, seed=2))
    assert len(streams) > NUM_STREAMS
    for _ in range(1000):
        if gauge(url, "requests_running") == gauge(url, "requests_waiting") == 0:
            break
        time.sleep(0.05)
    for name in ("requests_running", "requests_waiting", "requests_preempted", "kv_blocks{"):
        assert gauge(url, name) == 0, name
    grown = resident_bytes(pid) - warm
    assert grown < MAX_GROWTH_BYTES
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    stall = longest_stall(streams, server.stop())
    assert stall < MAX_STALL_SECONDS
