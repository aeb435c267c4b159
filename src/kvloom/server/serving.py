"""Runs a server from its start to its last answer."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import uvicorn

from kvloom.engine.async_llm import AsyncLLM
from kvloom.engine.stats import EngineObserver
from kvloom.server.app import make_app
from kvloom.server.settings import ServerSettings
from kvloom.server.state import ServerState

logger = logging.getLogger(__name__)

Load = Callable[[EngineObserver], AsyncLLM]

_DRAIN_POLL_SECONDS = 0.05
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections: theirs is the first to close
_LAST_WORDS_SECONDS = 5  # for answers that were aborted to be sent


def bind(settings: ServerSettings) -> socket.socket:
    """The server's socket, before anything takes time: an address in use shows at once.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    # Connections inherit it. asyncio sets it only on sockets that name TCP as their protocol, which
    # these do not; without it each small write waits, often 40 ms, until the one before is
    # acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Server(uvicorn.Server):
    """Answers 503 while the model loads, serves, drains at Ctrl-C, stops at the second one."""

    def __init__(self, state: ServerState, load: Load, on_ready: Callable[[], None]) -> None:
        """`load` takes its time on another thread; `on_ready` is called when requests are taken."""
        settings = state.settings
        super().__init__(
            uvicorn.Config(
                make_app(state),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
            )
        )
        self._state = state
        self._load = load
        self._on_ready = on_ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to load the model."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._start_task(self._load_engine())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what still runs, then close all connections."""
        self._state.is_draining = True
        engine = self._state.engine
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        await super().shutdown(sockets)

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """The first signal drains, the next one stops at once."""
        if self._state.is_draining or self._loop is None or self._state.engine is None:
            self.should_exit = True
            return
        self._state.is_draining = True
        self._loop.call_soon_threadsafe(self._start_task, self._drain())

    async def _load_engine(self) -> None:
        try:
            engine = await asyncio.wrap_future(self._start_loading())
        except Exception as error:  # noqa: BLE001  # raised again when the server has ended
            self.failure = error
            self.should_exit = True
            return
        await engine.inspect(self._state.metrics.attach)
        self._state.engine = engine
        self._on_ready()

    def _start_loading(self) -> Future[AsyncLLM]:
        """On a thread that does not keep the process alive: Ctrl-C need not wait for a download."""
        loaded: Future[AsyncLLM] = Future()

        def load() -> None:
            try:
                engine = self._load(self._state.metrics)
                engine.prepare_grammars()
                loaded.set_result(engine)
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                loaded.set_exception(error)

        threading.Thread(target=load, name="kvloom-load", daemon=True).start()
        return loaded

    async def _drain(self) -> None:
        logger.info("draining %d choices; Ctrl-C again stops at once", self._state.num_seats)
        try:
            async with asyncio.timeout(self._state.settings.drain_seconds):
                while self._state.num_seats:
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        except TimeoutError:
            logger.warning("%d choices did not end in time", self._state.num_seats)
        self.should_exit = True

    def _start_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def serve(
    settings: ServerSettings,
    load: Load,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until a signal ends it; `on_ready` gets the server's address when the model is there.

    Raises:
        KvloomError, MemoryError: the model cannot be loaded.
        OSError: the address cannot be had.
    """
    listener = bind(settings)
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    server = Server(ServerState(settings), load, lambda: on_ready(address))
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
