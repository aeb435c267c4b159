"""A step that wants the best of its logits only, on the native backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from best_twin import keep_best, read_best
from kvloom.ops import native_lowering
from kvloom.ops.isa import built_isas, can_run
from native_runner import SIZES, Chunk, NativeRunner, make_backend, make_table
from tiny_families import ALL_CASES
from tiny_models import CASES, make_weights, run_ranks, tensor_shapes

CONFIG = {**CASES["llama_gqa"], "head_dim": 16}
WIDE = {**CONFIG, "vocab_size": 4000, "hidden_size": 64}


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


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a head is, its best outputs are found by a screen."""
    monkeypatch.setattr(native_lowering, "MIN_SCREENED_SIZE", 0)


def best_tokens(rows: np.ndarray) -> list[int]:
    greatest, lanes = read_best(rows)
    panels = greatest.argmax(axis=1)
    return [32 * int(panel) + int(lanes[i, panel]) for i, panel in enumerate(panels)]


@pytest.mark.usefixtures("screened")
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("isa", [isa for isa in built_isas() if can_run(isa)])
def test_a_screened_head_finds_the_best_of_all_logits(
    isa: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a single row and of many, step after step; what it finds is exact."""
    monkeypatch.setenv("KVLOOM_ISA", isa)
    runner = NativeRunner(WIDE, make_backend(num_threads), packed="BF16")
    rng = np.random.default_rng(1)
    for num_tokens in (1, 40, 7, 100, 1):
        ids = rng.integers(0, WIDE["vocab_size"], num_tokens).tolist()
        batch = runner.make_batch([Chunk(ids, make_table(1, 8), 0)])
        all_logits = runner.forward(batch).copy()
        kept = runner.forward(replace(batch, wants_best_only=True))
        assert best_tokens(kept) == all_logits.argmax(axis=1).tolist()
        np.testing.assert_array_equal(read_best(kept)[0].max(axis=1), all_logits.max(axis=1))
        assert np.isneginf(read_best(kept)[0]).mean() > 0.5  # most panels were not multiplied


@pytest.mark.usefixtures("screened")
@pytest.mark.parametrize("num_tokens", [4, 12, 13, 40])
@pytest.mark.parametrize("spoilt", ["equal", "weight", "row", "huge"])
@pytest.mark.parametrize("isa", [isa for isa in built_isas() if can_run(isa)])
def test_where_a_screen_cannot_tell_the_whole_head_is_multiplied(
    isa: str, spoilt: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are all equal; strange ones in a column, or of a token; rows too large to bound.

    Beside one such row there are a tile of good ones, or several.
    """
    monkeypatch.setenv("KVLOOM_ISA", isa)
    weights = make_weights(tensor_shapes(WIDE))
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    if spoilt == "equal":
        head[:] = head[0]
    elif spoilt == "huge":
        weights["model.norm.weight"][:] = 1e16
    else:
        (head if spoilt == "weight" else embedding)[5] = np.nan
    runner = NativeRunner(WIDE, make_backend(), packed="BF16", weights=weights)
    ids = [1, *range(6, 4 + num_tokens), 5]  # what follows the spoilt one sees it
    batch = runner.make_batch([Chunk(ids, make_table(1, 8), 0)])
    expected = keep_best(runner.forward(batch).copy())
    kept = read_best(runner.forward(replace(batch, wants_best_only=True)))
    np.testing.assert_array_equal(kept[0], expected[0])
    for_numbers = ~np.isnan(expected[0])
    np.testing.assert_array_equal(kept[1][for_numbers], expected[1][for_numbers])


@pytest.mark.parametrize(("packed", "is_counted"), [("BF16", True), ("F32", False)])
def test_the_memory_of_a_screen_is_counted(
    packed: str, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """34 bytes for 32 numbers of the head, two floats per output, int8 rows and their bounds."""

    def counted() -> int:
        return NativeRunner(WIDE, make_backend(), packed=packed).executable.activation_bytes

    before = counted()
    monkeypatch.setattr(native_lowering, "MIN_SCREENED_SIZE", 0)
    hidden, num_outputs = WIDE["hidden_size"], -(-WIDE["vocab_size"] // 32) * 32
    bounds = 2 * 4 * 16 * -(-num_outputs // 32 // 16)  # two floats per panel, 16 at a time
    rows = SIZES.max_num_rows * (hidden // 32 * 40 + 12 + bounds)
    scratch = 2 * 2 * hidden  # a row for each thread, which needed none before
    expected = num_outputs * (hidden // 32 * 34 + 8) + rows + scratch
    assert counted() - before == (expected if is_counted else 0)


def test_a_screen_is_of_its_weight() -> None:
    backend = make_backend()
    kernels, pool = backend.kernels, backend.kernels.WeightPool()
    weights = [pool.allocate(kind, False, 64, 32, 1) for kind in ("BF16", "BF16", "F32")]
    with pytest.raises(ValueError, match="only plain BF16"):
        kernels.make_screen(backend.team, weights[2])
    screen = kernels.make_screen(backend.team, weights[0])
    sizes = kernels.ProgramSizes(
        max_num_tokens=4, max_num_rows=4, max_num_requests=1, max_model_len=64
    )
    slots = [kernels.SlotSpec(True, 4096), kernels.SlotSpec(True, 4096)]
    program = kernels.Program(backend.team, sizes, slots)
    out = kernels.Operand(1, True, 64)
    with pytest.raises(ValueError, match="another weight"):
        program.screened_logits(0, weights[1], screen, out)
    with pytest.raises(ValueError, match="a row for each row of logits"):
        program.screened_logits(0, weights[0], screen, kernels.Operand(1, False, 64))
    program.screened_logits(0, weights[0], screen, out)


@pytest.mark.parametrize(
    ("case", "keeps_best"), [("smollm3", True), ("gemma2", False), ("cohere2", False)]
)
def test_what_is_done_to_logits_needs_all_of_them(case: str, keeps_best: bool) -> None:
    """A soft cap or a scale."""
    config = {**ALL_CASES[case], "head_dim": 16}
    assert NativeRunner(config, make_backend()).executable.keeps_best == keeps_best


def test_a_vocabulary_of_one_token_is_no_choice() -> None:
    runner = NativeRunner({**CONFIG, "vocab_size": 1}, make_backend())
    assert not runner.executable.keeps_best
    (logits,) = runner.step([Chunk([0, 0], make_table(1, 4), 0)])
    assert logits.shape == (2, 1)


def test_ranks_gather_all_logits() -> None:
    def keeps_best(rank: Any, communicator: Any) -> bool:
        runner = NativeRunner(CONFIG, make_backend(1), rank=rank, communicator=communicator)
        return runner.executable.keeps_best

    assert run_ranks(2, keeps_best) == [False, False]
