"""What each rewrite leaves on the tape. That results stay the same: test_tape."""

from __future__ import annotations

import pytest

from kvloom.ops import rewrites
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.tape import Operation, Rows, Tape, TapeValue, record
from tiny_models import CASES, build_loaded

NUM_LAYERS = 2


def make_tape(case: str = "llama_gqa", world_size: int = 1) -> Tape:
    return record(build_loaded(CASES[case], ReferenceBackend()), world_size)


def names(tape: Tape) -> list[str]:
    return [operation.name for operation in tape.operations]


def test_a_fused_layer_is_nine_operations() -> None:
    layer = ["norm_pack", "linear", "store_qkv", "attend", "pack", "add_linear"]
    layer += ["norm_pack", "gated_pack", "add_linear"]
    last = [*layer[:4], "select_rows", "pack", "select_rows", *layer[5:]]
    fused = names(rewrites.fuse(make_tape()))
    assert fused[: 1 + len(layer)] == ["embedding", *layer]
    assert sorted(fused[1 + len(layer) :]) == sorted([*last, "norm_pack", "linear"])


def test_selection_ends_below_the_last_attention() -> None:
    tape = rewrites.hoist_row_selection(make_tape())
    last_attention = max(i for i, name in enumerate(names(tape)) if name == "attention")
    assert names(tape)[last_attention + 1] == "select_rows"
    assert names(tape).count("select_rows") == 2  # of the attention's result, and of the residual
    computed = [o for o in tape.operations[last_attention + 1 :] if o.name != "select_rows"]
    assert all(value.rows is Rows.LOGITS for op in computed for value in op.outputs)


def test_a_result_that_others_read_is_not_hoisted() -> None:
    x = TapeValue(0, Rows.TOKENS, (4,), 0)
    y = TapeValue(1, Rows.TOKENS, (4,), 1)
    selected = TapeValue(2, Rows.LOGITS, (4,), 2)
    opaque = TapeValue(3, Rows.TOKENS, (4,), 3)
    operations = (
        Operation("embedding", (), (x,)),
        Operation("rms_norm", (x,), (y,)),
        Operation("select_rows", (y, None), (selected,)),
        Operation("something", (y,), (opaque,)),
    )
    tape = Tape(operations, selected)
    assert names(rewrites.hoist_row_selection(tape)) == names(tape)


@pytest.mark.parametrize("case", ["llama_gqa", "qwen3_tied"])
def test_attention_becomes_two_operations(case: str) -> None:
    fused = rewrites.fuse_attention(make_tape(case))
    assert not {"split_heads", "rope", "attention"} & set(names(fused))
    stores = [o for o in fused.operations if o.name == "store_qkv"]
    assert len(stores) == names(fused).count("attend") == NUM_LAYERS
    assert all((o.arguments[3] is None) == (case == "llama_gqa") for o in stores)
    # Only the norms over hidden rows are left: two per layer and the last one.
    assert names(fused).count("rms_norm") == 2 * NUM_LAYERS + 1


def test_no_residual_is_fused_across_a_collective() -> None:
    fused = rewrites.fuse_residual(make_tape(world_size=2))
    assert "add_linear" not in names(fused)
    assert names(fused).count("add") == 2 * NUM_LAYERS


def test_no_residual_is_overwritten_while_it_is_needed() -> None:
    tape = make_tape()
    # Somebody reads the first residual, the embedding, at the very end.
    first = tape.operations[0].output
    reads_again = Operation("add", (tape.result, first), (TapeValue(999, Rows.LOGITS, (48,), 999),))
    longer = Tape((*tape.operations, reads_again), reads_again.output)
    fused = rewrites.fuse_residual(longer)
    assert names(fused).count("add_linear") == 2 * NUM_LAYERS - 1


def test_linear_operations_read_packed_rows_only() -> None:
    tape = rewrites.pack_rows(make_tape())
    writers = tape.writers()
    for operation in tape.operations:
        if operation.name == "linear":
            assert writers[operation.arguments[0].index].name in ("pack", "norm_pack")
    assert "rms_norm" not in names(tape)  # each of them feeds one linear operation
