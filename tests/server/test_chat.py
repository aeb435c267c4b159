"""/v1/chat/completions with OpenAI's client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom import LLM, SamplingParams
from live_server import LiveServer

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_folder), num_blocks=200, backend="reference")
    yield llm
    llm.shutdown()


def create(live: LiveServer, **fields: Any) -> Any:
    given = {"model": "tiny", "messages": USER, "temperature": 0.0, "max_tokens": 8}
    return live.openai().chat.completions.create(**given | fields)


def test_an_answer_is_the_engine_s(live: LiveServer, llm: LLM) -> None:
    [expected] = llm.chat(USER, SamplingParams(temperature=0.0, max_tokens=8))
    answer = create(live)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == (
        "assistant",
        expected.outputs[0].text,
    )
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert choice.logprobs is None
    assert choice.message.tool_calls is None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_the_rest_of_the_room_unless_told(live: LiveServer) -> None:
    answer = create(live, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256
    assert create(live, max_tokens=None, max_completion_tokens=3).usage.completion_tokens <= 3


def test_a_stream_is_the_whole_in_pieces(live: LiveServer) -> None:
    fields = {"n": 3, "seed": 4, "temperature": 1.0, "max_tokens": 20, "logprobs": True}
    whole = create(live, **fields)
    usage_fields = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(create(live, **fields, **usage_fields))
    texts, roles, reasons = [""] * 3, [[] for _ in range(3)], [[] for _ in range(3)]
    logprobs: list[list[float]] = [[] for _ in range(3)]
    for chunk in chunks:
        [choice] = chunk.choices
        assert not reasons[choice.index], "nothing follows the reason of the end"
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles[choice.index].append(choice.delta.role)
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
        if choice.logprobs:
            logprobs[choice.index] += [t.logprob for t in choice.logprobs.content]
    assert texts == [c.message.content for c in whole.choices]
    assert roles == [["assistant"]] * 3
    assert reasons == [[c.finish_reason] for c in whole.choices]
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        assert streamed == pytest.approx([t.logprob for t in choice.logprobs.content], abs=1e-5)
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_logprobs_have_bytes_and_top_tokens(live: LiveServer) -> None:
    answer = create(live, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs)
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0 + 1e-6
        assert len(token.bytes) == 1 or token.token.startswith("<")  # one token per byte
    whole = b"".join(bytes(t.bytes) for t in content if not t.token.startswith("<"))
    assert whole.decode(errors="replace") == answer.choices[0].message.content


def test_a_seed_repeats_and_its_choices_differ(live: LiveServer) -> None:
    fields = {"n": 3, "seed": 4, "temperature": 1.0, "max_tokens": 12}
    texts = [[c.message.content for c in create(live, **fields).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_messages_as_clients_write_them(live: LiveServer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    expected = create(live).choices[0].message.content
    answer = create(live, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == expected
    developer = create(live, messages=[{"role": "developer", "content": "x"}, *USER])
    system = create(live, messages=[{"role": "system", "content": "x"}, *USER])
    assert developer.choices[0].message == system.choices[0].message
    # An answer may be sent back as it came.
    again = [*USER, answer.choices[0].message.model_dump(exclude_unset=True), *USER]
    assert create(live, messages=again).choices[0].message.role == "assistant"


def test_the_final_message_goes_on(live: LiveServer) -> None:
    """The tiny model's template writes "role:content" and a line break for each message."""
    messages = [*USER, {"role": "assistant", "content": "The answer"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    answer = create(live, messages=messages, extra_body=extra)
    prompt = "user:hi\nassistant:The answer"
    direct = live.post(
        "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8}
    ).json()
    assert answer.choices[0].message.content == direct["choices"][0]["text"]
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"priority": "high"}, "priority"),
        ({"store": True}, "store"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_is_not_valid_is_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/chat/completions", {"messages": USER, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_free_text_is_a_format(live: LiveServer) -> None:
    assert create(live, response_format={"type": "text"}).choices[0].message.content


def test_errors_reach_the_client_as_its_own(live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(live, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        create(live, model="other")
