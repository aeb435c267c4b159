"""Requests as bytes, for clients that behave as no library does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def post(path: str, body: Any, headers: Sequence[str] = ()) -> bytes:
    """A whole POST request; `headers` are more lines of its head."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + content
