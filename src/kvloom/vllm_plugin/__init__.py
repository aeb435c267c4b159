"""Real vLLM over kvloom's model runner: a platform plugin, found by vLLM through its entry point.

vLLM keeps its API server, engine, scheduler and KV cache manager. Classes here adapt: they
translate its configuration, its KV cache layout and its steps into kvloom's own, and the results
back. Nothing of vLLM is patched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

__all__ = ["register"]

_logger = logging.getLogger(__name__)

_GROUP = "vllm.platform_plugins"
_OURS = ("kvloom", "cpu")


def register() -> str | None:
    """The platform class that vLLM shall use, or None where an accelerator claims vLLM.

    vLLM calls it wherever its environment variable VLLM_PLUGINS is not set, or names kvloom.
    """
    for name, detect in _other_platforms():
        try:
            is_active = detect() is not None
        except Exception:  # noqa: BLE001  a foreign check that fails means what it means to vLLM
            is_active = False
        if is_active:
            _logger.info("kvloom leaves vLLM to the platform %s", name)
            return None
    return "kvloom.vllm_plugin.platform.KvloomPlatform"


def _other_platforms() -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The checks of vLLM's own accelerators and of other plugins, by name."""
    from importlib.metadata import entry_points

    from vllm import envs, platforms

    builtin = getattr(platforms, "builtin_platform_plugins", {})
    yield from ((name, check) for name, check in builtin.items() if name not in _OURS)
    for plugin in entry_points(group=_GROUP):
        is_allowed = envs.VLLM_PLUGINS is None or plugin.name in envs.VLLM_PLUGINS
        if is_allowed and plugin.name not in _OURS:
            yield plugin.name, plugin.load()
