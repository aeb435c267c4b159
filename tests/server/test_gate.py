"""Keys, limits, ids, the log, and what is there before the model is ready and while it drains."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from pathlib import Path

import httpx
import openai
import pytest

from kvloom.errors import ConfigError
from kvloom.server.settings import ServerSettings
from live_server import TINY_OPTIONS, LiveServer, run_server


def test_models_health_and_version(live: LiveServer) -> None:
    [model] = live.openai().models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert live.openai().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        live.openai().models.retrieve("other")
    assert live.get("/health").json() == {"status": "ready"}
    assert live.get("/version").json()["version"]


def test_tokens_and_back(live: LiveServer) -> None:
    answer = live.post("/tokenize", {"prompt": "héllo"}).json()
    assert (answer["count"], answer["max_model_len"]) == (6, 256)  # a token per byte
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    chat = live.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert live.post("/detokenize", {"tokens": chat["tokens"]}).json() == {
        "prompt": "user:hi\nassistant:"
    }
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [258]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):
        refused = live.post(path, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_model_that_generates_has_no_embeddings(live: LiveServer) -> None:
    client = live.openai()
    for text in ("x", ["x", "y"], [1, 2], [[1], [2]]):
        with pytest.raises(openai.BadRequestError, match="tiny has no embeddings") as refused:
            client.embeddings.create(model="tiny", input=text)
        assert refused.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
    for body, param in (({}, "input"), ({"input": "x", "dimensions": 0}, "dimensions")):
        answer = live.post("/v1/embeddings", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    paths = live.get("/openapi.json").json()["paths"]
    assert "400" in paths["/v1/embeddings"]["post"]["responses"]


def test_unknown_paths_and_methods_have_openai_s_shape(live: LiveServer) -> None:
    for answer, status in ((live.get("/v2"), 404), (live.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt":', "Expecting value"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_a_body_that_is_no_json_says_why(live: LiveServer, body: bytes, reason: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{live.url}/v1/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert reason in answer.json()["error"]["message"]


def test_request_ids_come_back(live: LiveServer) -> None:
    given = live.get("/version", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    ids = {live.get("/version").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    spoilt = live.get("/version", headers={"x-request-id": "a b"})
    assert spoilt.headers["x-request-id"] != "a b"


def test_the_access_log_is_json(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvloom.access"):
        live.post("/v1/completions", {"prompt": "abc", "max_tokens": 2, "user": "someone"})
        live.post("/v1/completions", {})
        live.check_idle()
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    good, bad = (line for line in lines if line["path"] == "/v1/completions")
    assert (good["status"], good["method"], good["user"]) == (200, "POST", "someone")
    assert (good["prompt_tokens"], good["completion_tokens"]) == (3, 2)
    assert good["finish_reasons"] == ["length"]
    assert bad["status"] == 400
    assert good["request_id"] != bad["request_id"]


def test_bodies_have_a_limit(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with run_server(options, max_body_bytes=1000, body_timeout_seconds=0.5) as live:
        assert live.post("/v1/completions", {"prompt": "x" * 900}).status_code == 400
        too_large = live.post("/v1/completions", {"prompt": "x" * 10_000_000})
        assert too_large.status_code == 413
        assert too_large.json()["error"]["code"] == "body_too_large"

        def chunks() -> object:
            for _ in range(30):
                yield b"x" * 100

        streamed = httpx.post(f"{live.url}/v1/completions", content=chunks())
        assert streamed.status_code == 413
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_key_is_asked_for(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with run_server(options, api_keys=("one", "two")) as live:
        for path in ("/v1/models", "/metrics", "/cache/events", "/openapi.json"):
            refused = live.get(path)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["type"] == "authentication_error"
        for key in ("one1", "on", "", "three"):
            with pytest.raises(openai.AuthenticationError):
                live.openai(api_key=key or "x").models.list()
        for header, status in (("bearer one", 200), ("BEARER  two", 200), ("Basic one", 401)):
            answer = live.get("/v1/models", headers={"Authorization": header})
            assert answer.status_code == status, header
        assert live.openai(api_key="one").models.list().data
        assert live.openai(api_key="two").models.list().data
        assert live.get("/health").status_code == 200


def test_pages_of_named_origins_may_call(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with run_server(options, cors_origins=("https://good.example",)) as live:
        for origin, allowed in (("https://good.example", True), ("https://bad.example", False)):
            answer = live.get("/version", headers={"Origin": origin})
            assert (answer.headers.get("access-control-allow-origin") == origin) == allowed


def test_a_full_queue_answers_429(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with run_server(options, max_choices=2) as live:
        go_on = threading.Event()
        live.engine._engine.inspect(lambda _: go_on.wait())
        body = {"prompt": "x", "n": 2, "max_tokens": 4}
        thread = threading.Thread(target=live.post, args=("/v1/completions", body))
        thread.start()
        while live.state.num_seats < 2:
            threading.Event().wait(0.01)
        full = live.post("/v1/completions", {"prompt": "x"})
        go_on.set()
        thread.join()
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        too_many = live.post("/v1/completions", {"prompt": ["x"] * 3})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")
        assert live.post("/v1/completions", body).status_code == 200
        live.check_idle()


def test_nothing_is_taken_while_draining_but_what_runs_ends(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with run_server(options) as live:
        host, port = live.url.removeprefix("http://").split(":")
        idle = http.client.HTTPConnection(host, int(port))  # kept alive from before
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        go_on = threading.Event()
        live.engine._engine.inspect(lambda _: go_on.wait())
        answers = []
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(live.post("/v1/completions", body)))
        thread.start()
        while live.engine.num_open_choices < 1:
            threading.Event().wait(0.01)
        live.server.handle_exit(2, None)
        refused = live.post("/v1/completions", {"prompt": "x"})
        idle.request("GET", "/health")
        health = idle.getresponse()
        go_on.set()
        thread.join()
        assert (refused.status_code, health.status) == (503, 503)
        assert refused.headers["retry-after"]
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 4
        idle.close()
        while not live.server.should_exit:
            threading.Event().wait(0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_choices": 0}, "max_choices"),
        ({"port": 70_000}, "port"),
        ({"api_keys": ("",)}, "API key"),
        ({"served_model_names": ()}, "served_model_names"),
        ({"ssl_certfile": "x"}, "ssl_keyfile"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**{"served_model_names": ("m",)} | changes)
