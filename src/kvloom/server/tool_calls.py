"""Tool calls in the text of a model, whole or as it comes.

Parsers get text piece by piece and give back content and calls; a whole text is one piece, so
both ways give the same. What may still become a call is held back. What looks like a call and is
none (it is no JSON, or cut short) stays content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvloom.server.forced_calls import STYLES, CallStyle


@dataclass(frozen=True, slots=True)
class CallDelta:
    """One call; `arguments` is a JSON object."""

    call_id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolParser(Protocol):
    """Finds the calls in one text."""

    def push(self, text: str) -> Iterator[str | CallDelta]:
        """Take more text; what is certain by now."""

    def finish(self) -> Iterator[str | CallDelta]:
        """The text has ended: the rest."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls; `style` is for those that it must write."""

    name: str
    parser: Callable[[], ToolParser]
    style: CallStyle


class _Content:
    """Content on its way: white space next to calls is none."""

    def __init__(self) -> None:
        self._held = ""

    def put(self, text: str) -> Iterator[str]:
        """Add content; its last white space waits for what follows."""
        text = self._held + text
        solid = text.rstrip()
        self._held = text[len(solid) :]
        if solid:
            yield solid

    def drop_space(self) -> None:
        """A call follows, or the text ends behind one."""
        self._held = ""

    def finish(self) -> Iterator[str]:
        """The text ends."""
        held, self._held = self._held, ""
        if held:
            yield held


class HermesParser:
    """Hermes, Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""  # what is not given back yet; a call in it begins with it
        self._content = _Content()
        self._has_calls = False

    def push(self, text: str) -> Iterator[str | CallDelta]:
        """Content up to a tag, then each call when its tag is closed."""
        self._text += text
        while True:
            begin = self._text.find(self._OPEN)
            if begin < 0:
                begin = len(self._text) - _overlap(self._text, self._OPEN)
            content, self._text = self._text[:begin], self._text[begin:]
            yield from self._content.put(content)
            end = self._text.find(self._CLOSE)
            if end < 0 or not self._text.startswith(self._OPEN):
                return
            inner, behind = self._text[len(self._OPEN) : end], end + len(self._CLOSE)
            yield from self._call_or_content(inner, self._text[:behind])
            self._text = self._text[behind:]

    def finish(self) -> Iterator[str | CallDelta]:
        """A last call may lack its closing tag: some models end the text instead."""
        text, self._text = self._text, ""
        if text.startswith(self._OPEN):
            yield from self._call_or_content(text[len(self._OPEN) :], text)
        else:
            yield from self._content.put(text)
        if self._has_calls:
            self._content.drop_space()
        yield from self._content.finish()

    def _call_or_content(self, inner: str, whole: str) -> Iterator[str | CallDelta]:
        call = _as_call(_decoded(inner), "arguments", _new_id())
        if call is None:
            yield from self._content.put(whole)
        else:
            self._has_calls = True
            self._content.drop_space()
            yield call


class TailParser:
    """Content, then nothing but calls up to the end, which are read when it is there."""

    def __init__(
        self, find: Callable[[str], int], read: Callable[[str], list[CallDelta] | None]
    ) -> None:
        """`find`: where calls begin, or may begin once there is more; `read`: None for no calls."""
        self._find = find
        self._read = read
        self._text = ""
        self._given = 0
        self._content = _Content()

    def push(self, text: str) -> Iterator[str | CallDelta]:
        """What cannot be the beginning of calls."""
        self._text += text
        begin = max(self._find(self._text), self._given)
        content, self._given = self._text[self._given : begin], begin
        yield from self._content.put(content)

    def finish(self) -> Iterator[str | CallDelta]:
        """The calls, or what looked like them."""
        tail = self._text[self._given :]
        calls = self._read(tail) if tail else None
        if calls is None:
            yield from self._content.put(tail)
        else:
            self._content.drop_space()
            yield from calls
        yield from self._content.finish()


_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_TAG = "[TOOL_CALLS]"


def _find_llama3(text: str) -> int:
    """Calls are the whole text: an object, or a tag before it."""
    start = text.lstrip()
    is_call = start.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(start)
    return 0 if is_call else len(text)


def _read_llama3(text: str) -> list[CallDelta] | None:
    """{"name": ..., "parameters": {...}}, several of them with ; between."""
    rest = text.strip().removeprefix(_PYTHON_TAG).strip()
    calls = []
    while rest:
        value, rest = _first_json(rest)
        call = _as_call(value, "parameters", _new_id())
        if call is None:
            return None
        calls.append(call)
        rest = rest.lstrip().removeprefix(";").lstrip()
    return calls or None


def _find_mistral(text: str) -> int:
    begin = text.find(_MISTRAL_TAG)
    return begin if begin >= 0 else len(text) - _overlap(text, _MISTRAL_TAG)


def _read_mistral(text: str) -> list[CallDelta] | None:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} each."""
    if not text.startswith(_MISTRAL_TAG):
        return None
    calls: list[CallDelta | None] = []
    for part in text.split(_MISTRAL_TAG)[1:]:
        listed = _decoded(part)
        if isinstance(listed, list):
            calls += [_as_call(value, "arguments", _new_mistral_id()) for value in listed]
        else:
            name, _, arguments = part.partition("[ARGS]")
            value = {"name": name.strip(), "arguments": _decoded(arguments)}
            calls.append(_as_call(value, "arguments", _new_mistral_id()))
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


FORMATS = {
    "hermes": ToolFormat("hermes", HermesParser, STYLES["hermes"]),
    "llama3": ToolFormat(
        "llama3", lambda: TailParser(_find_llama3, _read_llama3), STYLES["llama3"]
    ),
    "mistral": ToolFormat(
        "mistral", lambda: TailParser(_find_mistral, _read_mistral), STYLES["mistral"]
    ),
}


def find_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None if it knows no tools, or another format."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if _MISTRAL_TAG in template:
        return FORMATS["mistral"]
    if _PYTHON_TAG in template or '"parameters":' in template:
        return FORMATS["llama3"]
    return None


def _as_call(value: Any, arguments_key: str, call_id: str) -> CallDelta | None:
    """A call from {"name": ..., arguments_key: {...}}; None for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get(arguments_key, {})
    if not isinstance(arguments, dict):
        return None
    return CallDelta(call_id, value["name"], json.dumps(arguments, ensure_ascii=False))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_mistral_id() -> str:
    """Mistral's templates ask for nine letters and digits."""
    return secrets.token_hex(5)[:9]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first_json(text: str) -> tuple[Any, str]:
    """The JSON value that `text` begins with, and the rest; (None, "") if there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:]


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
