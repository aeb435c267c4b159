"""Chooses the native module: the best instruction set that was built and that runs here."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from types import ModuleType

from kvloom.errors import ConfigError

logger = logging.getLogger(__name__)

ISAS = ("avx512bf16", "avx512", "avx2", "generic")  # best first, as in csrc/arch/isas.cmake
NOT_BUILT = (
    "kvloom was installed without its native library. Install a C++17 compiler (such as g++) and "
    "then kvloom again, without KVLOOM_NATIVE=OFF; or choose the numpy reference, which is slow, "
    "with the backend `reference`"
)


def load_native() -> ModuleType:
    """The native module for this machine.

    Raises:
        ConfigError: none was built, or KVLOOM_ISA names one that cannot be used here.
    """
    isa = choose_isa(built_isas(), os.environ.get("KVLOOM_ISA"))
    module = importlib.import_module(module_name(isa))
    logger.info("native library: %s", isa)
    return module


def choose_isa(built: tuple[str, ...], forced: str | None) -> str:
    """The instruction set `forced`, or else the best of those `built` that this machine can run."""
    if not built:
        raise ConfigError(NOT_BUILT)
    usable = [isa for isa in built if can_run(isa)]
    if forced is None:
        return usable[0]  # the generic one is part of every build
    if forced not in usable:
        reason = "is not known"
        if forced in ISAS:
            reason = "is not supported by this machine" if forced in built else "was not built"
        raise ConfigError(f"KVLOOM_ISA={forced} {reason}; unset it, or use one of {usable}")
    return forced


def built_isas() -> tuple[str, ...]:
    """The instruction sets that this installation has modules for, best first."""
    return tuple(isa for isa in ISAS if importlib.util.find_spec(module_name(isa)))


def can_run(isa: str) -> bool:
    """Whether processor and operating system can run the module of `isa`."""
    probe = importlib.import_module("kvloom._cpu")
    return bool(probe.can_run(isa))


def module_name(isa: str) -> str:
    """The full name of the module of `isa`."""
    return f"kvloom._native_{isa}"
