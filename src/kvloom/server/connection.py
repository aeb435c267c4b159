"""Answers that end when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, until they end or the client goes away; `close` is called at last.

    A client that takes nothing for `timeout_seconds` counts as gone: what it left in line holds
    memory and its request's seats.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], close: Callable[[], None], timeout_seconds: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_seconds = timeout_seconds

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        async for event in self._events:
            body = f"data: {event}\n\n".encode()
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                raise ClientGoneError from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def to_json(value: Any) -> str:
    """Compact JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
