"""Options and fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

FULL_SCALE = 20

# The same examples in every run, however long one takes: the machine's load is no verdict.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="long runs in full size")
    parser.addoption("--torch", action="store_true", help="the tests that need torch alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for: tests marked `full` take minutes, `torch` needs torch."""
    is_full, is_torch = config.getoption("--full"), config.getoption("--torch")

    def is_wanted(item: pytest.Item) -> bool:
        return (is_full or item.get_closest_marker("full") is None) and (
            is_torch == (item.get_closest_marker("torch") is not None)
        )

    left_out = [item for item in items if not is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_wanted(item)]


@pytest.fixture(params=["reference", pytest.param("torch", marks=pytest.mark.torch)])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `eager_backends.make_backend` makes: each backend that computes at once, in turn."""
    import eager_backends

    monkeypatch.setattr(eager_backends, "NAME", request.param)
    return request.param


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
