"""Reading a Hugging Face config's fields: each is of its kind, or refused by name and value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from kvloom.errors import UnsupportedModelError

_INT_END = 1 << 31


def read_int(
    config: Mapping[str, Any], name: str, default: int | None = None, *, at_least: int = 1
) -> int:
    """The integer `name`; `default` where the config has none.

    Raises:
        UnsupportedModelError: missing without a default, or not an integer from `at_least` on.
    """
    value = _get(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < _INT_END:
        kind = "a positive integer" if at_least == 1 else f"an integer from {at_least} on"
        raise _wrong(name, value, f"{kind} below 2**31")
    return value


def read_float(
    config: Mapping[str, Any], name: str, default: float | None = None, *, above: float = 0.0
) -> float:
    """The number `name`; `default` where the config has none.

    Raises:
        UnsupportedModelError: missing without a default, or not a finite number above `above`.
    """
    value = _get(config, name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value <= sys.float_info.max:  # NaN is neither
        raise _wrong(name, value, f"a finite number above {above:g}")
    return float(value)


def read_float_or_none(
    config: Mapping[str, Any], name: str, default: float | None = None
) -> float | None:
    """The positive number `name`; null means None, and a config without the field `default`.

    Raises:
        UnsupportedModelError: neither null nor a finite number above 0.
    """
    if config.get(name, default) is None:
        return None
    return read_float(config, name, default)


def read_bool(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Whether `name` is true; `default` where the config has none.

    Raises:
        UnsupportedModelError: it is neither true nor false.
    """
    value = _get(config, name, default)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def read_ints(
    config: Mapping[str, Any], name: str, count: int, default: int | None = None
) -> tuple[int, ...]:
    """The integer `name` of each of `count` layers: the config has one for all, or a list.

    Raises:
        UnsupportedModelError: missing without a default, or not `count` positive integers.
    """
    values = config.get(name)
    if not isinstance(values, list):
        return (read_int(config, name, default),) * count
    if len(values) != count:
        raise _wrong(name, values, f"one value per layer, {count} in all")
    return tuple(read_int({name: value}, name) for value in values)


def read_floats(config: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """The list of positive numbers `name`.

    Raises:
        UnsupportedModelError: missing, or another thing than a list of finite numbers above 0.
    """
    values = config.get(name)
    if not isinstance(values, list):
        raise _wrong(name, values, "a list of numbers")
    return tuple(read_float({name: value}, name) for value in values)


def read_mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object `name`; an empty one where the config has none.

    Raises:
        UnsupportedModelError: it is no object.
    """
    value = _get(config, name, {})
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    return value


def _get(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _wrong(name: str, value: Any, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the config's {name} should be {kind}, not {value!r:.80}; "
        "is this the config.json of a text model?"
    )
