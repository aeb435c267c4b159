"""Clients of other people: llm and instructor; langchain and litellm where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

from live_server import LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]


def answer_of(live: LiveServer) -> str:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    answer = live.post("/v1/chat/completions", body).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.filterwarnings("default")
def test_llm(live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    plugin = pytest.importorskip("llm.default_plugins.openai_models")
    model = plugin.Chat("tiny", model_name="tiny", api_base=f"{live.url}/v1")
    model.key = "none"
    expected = answer_of(live)
    for stream in (False, True):
        answer = model.prompt("hi", stream=stream, temperature=0, max_tokens=8)
        assert answer.text() == expected


@pytest.mark.filterwarnings("default")
def test_instructor(live: LiveServer) -> None:
    instructor = pytest.importorskip("instructor")

    class Answer(BaseModel):
        size: Literal["small", "large"]

    client = instructor.from_openai(live.openai(), mode=instructor.Mode.JSON_SCHEMA)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_model=Answer, seed=1, max_retries=0
    )
    assert isinstance(answer, Answer)  # random weights answer in this form only when held to it


@pytest.mark.filterwarnings("default")
def test_langchain(live: LiveServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        model="tiny",
        base_url=f"{live.url}/v1",
        api_key="none",
        temperature=0,
        max_completion_tokens=8,
    )
    expected = answer_of(live)
    assert chat.invoke("hi").content == expected
    assert "".join(chunk.content for chunk in chat.stream("hi")) == expected


@pytest.mark.filterwarnings("default")
def test_litellm(live: LiveServer) -> None:
    litellm = pytest.importorskip("litellm")
    fields = {
        "model": "openai/tiny",
        "api_base": f"{live.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 8,
    }
    expected = answer_of(live)
    assert litellm.completion(**fields).choices[0].message.content == expected
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
