"""Requests to simulate: read from published traces, or made up.

Token ids only tell equal tokens from others. A prompt is written as runs of one id: as blocks are
hashed with all that is before them, a run is as good as any text, and 12,000 tokens take a few
bytes until they arrive.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kvloom.errors import ConfigError

MOONCAKE_BLOCK_SIZE = 512  # tokens that one of the trace's hash_ids stands for
_NUM_OUTPUT_TOKENS = 128  # of a request that names no limit
_BYTES_PER_TOKEN = 4  # of text in no tokenizer's hands: about what English takes

Run = tuple[int, int]
"""(token id, how often it follows itself)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, as it will arrive.

    Attributes:
        arrival: seconds after the start.
        prompt: runs of token ids; ids are not negative.
        num_output_tokens: tokens it generates, at least 1.
        output_token_ids: what it generates, where that is known; None makes ids up that no prompt
            holds.
    """

    arrival: float
    prompt: tuple[Run, ...]
    num_output_tokens: int
    output_token_ids: tuple[int, ...] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, count in self.prompt)

    def prompt_token_ids(self) -> list[int]:
        """The prompt at its full length."""
        token_ids: list[int] = []
        for token_id, count in self.prompt:
            token_ids += [token_id] * count
        return token_ids


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, each from `low` to `high` equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"{self.low}-{self.high} are no lengths; give N, or LOW-HIGH")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "N" or "LOW-HIGH".

        Raises:
            ConfigError: it is neither.
        """
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ConfigError(f"{text!r} are no lengths; give N, or LOW-HIGH")
        return cls(int(low), int(high or low))


@dataclass(frozen=True, slots=True)
class Workload:
    """A made-up workload.

    Attributes:
        num_requests: how many.
        rate: requests per second, as a Poisson process; 0 lets all arrive at once.
        prompt: tokens of a prompt behind its shared prefix.
        output: tokens generated.
        prefix: tokens of each shared prefix; None for none.
        num_prefixes: how many there are; every request begins with one of them.
    """

    num_requests: int
    rate: float
    prompt: Lengths
    output: Lengths
    prefix: Lengths | None = None
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if not 0.0 <= self.rate < float("inf"):
            raise ConfigError(
                f"rate is {self.rate}; give requests per second, or 0 for all at once"
            )


def generate(workload: Workload, seed: int) -> list[TraceRequest]:
    """The requests of a workload: the same for a seed."""
    rng = random.Random(seed)

    def draw(lengths: Lengths) -> int:
        return rng.randint(lengths.low, lengths.high)

    prefixes: list[tuple[Run, ...]] = [()]
    if workload.prefix is not None:
        prefixes = [((i, draw(workload.prefix)),) for i in range(workload.num_prefixes)]
    requests, now = [], 0.0
    for index in range(workload.num_requests):
        if workload.rate:
            now += rng.expovariate(workload.rate)
        own = (workload.num_prefixes + index, draw(workload.prompt))
        requests.append(TraceRequest(now, (*rng.choice(prefixes), own), draw(workload.output)))
    return requests


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a trace is replayed, and how fast.

    Attributes:
        num_requests: the first so many; None takes all.
        speed: arrivals are this many times as fast.
        shrink: prompts and outputs are this many times as short.
        num_output_tokens: of requests of a batch that name no limit; None makes it 128.
    """

    num_requests: int | None = None
    speed: float = 1.0
    shrink: int = 1
    num_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.speed < float("inf"):
            raise ConfigError(f"speed is {self.speed}; give a positive number")
        for name in ("num_requests", "shrink", "num_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1")


def read_trace(path: Path, selection: Selection) -> list[TraceRequest]:
    """The selected requests of a trace, in order of arrival; its form is told by its content.

    Raises:
        ConfigError: it has no such form, or a line of it is malformed.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        read = _reader_of(first, path)
        if selection.num_output_tokens is not None and read is not _read_batch:
            raise ConfigError(f"{path} names the lengths of its outputs; leave --output-tokens out")
        requests: list[TraceRequest] = []
        try:
            for request in read(lines, selection):
                requests.append(request)
                if len(requests) == selection.num_requests:
                    break
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise ConfigError(
                f"{path}, request {len(requests) + 1}: {error!r}; correct it, or take the requests "
                "before it"
            ) from None
    if not requests:
        raise ConfigError(f"{path} holds no request")
    start = min(request.arrival for request in requests)
    shifted = (_scale(request, start, selection) for request in requests)
    return sorted(shifted, key=lambda request: request.arrival)


_Reader = Callable[[Iterable[str], Selection], Iterator[TraceRequest]]


def _reader_of(first_line: str, path: Path) -> _Reader:
    if first_line.startswith("TIMESTAMP,"):
        return _read_azure
    if '"hash_ids"' in first_line:
        return _read_mooncake
    if '"body"' in first_line:
        return _read_batch
    raise ConfigError(
        f"{path} is no trace that kvloom reads; give Mooncake JSONL (hash_ids), an Azure CSV "
        "(TIMESTAMP,ContextTokens,GeneratedTokens) or an OpenAI batch JSONL (body)"
    )


def _scale(request: TraceRequest, start: float, selection: Selection) -> TraceRequest:
    shrink = selection.shrink
    prompt = request.prompt
    if shrink > 1:
        prompt = tuple((token_id, max(count // shrink, 1)) for token_id, count in prompt)
    return replace(
        request,
        arrival=(request.arrival - start) / selection.speed,
        prompt=prompt,
        num_output_tokens=max(request.num_output_tokens // shrink, 1),
    )


def _read_mooncake(lines: Iterable[str], _selection: Selection) -> Iterator[TraceRequest]:
    """One object per line: timestamp (ms), input_length, output_length, hash_ids.

    An id stands for 512 tokens and all before them; the last one for what is left.
    """
    for line in lines:
        if not line.strip():
            continue
        row = json.loads(line)
        num_left = int(row["input_length"])
        runs = []
        for hash_id in row["hash_ids"]:
            runs.append((int(hash_id), min(num_left, MOONCAKE_BLOCK_SIZE)))
            num_left -= runs[-1][1]
        if num_left or not runs or runs[-1][1] < 1:
            raise ValueError(f"{len(runs)} hash_ids do not make {row['input_length']} tokens")
        yield TraceRequest(row["timestamp"] / 1000, tuple(runs), int(row["output_length"]))


def _read_azure(lines: Iterable[str], _selection: Selection) -> Iterator[TraceRequest]:
    """TIMESTAMP,ContextTokens,GeneratedTokens; nothing is known of shared prefixes."""
    for index, row in enumerate(csv.DictReader(lines)):
        arrival = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven decimals are one too many
        num_tokens = int(row["ContextTokens"])
        if num_tokens < 1:
            raise ValueError("a prompt without tokens")
        yield TraceRequest(
            (arrival - datetime(2000, 1, 1)).total_seconds(),
            ((index, num_tokens),),
            int(row["GeneratedTokens"]),
        )


def _read_batch(lines: Iterable[str], selection: Selection) -> Iterator[TraceRequest]:
    """OpenAI's batch input: all requests arrive at once.

    A token is four bytes of text here: no tokenizer is asked.
    """
    for line in lines:
        if not line.strip():
            continue
        body = json.loads(line)["body"]
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        prompt = _batch_prompt(body)
        if not prompt:
            raise ValueError("a prompt without tokens")
        if limit is None:
            limit = selection.num_output_tokens or _NUM_OUTPUT_TOKENS
        yield TraceRequest(0.0, runs_of(prompt), int(limit))


def _batch_prompt(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
        return prompt
    if prompt is None:
        prompt = "".join(f"{m['role']}\n{_text_of(m['content'])}\n" for m in body["messages"])
    text = str(prompt).encode()
    return [
        int.from_bytes(text[i : i + _BYTES_PER_TOKEN], "big")
        for i in range(0, len(text), _BYTES_PER_TOKEN)
    ]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """A message's text, or that of its parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def runs_of(token_ids: Sequence[int]) -> tuple[Run, ...]:
    """Token ids as runs."""
    runs: list[Run] = []
    for token_id in token_ids:
        if runs and runs[-1][0] == token_id:
            runs[-1] = (token_id, runs[-1][1] + 1)
        else:
            runs.append((token_id, 1))
    return tuple(runs)
