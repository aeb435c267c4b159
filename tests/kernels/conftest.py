"""A test of a kernel runs on each instruction set that was built and that this machine runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from kvloom.ops.isa import built_isas, can_run, module_name


@pytest.fixture(scope="session", params=[isa for isa in built_isas() if can_run(isa)])
def native(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(module_name(request.param))
