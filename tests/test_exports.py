"""What `import kvloom` offers: the names of `__all__`, and nothing else that is public."""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing

import pytest

import kvloom


def packages() -> list[str]:
    found = pkgutil.walk_packages(kvloom.__path__, "kvloom.")
    return ["kvloom", *(module.name for module in found if module.ispkg)]


@pytest.mark.parametrize("name", packages())
def test_all_is_what_is_public(name: str):
    """Ruff (RUF022) keeps `__all__` sorted; here it must be complete, and every name there."""
    package = importlib.import_module(name)
    exported = getattr(package, "__all__", [])
    assert len(set(exported)) == len(exported)
    missing = [n for n in exported if not hasattr(package, n)]
    assert not missing
    public = {n for n in dir(package) if not n.startswith("_") and is_offered(package, n)}
    assert public <= set(exported)


def is_offered(package: types.ModuleType, name: str) -> bool:
    """Submodules appear in a package once they are imported; typing's names are tools, not ours."""
    is_tool = name == "annotations" or hasattr(typing, name)
    return not is_tool and not isinstance(getattr(package, name), types.ModuleType)


def test_the_package_offers_the_engine():
    assert {"EngineConfig", "LLM", "SamplingParams", "errors"} <= set(kvloom.__all__)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        kvloom.no_such_name  # noqa: B018  # the access itself is what is tested


def test_star_import_works():
    namespace: dict[str, object] = {}
    exec("from kvloom import *", namespace)  # the import itself is what is tested
    assert set(kvloom.__all__) <= set(namespace)
