"""Grammars of answers that consist of tool calls, as each family of models writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.errors import RequestError
from kvloom.sampling.grammar import JSON_OPTIONS
from kvloom.structured_outputs import StructuredOutputs


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Where the texts around a call's arguments stand: `begin` call `between` call ... `end`.

    Attributes:
        arguments_key: what a call names its arguments.
    """

    begin: str
    between: str
    end: str
    arguments_key: str = "arguments"


STYLES = {
    "hermes": CallStyle("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "llama3": CallStyle("", "; ", "", "parameters"),
    "mistral": CallStyle("[TOOL_CALLS] [", ", ", "]"),
}


def forced_calls(
    style: CallStyle, functions: Mapping[str, Mapping[str, Any] | None], is_single: bool
) -> StructuredOutputs:
    """An answer of one call, or of one or more, of functions whose parameters have JSON schemas.

    Raises:
        RequestError: parameters are not those of an object.
    """
    more = "" if is_single else f"({_literal(style.between)} call)*"
    texts = [style.begin, "call", more, style.end]
    start = [_literal(t) if t in (style.begin, style.end) else t for t in texts if t]
    rules = [f"start: {' '.join(start)}", f"call: {_any_of('call', len(functions))}"]
    for index, (name, parameters) in enumerate(functions.items()):
        begin = f'{{"name": {json.dumps(name)}, "{style.arguments_key}": '
        rules.append(f"call_{index}: {_literal(begin)} arguments_{index} {_literal('}')}")
        rules.append(f"arguments_{index}: %json {_schema(name, parameters)}")
    return StructuredOutputs(grammar="\n".join(rules))


def _schema(name: str, parameters: Mapping[str, Any] | None) -> str:
    schema = {"type": "object", **(parameters or {})}
    if schema["type"] != "object":
        raise RequestError("tools", f"the parameters of {name} are no object; say type: object")
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _any_of(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(count))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
