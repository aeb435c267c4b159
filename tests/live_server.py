"""A real server on a free port, in a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from kvloom import AsyncLLM
from kvloom.server.serving import Server, bind
from kvloom.server.settings import ServerSettings
from kvloom.server.state import ServerState

# Enough blocks, and steps small enough to cut prompts.
TINY_OPTIONS = {"num_blocks": 200, "max_num_batched_tokens": 64, "backend": "reference"}


class LiveServer:
    """Its address, and clients for it."""

    def __init__(self, url: str, state: ServerState, server: Server) -> None:
        self.url = url
        self.state = state
        self.server = server
        self.clients: dict[str, openai.OpenAI] = {}  # by key; closed with the server

    @property
    def engine(self) -> AsyncLLM:
        assert self.state.engine is not None
        return self.state.engine

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        if api_key not in self.clients:
            self.clients[api_key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=api_key, max_retries=0
            )
        return self.clients[api_key]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def check_idle(self) -> None:
        """Wait until nothing runs, then ask the books: nothing is held.

        A client that has just hung up may not have been heard of yet. Whoever came before this
        call's own request has a seat once that is answered; some quiet moments make sure.
        """
        self.get("/health")
        num_idle = 0
        for _ in range(6000):
            num_idle = num_idle + 1 if self._is_idle() else 0
            if num_idle == 10:
                break
            threading.Event().wait(0.01)
        assert self.state.num_seats == self.engine.num_open_choices == 0
        self.inspect(lambda core: core.manager.check())
        stats = self.engine.stats
        assert (stats.scheduler.num_running, stats.scheduler.num_waiting) == (0, 0)
        assert stats.cache.num_used_blocks == 0

    def _is_idle(self) -> bool:
        is_busy = self.inspect(lambda core: core.has_unfinished_requests())
        return self.state.num_seats == self.engine.num_open_choices == 0 and not is_busy

    def inspect(self, read: Any) -> Any:
        return self.engine._engine.inspect(read).result()


@contextmanager
def run_server(engine_options: dict[str, Any], **settings: Any) -> Iterator[LiveServer]:
    """Serve until the block ends; then nothing may be left running."""
    given = ServerSettings(**{"served_model_names": ("tiny",), "port": 0} | settings)
    listener = bind(given)
    state, is_ready = ServerState(given), threading.Event()
    server = Server(
        state, lambda observer: AsyncLLM(observer=observer, **engine_options), is_ready.set
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert is_ready.wait(timeout=120), server.failure
        live = LiveServer(f"http://127.0.0.1:{listener.getsockname()[1]}", state, server)
        yield live
        for client in live.clients.values():
            client.close()
    finally:
        server.should_exit = True
        thread.join()


def slow_steps(live: LiveServer) -> threading.Event:
    """From the fourth step on, each waits a moment until the event is set."""
    core, is_seen = live.engine._core, threading.Event()
    step, num_steps = core.step, 0

    def slow_step() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 4 and not is_seen.is_set():
            is_seen.wait(0.2)
        return step()

    core.step = slow_step  # type: ignore[method-assign]
    return is_seen
