"""A real model behind the server, on the native backend where it is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.ops.isa import built_isas
from live_server import LiveServer, run_server

CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[LiveServer]:
    if not built_isas():
        pytest.skip("the native library is not built")
    options = {"model": str(smollm2), "num_blocks": 256, "max_model_len": 1024}
    with run_server(options, served_model_names=("smollm2",)) as live:
        yield live


def create(server: LiveServer, **fields: Any) -> Any:
    given = {"model": "smollm2", "messages": CHAT, "temperature": 0.0, "max_tokens": 24}
    return server.openai().chat.completions.create(**given | fields)


def test_it_answers(server: LiveServer) -> None:
    [choice] = create(server).choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"


def test_streams_are_the_whole_text(server: LiveServer) -> None:
    fields = {"messages": [{"role": "user", "content": "Say hello in Chinese 你好"}], "n": 2}
    fields |= {"seed": 1, "temperature": 0.8}
    whole = create(server, **fields)
    texts = ["", ""]
    for chunk in create(server, **fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_the_second_turn_finds_the_first_one_cached(server: LiveServer) -> None:
    first = create(server)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = create(server, messages=[*CHAT, answer, {"role": "user", "content": "And Italy?"}])
    cached = second.usage.prompt_tokens_details.cached_tokens
    # All whole blocks of the first prompt, at least.
    assert cached >= first.usage.prompt_tokens // 16 * 16 > 0


def test_a_chosen_token_s_bytes_make_the_text(server: LiveServer) -> None:
    fields = {"messages": [{"role": "user", "content": "Write one emoji: 😀"}], "logprobs": True}
    [choice] = create(server, **fields).choices
    tokens = choice.logprobs.content
    data = b"".join(bytes(t.bytes) for t in tokens if t.token not in {"<|im_end|>"})
    assert data.decode("utf-8", "replace") == choice.message.content


def test_stop_strings_end_the_text(server: LiveServer) -> None:
    [choice] = create(server, stop=["Paris"]).choices
    assert "Paris" not in choice.message.content
    assert choice.finish_reason == "stop"


def test_a_template_without_tools_is_told(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
