"""What a generated text must be: a schema, an expression, a list of choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kvloom.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What a generated text must be; give exactly one. Needs the extra `structured`.

    Attributes:
        json: JSON that this JSON schema allows. A keyword that cannot be enforced is refused.
            Numbers are decimals, as JSON Schema says: -17.0000000000000001 is less than -17, though
            a reader that rounds to 64 bits finds them equal.
        json_object: any JSON object.
        regex: a match, from beginning to end, in the syntax of Rust's regex crate.
        choice: one of these strings.
        grammar: a sentence of this grammar, in Lark's form of EBNF with llguidance's extensions;
            the rule `start` is the text.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False, ())]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise RequestError("structured_outputs", f"give exactly one of {names}")
        check = {"json": _check_json, "json_object": _check_flag, "choice": _check_choice}
        [name] = given
        check.get(name, _check_text)(f"structured_outputs.{name}", getattr(self, name))

    @property
    def source(self) -> tuple[str, str]:
        """What kind of grammar it is, and its text: a schema, a JSON list of choices, ..."""
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else json.dumps(dict(self.json))
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            return "grammar", self.grammar
        if self.choice:
            return "choice", json.dumps(self.choice)
        return "json", '{"type": "object"}'


class GrammarProgress(NamedTuple):
    """Where a text is in its grammar.

    Attributes:
        is_complete: nothing can follow.
        error: why it cannot go on though it is not complete.
    """

    is_complete: bool
    error: str | None = None


def _check_json(field: str, schema: Any) -> None:
    """Refuse what is no object, or holds what JSON has no words for."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(field, f"it is no JSON schema: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(field, "a JSON schema is an object, {...}")


def _check_flag(field: str, value: Any) -> None:
    if value is not True:
        raise RequestError(field, f"{value!r} is no flag; give True or False")


def _check_choice(field: str, texts: Any) -> None:
    if not isinstance(texts, tuple):
        raise RequestError(field, f"{texts!r} is no list of strings")
    for text in texts:
        _check_text(field, text)


def _check_text(field: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(field, f"{text!r} is no text, or an empty one")
