"""Tiny random models of every family: transformers' logits, and the same whatever the schedule."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eager_backends import make_backend
from tiny_families import ALL_CASES, GOLDEN_FILES
from tiny_models import (
    CASES,
    GOLDEN_ROWS,
    NUM_TOKENS,
    TinyRunner,
    build_loaded,
    make_token_ids,
)

GOLDEN = Path(__file__).parent.parent / "golden"
pytestmark = pytest.mark.usefixtures("each_backend")
# One of each family whose layers are alike, and all others.
SCHEDULED_CASES = ["llama_mha_biases", "qwen2_tied", "qwen3_tied", "mistral_gqa"]
SCHEDULED_CASES += [case for case in ALL_CASES if case not in CASES]


def make_runner(config: dict[str, Any], block_size: int = 4) -> TinyRunner:
    backend = make_backend()
    return TinyRunner(build_loaded(config, backend), backend, block_size)


def logits(case: str, chunks: list[int], block_size: int = 4) -> np.ndarray:
    """[NUM_TOKENS, vocab_size], computed chunk by chunk over the cache."""
    runner = make_runner(ALL_CASES[case], block_size)
    ids, ends = make_token_ids(case), list(itertools.accumulate(chunks))
    assert ends[-1] == NUM_TOKENS
    return np.concatenate(
        [runner.step(ids[end - n : end]) for n, end in zip(chunks, ends, strict=True)]
    )


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_every_case_has_golden_logits(name: str) -> None:
    with zipfile.ZipFile(GOLDEN / f"{name}.npz") as file:
        stored = {Path(member).stem for member in file.namelist()}
    assert stored == {*GOLDEN_FILES[name], "made_with"}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in GOLDEN_FILES.items() for case in cases]
)
def test_logits_equal_transformers(name: str, case: str) -> None:
    with np.load(GOLDEN / f"{name}.npz") as golden:
        expected = golden[case]
    assert expected.std() > 1.0  # otherwise a tolerance of 1e-4 would say little
    out = logits(case, [NUM_TOKENS])[GOLDEN_ROWS]
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("case", SCHEDULED_CASES)
def test_cached_equals_uncached(case: str, block_size: int) -> None:
    whole = logits(case, [NUM_TOKENS], block_size)
    cached = logits(case, [1] * NUM_TOKENS, block_size)
    np.testing.assert_allclose(cached, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunks", [[3, 5, 16], [23, 1], [8, 8, 8]], ids=str)
@pytest.mark.parametrize("case", SCHEDULED_CASES)
def test_chunked_equals_whole(case: str, chunks: list[int]) -> None:
    np.testing.assert_allclose(logits(case, chunks), logits(case, [NUM_TOKENS]), rtol=0, atol=1e-4)


def test_a_later_token_changes_no_earlier_logits() -> None:
    case = "llama_gqa"
    ids = make_token_ids(case)
    changed = [*ids[:-1], (ids[-1] + 1) % 48]
    runs = [make_runner(CASES[case]).step(tokens) for tokens in (ids, changed)]
    np.testing.assert_allclose(runs[0][:-1], runs[1][:-1], rtol=0, atol=1e-5)
    assert np.abs(runs[0][-1] - runs[1][-1]).max() > 0.1


def test_only_the_wanted_rows_are_returned() -> None:
    ids = make_token_ids("llama_gqa")
    every = make_runner(CASES["llama_gqa"]).step(ids)
    some = make_runner(CASES["llama_gqa"]).step(ids, rows=[23, 4])
    np.testing.assert_allclose(some, every[[23, 4]], rtol=0, atol=1e-5)


ROPE_CASES = [case for case in CASES if any(k in case for k in ("linear", "llama3", "yarn"))]


@pytest.mark.parametrize("case", ROPE_CASES)
def test_the_scaled_ropes_show_in_the_logits(case: str) -> None:
    config = {k: v for k, v in CASES[case].items() if k != "rope_scaling"}
    theta = config.pop("rope_parameters", config).get("rope_theta")
    unscaled = make_runner({**config, "rope_theta": theta}).step(make_token_ids(case))
    assert np.abs(unscaled - logits(case, [NUM_TOKENS])).max() > 0.01
