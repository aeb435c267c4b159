"""Latency over HTTP: time to first token and between tokens, beside vLLM's and llama.cpp's servers.

    bench/server_latency.py --peers FOLDER --models FOLDER [--rounds 4] [--out FOLDER]

The folders are those of peers.py. Each server is started once and stopped (SIGSTOP) while others
answer. Texts are checked first. A round takes each number of clients in turn, and with it all
servers one after another, in an order that rotates. All clients ask at once, each for a stream of
its own prompt, which no server has seen before; all servers get the same prompts and processors.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import text_check
from peers import say, with_equal_prompts
from peers_cells import MODELS
from peers_engines import Places, engine_commands
from peers_probe import Probe
from peers_prompts import PromptMaker
from peers_start import make_parser, prepare

from kvloom.tokenizer import load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint

HOST = "127.0.0.1"
NAME = "bench"  # of the model
CLIENTS = (1, 8, 32)
REQUESTS_OF_ONE = 3  # a single client asks so often per round
NUM_PROMPT_TOKENS = 128
NUM_OUTPUT_TOKENS = 64
START_SECONDS = 180
WARM_UP = -1  # its round
SERVERS = ("kvloom bf16", "vLLM bf16", "kvloom Q4_1", "llama.cpp Q4_1")
PAIRS = (("kvloom bf16", "vLLM bf16"), ("kvloom Q4_1", "llama.cpp Q4_1"))


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: seconds from the request to its first token, then per token; and its text."""

    first: float
    per_token: float
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One stream of a round."""

    round: int
    num_clients: int
    server: str
    stream: Stream


class ServerProcess:
    """A server and the processes it starts, asleep unless awake() was called last."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it on a port of its own; `command` has {port} where that belongs."""
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                cwd=log.parent,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers; then it sleeps."""
        end = time.monotonic() + START_SECONDS
        while not asyncio.run(is_ready(self.port)):
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{self._process.args} did not start; its log says why")
            time.sleep(0.1)
        self.sleep()

    def sleep(self) -> None:
        """Take no processor time."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def awake(self) -> None:
        """Go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and what it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


async def is_ready(port: int) -> bool:
    """Whether /health says 200."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
    status = await reader.readline()
    writer.close()
    return b" 200 " in status


async def ask(port: int, fields: Mapping[str, Any]) -> Stream:
    """Stream one completion, with as little work on this side as can be."""
    body = json.dumps({"model": NAME, "temperature": 0, "stream": True, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{status!r}: {(await reader.read()).decode()}")
    arrivals: list[tuple[float, bytes]] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            arrivals.append((time.perf_counter(), line))
    writer.close()
    return read_stream(start, arrivals)


def read_stream(start: float, arrivals: Sequence[tuple[float, bytes]]) -> Stream:
    """From chunks with the time each came."""
    chunks = [(at, json.loads(line[6:])) for at, line in arrivals]
    texts = [(at, c["choices"][0]["text"]) for at, c in chunks if c["choices"]]
    num_tokens = next(c["usage"]["completion_tokens"] for _, c in reversed(chunks) if c["usage"])
    times = [at for at, text in texts if text]
    per_token = (times[-1] - times[0]) / max(num_tokens - 1, 1)
    return Stream(times[0] - start, per_token, "".join(text for _, text in texts))


async def ask_all(port: int, prompts: Sequence[str], fields: Mapping[str, Any]) -> list[Stream]:
    """All at once."""
    return await asyncio.gather(*(ask(port, {**fields, "prompt": p}) for p in prompts))


def start_servers(places: Places, out: Path) -> dict[str, ServerProcess]:
    """Start all of them, one after another."""
    commands = engine_commands(places, {})
    llama, folder, gguf = commands["llama"], str(places.folder), str(places.gguf)
    shared = ("--port", "{port}")
    ours = (sys.executable, "-m", "kvloom", "serve", "--served-model-name", NAME, *shared)
    ours = (*ours, "--max-model-len", "4096")
    vllm = (places.python("vllm"), "-m", "vllm.entrypoints.openai.api_server", *shared)
    vllm = (*vllm, "--served-model-name", NAME, "--host", HOST, "--enforce-eager")
    vllm = (*vllm, "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64")
    binaries = llama.options["bin"]
    cpp = (f"{binaries}/llama-server", "--host", HOST, *shared, *llama.options["arguments"])
    starts: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
        "kvloom bf16": ((*ours, folder), {}),
        "vLLM bf16": ((*vllm, "--model", folder), commands["vllm"].environment),
        "kvloom Q4_1": ((*ours, gguf), {}),
        "llama.cpp Q4_1": ((*cpp, "--model", gguf), {"LD_LIBRARY_PATH": binaries}),
    }
    servers: dict[str, ServerProcess] = {}
    try:
        for name, (command, environment) in starts.items():
            log = out / f"server {name}.log"
            servers[name] = ServerProcess(command, environment, log)
            servers[name].wait()
            say(f"{name}: ready")
    except BaseException:
        close_servers(servers)
        raise
    return servers


def close_servers(servers: Mapping[str, ServerProcess]) -> None:
    """End all of them."""
    for server in servers.values():
        server.close()


def check_texts(servers: Mapping[str, ServerProcess], tokenizer: Any, places: Places) -> list[str]:
    """The text check's lines of the report."""
    chats = [[{"role": "user", "content": question}] for question in text_check.QUESTIONS]
    prompts = [tokenizer.render_chat(chat) for chat in chats]
    fields = {"max_tokens": text_check.MAX_TOKENS, "stream_options": {"include_usage": True}}
    texts = {}
    for name, server in servers.items():
        server.awake()
        texts[name] = [s.text for s in asyncio.run(ask_all(server.port, prompts, fields))]
        server.sleep()
    scores = text_check.score_texts(places.python("vllm"), places.folder, prompts, texts)
    return text_check.report_lines(scores)


def run_round(
    number: int, servers: Mapping[str, ServerProcess], prompts: PromptMaker, probe: Probe
) -> tuple[list[Sample], list[float]]:
    """All streams of a round, and the bandwidth (bytes/s) beside each measurement."""
    turn = number % len(SERVERS)
    order = [*SERVERS[turn:], *SERVERS[:turn]]
    fields = {
        "max_tokens": NUM_OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    samples, bandwidths = [], []
    for num_clients in CLIENTS:
        for name in order:
            bandwidths.append(probe.read_bytes_per_s())
            servers[name].awake()
            for attempt in range(REQUESTS_OF_ONE if num_clients == 1 else 1):
                seed = f"{number} {num_clients} {attempt}"
                texts = prompts.make(num_clients, NUM_PROMPT_TOKENS, seed)
                streams = asyncio.run(ask_all(servers[name].port, texts, fields))
                samples += [Sample(number, num_clients, name, stream) for stream in streams]
            servers[name].sleep()
            say(f"round {number}, {num_clients} clients, {name}: {summary(streams)}")
    return samples, bandwidths


def summary(streams: Sequence[Stream]) -> str:
    """Medians over streams."""
    first = statistics.median(s.first for s in streams)
    return f"{1e3 * first:.0f} / {1e3 * statistics.median(s.per_token for s in streams):.1f}"


def ratios(samples: Sequence[Sample], num_clients: int, ours: str, theirs: str) -> list[float]:
    """Medians over rounds of their time to ours, taken round by round: first token, per token."""
    found = []
    for field in ("first", "per_token"):
        rounds: dict[int, dict[str, list[float]]] = {}
        for sample in samples:
            if sample.num_clients == num_clients:
                names = rounds.setdefault(sample.round, {})
                names.setdefault(sample.server, []).append(getattr(sample.stream, field))
        per_round = (
            statistics.median(names[theirs]) / statistics.median(names[ours])
            for names in rounds.values()
        )
        found.append(statistics.median(per_round))
    return found


def print_report(samples: Sequence[Sample], bandwidths: Sequence[float]) -> None:
    """Lines of Markdown."""
    columns = [f"{count} client{'s' * (count > 1)}" for count in CLIENTS]
    print(f"| first token / each further one, ms | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(CLIENTS))
    for name in SERVERS:
        cells = (
            summary([s.stream for s in samples if (s.server, s.num_clients) == (name, count)])
            for count in CLIENTS
        )
        print(f"| {name} | {' | '.join(cells)} |")
    for ours, theirs in PAIRS:
        rows = (ratios(samples, count, ours, theirs) for count in CLIENTS)
        cells = (f"{first:.1f} / {further:.1f}" for first, further in rows)
        print(f"| {theirs}: times that of {ours} | {' | '.join(cells)} |")
    low, *_, high = sorted(b / 1e9 for b in bandwidths)
    num_rounds = len({sample.round for sample in samples})
    print(
        f"\nMedians of {num_rounds} rounds; {NUM_PROMPT_TOKENS} tokens in, {NUM_OUTPUT_TOKENS} out,"
        f" all clients at once; read bandwidth beside the runs {low:.1f} to {high:.1f} GB/s"
    )


def main() -> None:
    """Check texts, run the rounds, print the report."""
    arguments = make_parser(__doc__, "build/peers", num_rounds=4).parse_args()
    places = prepare(arguments, MODELS["smollm2"])
    tokenizer = load_tokenizer(open_checkpoint(places.gguf))
    places = with_equal_prompts(places, tokenizer, arguments.out)
    prompts, probe = PromptMaker(tokenizer), Probe(arguments.threads)
    servers = start_servers(places, arguments.out)
    samples: list[Sample] = []
    bandwidths: list[float] = []
    try:
        lines = [] if arguments.no_text else check_texts(servers, tokenizer, places)
        print("\n".join([*lines, ""]), flush=True)
        if not arguments.rounds:
            return
        for number in range(WARM_UP, arguments.rounds):
            taken = run_round(number, servers, prompts, probe)
            if number != WARM_UP:
                samples += taken[0]
                bandwidths += taken[1]
    finally:
        close_servers(servers)
    print_report(samples, bandwidths)


if __name__ == "__main__":
    main()
