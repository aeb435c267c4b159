"""Runs files in OpenAI's batch format without a server: the same checks, the same answers."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvloom.engine.async_llm import AsyncLLM
from kvloom.errors import ConfigError, KvloomError
from kvloom.server.chat import start_chat
from kvloom.server.completions import start_completion
from kvloom.server.errors import ApiError, as_api_error, from_validation
from kvloom.server.schema import ChatRequest, CompletionRequest
from kvloom.server.settings import ServerSettings
from kvloom.server.state import ServerState

_NO_LIMIT = 2**31
_ENDPOINTS: dict[str, tuple[type[Any], Any]] = {
    "/v1/chat/completions": (ChatRequest, start_chat),
    "/v1/completions": (CompletionRequest, start_completion),
}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch: its custom_id, where it would be posted, and its body."""

    custom_id: str
    url: str
    body: Any


def read_batch(path: Path) -> list[BatchLine]:
    """All lines of a batch file.

    Raises:
        ConfigError: a line is no request, or two have one custom_id.
    """
    lines: dict[str, BatchLine] = {}
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not text.strip():
            continue
        line = _as_line(f"{path}, line {number}", text)
        if line.custom_id in lines:
            raise ConfigError(f"{path}, line {number}: custom_id {line.custom_id!r} is there twice")
        lines[line.custom_id] = line
    return list(lines.values())


def finished_ids(path: Path) -> set[str]:
    """The custom_ids that an earlier run has answered; a torn last line is cut off."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):  # the earlier run was killed while it wrote
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        return {json.loads(line)["custom_id"] for line in whole.splitlines() if line.strip()}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} holds other lines than answers of a batch; name another --output"
        ) from None


async def run_batch(
    engine: AsyncLLM,
    model_name: str,
    lines: list[BatchLine],
    output: Path,
    on_answer: Callable[[Mapping[str, Any]], None],
) -> None:
    """Answer `lines`; answers are appended to `output` as they come."""
    # Twice what runs at once: so there is always one in line.
    num_at_once = 2 * engine.config.scheduler.max_num_seqs
    state = ServerState(ServerSettings((model_name,), max_choices=_NO_LIMIT), engine)
    waiting = iter(lines)

    async def work() -> None:
        for line in waiting:
            answer = await _answer(state, line)
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            on_answer(answer)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_at_once, len(lines))):
            group.create_task(work())


async def _answer(state: ServerState, line: BatchLine) -> dict[str, Any]:
    request_id = secrets.token_hex(16)
    try:
        status, body = 200, await _run(state, line, request_id)
    except (ApiError, KvloomError) as error:
        refused = as_api_error(error)
        status, body = refused.status, refused.body
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }


async def _run(state: ServerState, line: BatchLine, request_id: str) -> dict[str, Any]:
    kind, start = _ENDPOINTS[line.url]
    try:
        body = kind.model_validate(line.body)
    except ValidationError as error:
        located = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise from_validation(located, line.body) from None
    if body.stream:
        raise ApiError(400, "stream: a batch has whole answers", param="stream")
    reply = await start(state, body, request_id)
    try:
        answer: dict[str, Any] = await reply.whole()
    finally:
        reply.close()
    return answer


def _as_line(where: str, text: str) -> BatchLine:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON ({error})") from None
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        raise ConfigError(f"{where} has no custom_id; give each request its own")
    if line.get("method", "POST") != "POST" or line.get("url") not in _ENDPOINTS:
        raise ConfigError(
            f"{where}: {line.get('method')} {line.get('url')} is not supported; "
            f"POST to {' or '.join(_ENDPOINTS)}"
        )
    return BatchLine(line["custom_id"], line["url"], line.get("body"))


def unfinished(lines: list[BatchLine], done: set[str]) -> Iterator[BatchLine]:
    """The lines that are not answered yet."""
    return (line for line in lines if line.custom_id not in done)
