"""Traces as their publishers write them, and made-up workloads."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean

import pytest

from kvloom.errors import ConfigError
from kvloom.simulate.trace import (
    Lengths,
    Selection,
    TraceRequest,
    Workload,
    generate,
    read_trace,
    runs_of,
)

MOONCAKE = (
    '{"timestamp": 2000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 500, "input_length": 512, "output_length": 7, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


@pytest.fixture
def read(tmp_path):
    def read_text(text: str, **selection) -> list[TraceRequest]:
        (tmp_path / "trace").write_text(text)
        return read_trace(tmp_path / "trace", Selection(**selection))

    return read_text


def test_mooncake_ids_stand_for_512_tokens_and_the_rest(read):
    late, early = read(MOONCAKE)[::-1]
    assert (early.arrival, late.arrival) == (0.0, 1.5)
    assert early.prompt_token_ids() == [0] * 512
    assert late.prompt_token_ids() == [0] * 512 + [1] * 512 + [2] * 6
    assert (early.num_output_tokens, late.num_output_tokens) == (7, 5)


@pytest.mark.parametrize("num_tokens", [1024, 1537])
def test_mooncake_ids_must_make_the_length(read, num_tokens):
    row = {"timestamp": 0, "input_length": num_tokens, "output_length": 5, "hash_ids": [0, 1, 2]}
    with pytest.raises(ConfigError, match="request 1"):
        read(json.dumps(row))


def test_azure_prompts_have_nothing_in_common(read):
    first, second = read(AZURE)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (374, 44)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 109)
    assert second.arrival == pytest.approx(4.314579)
    assert not set(first.prompt_token_ids()) & set(second.prompt_token_ids())


def batch_line(**body) -> str:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line) + "\n"


def test_batches_arrive_at_once_and_share_what_their_texts_share(read):
    system = {"role": "system", "content": "You are a helpful assistant. " * 10}
    chats = [
        batch_line(messages=[system, {"role": "user", "content": question}], max_tokens=9)
        for question in ("Why?", "How come?")
    ]
    chats.append(batch_line(prompt=[5, 6, 6, 7]))
    why, how, ids = read("".join(chats), num_output_tokens=3)
    assert [r.arrival for r in (why, how, ids)] == [0.0, 0.0, 0.0]
    assert ids.prompt_token_ids() == [5, 6, 6, 7]
    assert [r.num_output_tokens for r in (why, how, ids)] == [9, 9, 3]
    common = next(
        index
        for index, (a, b) in enumerate(
            zip(why.prompt_token_ids(), how.prompt_token_ids(), strict=False)
        )
        if a != b
    )
    num_bytes = len(f"system\n{system['content']}\nuser\n".encode())
    assert common == num_bytes // 4


def test_the_selection_cuts_speeds_and_shrinks(read):
    (only,) = read(AZURE, num_requests=1)
    assert only.num_prompt_tokens == 374
    first, second = read(AZURE, speed=2.0, shrink=16)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (374 // 16, 44 // 16)
    assert second.arrival == pytest.approx(4.314579 / 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no trace"),
        ("a,b\n1,2\n", "is no trace"),
        (AZURE.splitlines()[0] + "\n", "holds no request"),
        (AZURE + "soon,1,1\n", "request 3"),
        (AZURE + "2023-11-16 18:16:00,0,1\n", "request 3"),
        (MOONCAKE + "{}\n", "request 3"),
        (batch_line(prompt="hello") + batch_line(input="?"), "request 2"),
        (batch_line(prompt=""), "request 1"),
    ],
)
def test_malformed_traces_are_refused(read, text, reason):
    with pytest.raises(ConfigError, match=reason):
        read(text)


def test_runs_spell_the_prompt():
    ids = [1, 1, 2, 1, 3, 3, 3]
    runs = runs_of(ids)
    assert runs == ((1, 2), (2, 1), (1, 1), (3, 3))
    assert TraceRequest(0.0, runs, 1).prompt_token_ids() == ids


WORKLOAD = Workload(4000, 8.0, Lengths(10, 20), Lengths(5, 5), Lengths(64, 64), num_prefixes=3)


def test_a_workload_is_what_was_asked_for():
    requests = generate(WORKLOAD, seed=1)
    assert len(requests) == 4000
    gaps = [b.arrival - a.arrival for a, b in pairwise(requests)]
    # Exponential gaps: mean and deviation are 1/8; four standard errors of 4,000 draws.
    assert fmean(gaps) == pytest.approx(1 / 8, abs=4 / 8 / 4000**0.5)
    own = [r.prompt[-1][1] for r in requests]
    assert (min(own), max(own)) == (10, 20)
    assert {r.prompt[0] for r in requests} == {(0, 64), (1, 64), (2, 64)}
    assert len({r.prompt[-1][0] for r in requests}) == 4000
    assert {r.num_output_tokens for r in requests} == {5}


def test_a_seed_makes_the_same_requests_again():
    assert generate(WORKLOAD, seed=1) == generate(WORKLOAD, seed=1)
    assert generate(WORKLOAD, seed=1) != generate(WORKLOAD, seed=2)


def test_lengths():
    assert Lengths.parse("7") == Lengths(7, 7)
    assert Lengths.parse("7-9") == Lengths(7, 9)
    for text in ("", "0", "9-7", "-3", "7-", "x", "1-2-3"):
        with pytest.raises(ConfigError):
            Lengths.parse(text)
