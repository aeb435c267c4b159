"""Other people's clients, where they are installed (pip install langchain-openai litellm)."""

from __future__ import annotations

import pytest

from live_server import LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]


def answer_of(live: LiveServer) -> str:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    answer = live.post("/v1/chat/completions", body).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


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
