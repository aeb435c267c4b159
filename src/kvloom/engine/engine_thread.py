"""The engine on a thread of its own: others hand it requests, it hands back what each step adds."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from kvloom.engine.core import EngineCore
from kvloom.engine.outputs import Generation, TextDelta
from kvloom.errors import UnavailableError
from kvloom.request import Request
from kvloom.step import RequestEvent

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Steps that fail one after another end everything: what fails then is not one request's.
_MAX_FAILED_STEPS = 3


class Listener:
    """Where an event loop hears of generations; the engine's thread fills it.

    Attributes:
        queue: lists of (index of the generation, delta), or the error that ended them all.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self.queue: asyncio.Queue[list[tuple[int, TextDelta]] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def tell(self, news: list[tuple[int, TextDelta]] | Exception) -> None:
        """Put `news` into the queue, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self.queue.put_nowait, news)

    def take_deltas(self) -> list[tuple[int, TextDelta]]:
        """What was added to all generations since the last call."""
        return [
            (index, delta)
            for index, generation in enumerate(self.generations)
            for delta in generation.take_deltas()
        ]


class EngineThread:
    """Owns an EngineCore from here on. All methods may be called from any thread.

    Between steps it does what it was asked to, in order: so an abort is heard of before the step
    after the one in flight.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, tuple[Generation, Listener]] = {}
        self._num_failed_steps = 0
        self._is_closed = False
        self._lock = threading.Lock()  # between the last command and whoever comes too late
        self._thread = threading.Thread(target=self._run, name="kvloom-engine", daemon=True)
        self._thread.start()

    def submit(self, listener: Listener, requests: Sequence[Request]) -> None:
        """Queue the requests of a listener's generations; deltas and errors go to the listener."""
        arrival = time.perf_counter()
        if not self._give(lambda: self._submit(listener, requests, arrival)):
            listener.tell(_closed())

    def abort(self, listener: Listener) -> None:
        """End what still runs of a listener's generations; it hears no more of them."""
        self._give(lambda: self._abort(listener))

    def inspect(self, read: Callable[[EngineCore], T]) -> Future[T]:
        """Run `read` between two steps; UnavailableError once the thread has ended."""
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the asker has gone; from here on it cannot cancel any more
            try:
                answer.set_result(read(self._core))
            except Exception as error:  # noqa: BLE001  # the asker's, and raised there
                answer.set_exception(error)

        if not self._give(command):
            answer.set_exception(_closed())
        return answer

    def shutdown(self) -> None:
        """End everything with "abort" and wait for the thread."""
        self._give(self._close)
        self._thread.join()

    def _give(self, command: Callable[[], None]) -> bool:
        """Have `command` run between two steps; False if there are none any more."""
        with self._lock:
            if not self._is_closed:
                self._commands.put(command)
            return not self._is_closed

    def _run(self) -> None:
        while not self._is_closed:
            self._run_commands()
            if self._core.has_unfinished_requests():
                self._step()

    def _run_commands(self) -> None:
        """All that were given; waits for one if there is nothing else to do."""
        if not self._core.has_unfinished_requests():
            self._commands.get()()
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _submit(self, listener: Listener, requests: Sequence[Request], arrival: float) -> None:
        if self._is_closed:
            listener.tell(_closed())
            return
        by_id = {req_id: g for g in listener.generations for req_id in g.req_ids}
        self._running.update({req_id: (g, listener) for req_id, g in by_id.items()})
        try:
            self._core.add_requests(requests, arrival)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this listener's alone
            self._abort(listener)
            listener.tell(error)

    def _abort(self, listener: Listener) -> None:
        for generation in listener.generations:
            self._core.abort(generation.unfinished_req_ids)
            for req_id in generation.req_ids:
                self._running.pop(req_id, None)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True  # what is in line by now still runs
        self._end_all("abort", "the engine was shut down")

    def _step(self) -> None:
        try:
            events = self._core.step()
            self._num_failed_steps = 0
        except Exception as error:
            # Requests of this step have ended with an error, which the next step's events tell.
            logger.exception("a step failed")
            self._num_failed_steps += 1
            if self._num_failed_steps == _MAX_FAILED_STEPS:
                self._num_failed_steps = 0
                self._end_all("error", f"steps fail one after another: {error!r}")
            return
        self._hand_out(events)

    def _hand_out(self, events: Sequence[RequestEvent]) -> None:
        listeners: dict[Listener, None] = {}  # an ordered set
        for event in events:
            found = self._running.get(event.req_id)
            if found is None:
                continue  # aborted while the step ran
            generation, listener = found
            try:
                self._push(event, generation)
            except Exception as error:  # it is this request's, and harms no other
                logger.exception("request %s failed", event.req_id)
                self._abort(listener)
                listener.tell(error)
                continue
            listeners[listener] = None
        for listener in listeners:
            if deltas := listener.take_deltas():
                listener.tell(deltas)

    def _push(self, event: RequestEvent, generation: Generation) -> None:
        stop_string = generation.push(event)
        if stop_string is not None:
            self._core.stop(event.req_id, stop_string)
        if stop_string is not None or event.finish_reason is not None:
            del self._running[event.req_id]

    def _end_all(self, finish_reason: str, error: str) -> None:
        self._core.abort(list(self._running))
        self._hand_out(
            [
                RequestEvent(req_id, [], finish_reason=finish_reason, error=error)
                for req_id in self._running
            ]
        )


def _closed() -> UnavailableError:
    return UnavailableError("the engine was shut down; start it again")
