"""What every request passes first: an id, the key, limits on its body, a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.server.connection import ClientGoneError
from kvloom.server.errors import ApiError, as_api_error
from kvloom.server.settings import ServerSettings

ACCESS_LOG = "kvloom.access"

OPEN_PATHS = frozenset({"/health", "/version", "/cache"})  # need no key; /cache is a static page
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._log = logging.getLogger(ACCESS_LOG)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = {key.decode("latin-1"): value for key, value in scope["headers"]}
        request_id = _request_id(headers)
        scope["kvloom.request_id"] = request_id
        log: dict[str, Any] = scope.setdefault("kvloom.log", {})
        log["status"] = 499  # unless an answer begins

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                log["status"] = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._pass(scope, receive, send_with_id, headers)
        finally:
            self._write_log(scope, request_id, time.perf_counter() - start)

    async def _pass(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, bytes]
    ) -> None:
        try:
            self._check_key(scope["path"], headers)
            body = await self._read_body(receive, headers)
        except ApiError as error:
            await as_api_error(error).response(scope, receive, send)
            return
        except ClientGoneError:
            return
        is_read = False

        async def receive_body() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_body, send)

    def _check_key(self, path: str, headers: Mapping[str, bytes]) -> None:
        keys = self._settings.api_keys
        if not keys or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", b"").partition(b" ")
        # All keys are compared, and each takes the same time however much of it is right.
        is_right = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]
        if scheme.lower() != b"bearer" or not any(is_right):
            raise ApiError(
                401,
                "this server asks for an API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read_body(self, receive: Receive, headers: Mapping[str, bytes]) -> bytes:
        limit = self._settings.max_body_bytes
        told = headers.get("content-length", b"")
        if told.isdigit() and (len(told) > len(str(limit)) or int(told) > limit):
            raise _too_large(limit)
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunks.append(message.get("body", b""))
                    num_bytes += len(chunks[-1])
                    if num_bytes > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            seconds = self._settings.body_timeout_seconds
            message_text = f"the body did not arrive within {seconds:g} seconds"
            raise ApiError(408, message_text, headers={"Connection": "close"}) from None

    def _write_log(self, scope: Scope, request_id: str, seconds: float) -> None:
        client = scope.get("client")
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "seconds": round(seconds, 6),
            **scope["kvloom.log"],
        }
        self._log.info("%s", json.dumps(line))


def _request_id(headers: Mapping[str, bytes]) -> str:
    """The client's own id, if it is a plain word, or a new one."""
    given = headers.get("x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes; send less, or raise max_body_bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
