"""Options and fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FULL_SCALE = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="long runs in full size")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `full` out of a normal run; they would take minutes."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> int:
    """Factor on the number of random operations and draws: 1, or 20 with --full."""
    return FULL_SCALE if request.config.getoption("--full") else 1


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched into the user's cache folder if need be."""
    from kvloom.config import DEFAULT_MODEL
    from kvloom.weights.source import resolve_model

    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Where scripts/fetch_models puts further models: KVLOOM_MODELS, else in kvloom's cache."""
    from kvloom.weights.source import cache_folder

    folder = os.environ.get("KVLOOM_MODELS")
    return Path(folder) if folder else cache_folder() / "models"
