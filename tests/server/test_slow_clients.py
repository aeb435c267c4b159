"""Clients that send byte by byte, and clients that do not read: they harm nobody but themselves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from live_server import TINY_OPTIONS, LiveServer, run_server
from raw_http import post

# Hundreds of kilobytes of answer, of tokens that end nothing: more than small sockets hold.
LARGE = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "logprobs": 50, "n": 2}


def connect(live: LiveServer) -> socket.socket:
    """A connection that takes little unless it is read."""
    for listener in live.server.servers[0].sockets:  # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


@contextmanager
def unread_stream(live: LiveServer) -> Iterator[socket.socket]:
    """A stream whose client read its first bytes and then no more."""
    with connect(live) as connection:
        connection.sendall(post("/v1/completions", LARGE | {"stream": True}, ["Connection: close"]))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        yield connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


def is_engine_idle(live: LiveServer) -> bool:
    return not live.inspect(lambda core: core.has_unfinished_requests())


def test_who_does_not_read_holds_nobody_up(tiny_folder: Path) -> None:
    with run_server({"model": str(tiny_folder), **TINY_OPTIONS}) as live:
        with unread_stream(live) as connection:
            answer = live.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
            assert answer.status_code == 200
            wait_until(lambda: is_engine_idle(live))
            assert live.state.num_seats == 2  # the stream is not sent yet
            received = read_all(connection)
        lines = [line for line in received.splitlines() if line.startswith(b"data: {")]
        choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
        assert sum(choice["finish_reason"] == "length" for choice in choices) == 2
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 2 * 120
        assert b"data: [DONE]" in received
        live.check_idle()


def test_who_never_reads_counts_as_gone(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with (
        run_server(options, max_choices=2, send_timeout_seconds=0.5) as live,
        unread_stream(live) as connection,
    ):
        wait_until(lambda: live.state.num_seats == 0)
        assert live.post("/v1/completions", {"prompt": "x", "n": 2}).status_code == 200
        live.check_idle()
        assert b"data: [DONE]" not in read_all(connection)


def test_a_body_that_drips_in_is_cut_off(tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), **TINY_OPTIONS}
    with run_server(options, body_timeout_seconds=0.5) as live, connect(live) as connection:
        request = post("/v1/completions", {"prompt": "x" * 10_000})
        head = request.index(b"{") + 1
        connection.sendall(request[:head])
        connection.settimeout(0.02)
        answer = b""
        for index in range(head, len(request)):
            assert live.get("/health").status_code == 200
            connection.sendall(request[index : index + 1])
            try:
                answer = connection.recv(1000)
                break
            except TimeoutError:
                pass
        assert answer.startswith(b"HTTP/1.1 408")
        live.check_idle()
