"""Live servers over tiny models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import TINY_OPTIONS, LiveServer, run_server
from tiny_folder import make_tiny_folder

# test_cache_page drives the page as the benchmark does.
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def tiny_server(tiny_folder: Path) -> Iterator[LiveServer]:
    with run_server({"model": str(tiny_folder), **TINY_OPTIONS}) as live:
        yield live


@pytest.fixture
def live(tiny_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server; each test leaves it idle."""
    yield tiny_server
    tiny_server.check_idle()
