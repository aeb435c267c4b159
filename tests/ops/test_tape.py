"""A recorded forward pass, replayed over the reference, is the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fused_ops import FusedOps
from kvloom.models.base import Model
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops import rewrites
from kvloom.ops.base import Batch, Ops
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.tape import Rows, Tape, record, replay
from tiny_families import ALL_CASES
from tiny_models import CASES, TinyRunner, build_loaded, make_token_ids, run_ranks

BACKEND = ReferenceBackend()
REWRITES: dict[str, Callable[[Tape], Tape]] = {
    "plain": lambda tape: tape,
    "hoist_row_selection": rewrites.hoist_row_selection,
    "fuse_attention": rewrites.fuse_attention,
    "fuse_gate": rewrites.fuse_gate,
    "fuse_residual": rewrites.fuse_residual,
    "fuse_residual_norm": rewrites.fuse_residual_norm,
    "pack_rows": rewrites.pack_rows,
    "pack_stacks": rewrites.pack_stacks,
    "fuse_gate_pack": lambda tape: rewrites.fuse_gate_pack(
        rewrites.pack_rows(rewrites.fuse_gate(tape))
    ),
    "fuse": rewrites.fuse,
}


class Replayed:
    """A model whose forward pass is a tape's."""

    def __init__(self, model: Model, tape: Tape) -> None:
        self.tape = tape
        self.max_model_len = model.max_model_len
        self.attention_layers = model.attention_layers
        self.get_kv_spec = model.get_kv_spec

    def forward(self, ops: Ops, batch: Batch) -> Any:
        return replay(self.tape, FusedOps(ops), batch)


def names(tape: Tape) -> list[str]:
    return [operation.name for operation in tape.operations]


def run_chunks(model: Any, case: str, communicator: Any = None) -> np.ndarray:
    """Logits of a prompt in three chunks; of the second chunk only two rows."""
    ids, runner = make_token_ids(case), TinyRunner(model, BACKEND)
    chunks = [(ids[:10], None), (ids[10:20], [7, 2]), (ids[20:21], None)]
    return np.concatenate([runner.step(chunk, communicator, rows) for chunk, rows in chunks])


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("case", ALL_CASES)
def test_replay_equals_the_model(case: str, rewrite: str) -> None:
    model = build_loaded(ALL_CASES[case], BACKEND)
    tape = REWRITES[rewrite](record(model))
    expected = run_chunks(model, case)
    np.testing.assert_allclose(run_chunks(Replayed(model, tape), case), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rewrite", ["plain", "fuse"])
def test_replay_on_two_ranks(rewrite: str) -> None:
    case = "llama_mha_biases"
    whole = run_chunks(build_loaded(CASES[case], BACKEND), case)

    def work(rank: TensorParallelRank, communicator: Any) -> np.ndarray:
        model = build_loaded(CASES[case], BACKEND, rank)
        tape = REWRITES[rewrite](record(model, rank.world_size))
        assert names(tape).count("all_reduce") == 1 + 2 * len(model.attention_layers)
        assert names(tape)[-1] == "all_gather"
        return run_chunks(Replayed(model, tape), case, communicator)

    for logits in run_ranks(2, work):
        assert isinstance(logits, np.ndarray), logits
        np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-4)


def test_widths_follow_from_the_parameters() -> None:
    model = build_loaded(CASES["llama_mqa_head_dim"], BACKEND)
    tape = record(model)
    # hidden 32; (4 + 1 + 1) heads of 16; gate and up of 40 each; vocabulary 48
    assert names(tape)[:6] == [
        "embedding",
        "rms_norm",
        "linear",
        "split_heads",
        "rope",
        "attention",
    ]
    shapes = {o.name: [v.shape for v in o.outputs] for o in tape.operations[:6]}
    assert shapes["embedding"] == [(32,)]
    assert shapes["linear"] == [(96,)]
    assert shapes["split_heads"] == [(4, 16), (1, 16), (1, 16)]
    assert shapes["attention"] == [(64,)]
    assert tape.result.shape == (48,)
    assert tape.result.rows is Rows.LOGITS


def test_heads_are_views_of_the_linear_value() -> None:
    tape = record(build_loaded(CASES["llama_mqa_head_dim"], BACKEND))
    qkv, split = tape.operations[2].output, tape.operations[3]
    assert [v.base for v in split.outputs] == [qkv.index] * 3
    assert [v.first_column for v in split.outputs] == [0, 64, 80]
    # v is read last, by attention; then nothing holds the memory of all three.
    assert tape.last_reads()[qkv.index] == names(tape).index("attention")


def test_one_rank_records_no_collectives() -> None:
    assert not {"all_reduce", "all_gather"} & set(
        names(record(build_loaded(CASES["qwen3_tied"], BACKEND)))
    )
