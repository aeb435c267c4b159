"""Reading a Hugging Face config's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvloom.errors import UnsupportedModelError


def read_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The positive integer `name`; `default` where the config has none.

    Raises:
        UnsupportedModelError: missing without a default, or not a positive integer.
    """
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            f"the config's {name} should be a positive integer, not {value!r}; "
            "is this the config.json of a text model?"
        )
    return value
