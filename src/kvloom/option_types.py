"""Checks that an option holds what its annotation says."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvloom.errors import ConfigError

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]

_KIND_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "True or False",
    NoneType: "None",
    tuple[int, ...]: "a tuple of integers",
}


def check_types(part: Any) -> None:
    """Refuse a field that does not hold what its annotation says.

    Raises:
        ConfigError: names the field.
    """
    for name, hint in get_type_hints(type(part)).items():
        is_single = isinstance(hint, type) or get_origin(hint) is tuple
        kinds = (hint,) if is_single else get_args(hint)
        value = getattr(part, name)
        if not any(_is_a(kind, value) for kind in kinds):
            wanted = " or ".join(_kind_name(kind) for kind in kinds)
            raise ConfigError(f"{name} is {value!r}; give {wanted}")


def _is_a(kind: Any, value: object) -> bool:
    """Like isinstance, but a bool is no number and an integer is a float."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(get_args(kind)[0], v) for v in value)
    kinds = (int, float) if kind is float else (kind,)
    return isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    return _KIND_NAMES.get(kind) or f"a {kind.__name__}"
