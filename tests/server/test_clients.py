"""Clients that leave, many at once, and streams while long prompts are tokenised."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import TINY_OPTIONS, LiveServer, run_server

LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def leave(live: LiveServer, body: dict[str, Any], num_bytes: int) -> None:
    """Post a request, read `num_bytes` of the answer, and hang up."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(_request(body))
        while num_bytes > 0:
            num_bytes -= len(connection.recv(num_bytes))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 300])
def test_a_client_that_leaves_ends_its_request(
    live: LiveServer, stream: bool, num_bytes: int
) -> None:
    if num_bytes and not stream:
        pytest.skip("a whole answer has no beginning to read")
    before = live.engine.stats.steps.num_scheduled_tokens
    leave(live, LONG | {"stream": stream, "n": 4}, num_bytes)
    live.check_idle()
    num_tokens = live.engine.stats.steps.num_scheduled_tokens - before
    assert num_tokens < 4 * 200


def test_two_hundred_clients_that_leave(live: LiveServer) -> None:
    """At any point of their requests; the next one is answered as ever."""
    rng = random.Random(0)
    host, port = live.url.removeprefix("http://").split(":")

    async def one(index: int) -> None:
        body = LONG | {"stream": index % 3 > 0, "n": 1 + index % 3, "cache_salt": str(index % 5)}
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(_request(body))
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 2.0)):
                await reader.read()
        writer.transport.abort()  # a reset, not even a goodbye
        with suppress(OSError):
            await writer.wait_closed()

    async def main() -> None:
        await asyncio.gather(*(one(index) for index in range(200)))

    expected = live.post("/v1/completions", LONG | {"max_tokens": 5, "temperature": 0}).json()
    asyncio.run(main())
    live.check_idle()
    again = live.post("/v1/completions", LONG | {"max_tokens": 5, "temperature": 0}).json()
    assert again["choices"] == expected["choices"]


def test_many_streams_at_once_are_each_their_own(live: LiveServer) -> None:
    prompts = [f"prompt {index}" for index in range(64)]

    def body(prompt: str, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True} | more

    async def text(client: httpx.AsyncClient, prompt: str) -> str:
        pieces = []
        async with client.stream(
            "POST", "/v1/completions", json=body(prompt, stream=True)
        ) as answer:
            async for line in _data(answer):
                pieces.append(json.loads(line)["choices"][0]["text"])
        return "".join(pieces)

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=live.url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(text(client, prompt) for prompt in prompts))

    whole = live.post("/v1/completions", body(prompts)).json()  # type: ignore[arg-type]
    assert asyncio.run(main()) == [choice["text"] for choice in whole["choices"]]


async def _data(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield line.removeprefix("data: ")


def test_a_stream_goes_on_while_a_prompt_is_tokenised(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long prompt's tokenising waits for the end of a stream that began after it."""
    import threading

    with run_server({"model": str(tiny_folder), **TINY_OPTIONS}) as live:
        encode, is_streamed = live.engine.tokenizer.encode, threading.Event()

        def slow_encode(text: str, add_special_tokens: bool) -> list[int]:
            if len(text) > 1000:
                assert is_streamed.wait(timeout=60)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(live.engine.tokenizer, "encode", slow_encode)
        answers: list[httpx.Response] = []
        long_post = threading.Thread(
            target=lambda: answers.append(live.post("/v1/completions", {"prompt": "x" * 200_000}))
        )
        long_post.start()
        while live.state.num_seats < 1:
            threading.Event().wait(0.01)
        streamed = live.post("/v1/completions", LONG | {"max_tokens": 5, "stream": True})
        is_streamed.set()
        long_post.join()
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert answers[0].status_code == 400
        assert "200000 prompt tokens" in answers[0].json()["error"]["message"]
        live.check_idle()
