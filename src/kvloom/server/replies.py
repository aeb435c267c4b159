"""What chat and completion answers have in common: running a request, whole or as a stream."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from kvloom.engine.async_llm import RequestStream
from kvloom.engine.outputs import RequestOutput, TextDelta
from kvloom.errors import KvloomError
from kvloom.server.connection import ClientGoneError, EventStream, to_json, while_connected
from kvloom.server.errors import ApiError, as_api_error
from kvloom.server.schema import SamplingFields
from kvloom.server.state import ServerState

logger = logging.getLogger(__name__)

_CLIENT_GONE = 499  # nobody sees it but the access log


class ChoiceWriter(Protocol):
    """Writes one choice of an answer."""

    def whole(self) -> dict[str, Any]:
        """The finished choice."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that come before the first token."""

    def add(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Choices of the chunks for what was added."""


@dataclass(slots=True)
class Reply:
    """One answer on its way.

    Attributes:
        header: the fields that the answer and all its chunks begin with.
        chunk_object: the `object` field of chunks.
        writers: one per choice, in order of their index; `num_choices` of each prompt.
        release: gives back the seats that the request holds.
    """

    header: dict[str, Any]
    chunk_object: str
    stream: RequestStream
    writers: Sequence[ChoiceWriter]
    num_choices: int
    release: Callable[[], None]
    log: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """Abort what still runs."""
        self.stream.close()
        self.release()
        self.log.update(_log_fields(self.stream.outputs))

    async def whole(self) -> dict[str, Any]:
        """The answer once all choices have ended."""
        async for _ in self.stream:
            pass
        self._raise_failures()
        choices = [writer.whole() for writer in self.writers]
        return {**self.header, "choices": choices, "usage": usage_of(self.stream.outputs)}

    async def events(self, has_usage: bool) -> AsyncIterator[str]:
        """The chunks, each as JSON, then [DONE]."""
        no_usage: dict[str, Any] = {"usage": None} if has_usage else {}
        header = {**self.header, "object": self.chunk_object}
        try:
            for writer in self.writers:
                for choice in writer.begin():
                    yield to_json({**header, "choices": [choice], **no_usage})
            async for prompt, delta in self.stream:
                writer = self.writers[prompt * self.num_choices + delta.index]
                for choice in writer.add(delta):
                    yield to_json({**header, "choices": [choice], **no_usage})
                if delta.finish_reason is not None:
                    self._raise_failures()
            if has_usage:
                usage = usage_of(self.stream.outputs)
                yield to_json({**header, "choices": [], "usage": usage})
        except Exception as error:  # the answer has begun: only an event can tell
            if not isinstance(error, ApiError | KvloomError):
                logger.exception("a stream failed")
            yield to_json(as_api_error(error).body)
        yield "[DONE]"

    def _raise_failures(self) -> None:
        for output in self.stream.outputs:
            for choice in output.outputs:
                if choice.finish_reason == "error":
                    raise ApiError(500, f"the engine failed: {choice.error}", code="engine_error")
                if choice.finish_reason == "abort":
                    raise ApiError(503, "the server was shut down", code="unavailable")


async def send(state: ServerState, request: Request, body: SamplingFields, start: Any) -> Response:
    """Answer a request as a whole or as a stream; `start` makes the Reply.

    The client may leave at any time: what it asked for is aborted.
    """
    try:
        reply: Reply = await while_connected(request.receive, start)
        reply.log = request.scope.setdefault("kvloom.log", {})
        if body.user is not None:
            reply.log["user"] = body.user
        if body.stream:
            events = reply.events(body.wants_usage_chunk)
            return EventStream(events, reply.close, state.settings.send_timeout_seconds)
        try:
            return JSONResponse(await while_connected(request.receive, reply.whole()))
        finally:
            reply.close()
    except ClientGoneError:
        return Response(status_code=_CLIENT_GONE)


def header_of(id_prefix: str, kind: str, model: str, request_id: str) -> dict[str, Any]:
    """The first fields of an answer."""
    return {
        "id": f"{id_prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens in and out; a prompt counts once, however many choices it has."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }


def _log_fields(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    usage = usage_of(outputs)
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "finish_reasons": [c.finish_reason for output in outputs for c in output.outputs],
    }
