"""/v1/completions with OpenAI's client, against what LLM gives for the same parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom import LLM, SamplingParams
from live_server import LiveServer

PROMPT = "The quick brown fox"
GREEDY = {"temperature": 0.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_folder), num_blocks=200, backend="reference")
    yield llm
    llm.shutdown()


def create(live: LiveServer, **fields: Any) -> Any:
    return live.openai().completions.create(**{"model": "tiny", "prompt": PROMPT} | fields)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes)


def test_a_completion_is_the_engine_s(live: LiveServer, llm: LLM) -> None:
    [expected] = llm.generate(PROMPT, greedy())
    answer = create(live, **GREEDY)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    [choice] = answer.choices
    assert (choice.index, choice.text) == (0, expected.outputs[0].text)
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, len(PROMPT) + 8)


def test_sixteen_tokens_unless_told(live: LiveServer) -> None:
    answer = create(live, temperature=0.0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_prompts_of_every_kind_and_n(live: LiveServer, llm: LLM) -> None:
    ids = [llm.tokenizer.encode(text, add_special_tokens=True) for text in ("one", "two")]
    params = greedy(n=2, seed=3, temperature=1.0)
    expected = [c.text for o in llm.generate(["one", "two"], params) for c in o.outputs]
    sampled = {**GREEDY, "temperature": 1.0, "n": 2, "seed": 3}
    for prompt in (["one", "two"], ids):
        answer = create(live, **sampled | {"prompt": prompt})
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert [c.text for c in answer.choices] == expected
    single = create(live, **sampled | {"prompt": ids[0]})
    assert [c.text for c in single.choices] == expected[:2]


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_whole_in_pieces(live: LiveServer, echo: bool) -> None:
    fields = {
        **GREEDY,
        "prompt": ["one", "two"],
        "max_tokens": 12,
        "temperature": 1.0,
        "n": 2,
        "seed": 5,
        "echo": echo,
    }
    whole = create(live, **fields)
    texts, reasons = [""] * 4, [[] for _ in range(4)]
    for chunk in create(live, **fields, stream=True):
        assert (chunk.object, chunk.usage) == ("text_completion", None)
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            reasons[choice.index].append(choice.finish_reason)
    assert texts == [c.text for c in whole.choices]
    assert reasons == [["length"]] * 4


def test_the_usage_chunk_is_last_and_on_request(live: LiveServer) -> None:
    chunks = list(create(live, **GREEDY, stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert last.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_raw_stream_ends_with_one_done(live: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    answer = live.post("/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert answer.text.count("[DONE]") == 1
    assert all(event.startswith("data: {") for event in events[:-2])


def test_logprobs_are_the_engine_s(live: LiveServer, llm: LLM) -> None:
    [expected] = llm.generate(PROMPT, greedy(logprobs=2))
    scores = expected.outputs[0].logprobs
    for stream in (False, True):
        answer = create(live, **GREEDY, logprobs=2, stream=stream)
        parts = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
        logprobs = [x for part in parts for x in part.token_logprobs]
        assert logprobs == pytest.approx([s.logprob for s in scores], abs=1e-5)
        offsets = [x for part in parts for x in part.text_offset]
        tokens = [x for part in parts for x in part.tokens]
        assert offsets == [sum(map(len, tokens[:i])) for i in range(8)]
        tops = [x for part in parts for x in part.top_logprobs]
        for top, score in zip(tops, scores, strict=True):
            assert max(top.values()) == pytest.approx(score.top[0][1], abs=1e-5)


def test_an_echoed_prompt_is_scored(live: LiveServer, llm: LLM) -> None:
    """What lm-eval asks for: the prompt alone, with its log-probabilities."""
    [expected] = llm.generate(PROMPT, greedy(max_tokens=1, prompt_logprobs=1))
    answer = create(live, **GREEDY | {"max_tokens": 0}, echo=True, logprobs=1)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs.tokens == list(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [s.logprob for s in expected.prompt_logprobs], abs=1e-5
    )
    assert answer.usage.completion_tokens == 0
    longer = create(live, **GREEDY | {"max_tokens": 2}, echo=True, logprobs=1)
    assert longer.choices[0].text.startswith(PROMPT)
    assert longer.choices[0].logprobs.token_logprobs[1 : len(PROMPT)] == pytest.approx(
        choice.logprobs.token_logprobs[1:], abs=1e-5
    )
    assert len(longer.choices[0].logprobs.tokens) == len(PROMPT) + 2


def test_stop_strings_and_biases(live: LiveServer, llm: LLM) -> None:
    [b] = llm.tokenizer.encode("b", add_special_tokens=False)
    forced = {**GREEDY, "logit_bias": {str(b): 100}}
    assert create(live, **forced).choices[0].text == "bbbbbbbb"
    stopped = create(live, **forced, stop=["bbb"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.usage.completion_tokens == 3
    assert create(live, **forced, stop="x").choices[0].finish_reason == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_ended_a_choice_is_told(live: LiveServer, llm: LLM, path: str) -> None:
    """A stop string, a stop token, an end-of-sequence token, the length: whole and streamed."""
    [b] = llm.tokenizer.encode("b", add_special_tokens=False)
    [eos] = llm.tokenizer.eos_token_ids
    text = [{"role": "user", "content": "a"}] if "chat" in path else "a"
    prompt = {"messages" if "chat" in path else "prompt": text}
    cases: list[tuple[dict[str, Any], int, str, str | int | None]] = [
        ({"stop": ["bbb"]}, b, "stop", "bbb"),
        ({"stop_token_ids": [b]}, b, "stop", b),
        ({}, eos, "stop", None),
        ({"stop": ["x"]}, b, "length", None),
    ]
    for fields, token_id, finish_reason, stop_reason in cases:
        forced = {"temperature": 0, "max_tokens": 5, "logit_bias": {str(token_id): 100}}
        body = {**prompt, **fields, **forced}
        [choice] = live.post(path, body).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
        events = live.post(path, body | {"stream": True}).text.split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        told = [(chunk["finish_reason"], chunk["stop_reason"]) for chunk in chunks]
        assert told == [(None, None)] * (len(told) - 1) + [(finish_reason, stop_reason)]


def test_cached_tokens_follow_from_blocks_and_salt(live: LiveServer) -> None:
    prompt = list(range(40))  # blocks of 16: two whole ones
    fields = GREEDY | {"prompt": prompt}

    def cached(salt: str) -> int:
        body = {"ignore_eos": True, "cache_salt": salt}
        usage = create(live, **fields | {"extra_body": body}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 32, 0, 32]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_priority_reaches_the_engine(live: LiveServer, path: str, monkeypatch) -> None:
    submitted = []
    submit = live.engine.submit
    monkeypatch.setattr(live.engine, "submit", lambda s: submitted.append(s) or submit(s))
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    for more in ({}, {"priority": -3}):
        answer = live.post(path, {**prompt, "max_tokens": 1, **more})
        assert answer.status_code == 200, answer.text
    assert [submission.priority for submission in submitted] == [0, -3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"logprobs": 10**3}, "logprobs"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias"),  # a digit, but not of ours
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias[3]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"priority": 0.5}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"no such": 1}, "no such"),
    ],
)
def test_what_is_not_valid_is_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/completions", {"prompt": "x", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.split("[")[0].split(".")[0])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "x", "stop": ["\\udc00"]}',
    ],
    ids=range(12),
)
def test_bodies_that_are_no_request(live: LiveServer, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    import httpx

    answer = httpx.post(f"{live.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_model_is_not_found(live: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        create(live, model="other")
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"
