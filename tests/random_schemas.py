"""Small random JSON schemas of what structured outputs enforce, for texts of bounded length."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ("^[a-c]{1,4}$", "^x[0-9]{2}-[A-Z]$", "^(yes|no)!?$")
_SCALARS = ("string", "pattern", "integer", "number", "boolean", "null", "enum", "const")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Objects and arrays two deep, with scalars in them; some refer to a definition."""
    return _schema(rng, 2) | {"$defs": {"one": _schema(rng, 0)}}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [*_SCALARS, "any"] if depth else _SCALARS
    if depth and rng.random() < 0.7:
        kinds = ["object", "object", "array"]
    kind = rng.choice(kinds)
    return _MAKERS[kind](rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "bb", "name", "to do", "é", 'q"q'], rng.randint(1, 3))
    properties = {name: _schema(rng, depth - 1) for name in names}
    if rng.random() < 0.3:
        properties["ref"] = {"$ref": "#/$defs/one"}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 1),
    }


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 50)}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 3)
    return {"type": "string", "minLength": fewest, "maxLength": fewest + rng.randint(0, 5)}


_MAKERS: dict[str, Any] = {
    "object": _object,
    "array": _array,
    "integer": _integer,
    "number": _number,
    "string": _string,
    "pattern": lambda rng, depth: {"type": "string", "pattern": rng.choice(_PATTERNS)},
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {"enum": rng.sample(["x", 1, True, None, "ü\n", 2.5], 3)},
    "const": lambda rng, depth: {"const": rng.choice(["only", 7, [1, "a"], {"k": False}])},
    "any": lambda rng, depth: {"anyOf": [_schema(rng, depth - 1) for _ in range(2)]},
}
