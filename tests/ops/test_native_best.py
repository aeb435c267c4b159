"""A step that wants the best of its logits only, on the native backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from best_twin import keep_best, read_best
from kvloom.ops.isa import built_isas, can_run
from native_runner import Chunk, NativeRunner, make_backend, make_table
from tiny_families import ALL_CASES
from tiny_models import CASES, run_ranks

CONFIG = {**CASES["llama_gqa"], "head_dim": 16}


@pytest.mark.parametrize("packed", ["F32", "BF16"])
@pytest.mark.parametrize("isa", [isa for isa in built_isas() if can_run(isa)])
def test_a_program_keeps_the_best_of_what_it_would_return(
    isa: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And returns everything again in the next step, whose tokens are the same."""
    monkeypatch.setenv("KVLOOM_ISA", isa)
    runner = NativeRunner(CONFIG, make_backend(), packed=packed)
    assert runner.executable.keeps_best
    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 40).tolist()
    batch = runner.make_batch([Chunk(ids, make_table(1, 4), 0)])
    expected = keep_best(runner.forward(batch).copy())
    greatest, lanes = read_best(runner.forward(replace(batch, wants_best_only=True)))
    np.testing.assert_array_equal(greatest, expected[0])
    np.testing.assert_array_equal(lanes, expected[1])
    again = keep_best(runner.forward(batch))
    np.testing.assert_array_equal(again[0], expected[0])


@pytest.mark.parametrize(
    ("case", "keeps_best"), [("smollm3", True), ("gemma2", False), ("cohere2", False)]
)
def test_what_is_done_to_logits_needs_all_of_them(case: str, keeps_best: bool) -> None:
    """A soft cap or a scale."""
    config = {**ALL_CASES[case], "head_dim": 16}
    assert NativeRunner(config, make_backend()).executable.keeps_best == keeps_best


def test_ranks_gather_all_logits() -> None:
    def keeps_best(rank: Any, communicator: Any) -> bool:
        runner = NativeRunner(CONFIG, make_backend(1), rank=rank, communicator=communicator)
        return runner.executable.keeps_best

    assert run_ranks(2, keeps_best) == [False, False]
