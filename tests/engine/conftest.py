"""One tiny random model for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom import LLM
from tiny_folder import make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(folder), num_blocks=200, max_num_batched_tokens=64)
    yield llm
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()
