"""What each rewrite leaves on the tape. That results stay the same: test_tape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloom.ops import rewrites, rewrites_attention
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.tape import Operation, Rows, Tape, TapeValue, record
from tiny_families import ALL_CASES
from tiny_models import build_loaded

NUM_LAYERS = 2


def make_tape(case: str = "llama_gqa", world_size: int = 1) -> Tape:
    return record(build_loaded(ALL_CASES[case], ReferenceBackend()), world_size)


def names(tape: Tape) -> list[str]:
    return [operation.name for operation in tape.operations]


def test_a_fused_layer_is_nine_operations_and_a_view() -> None:
    layer = ["norm_pack", "linear", "split_heads", "store_qkv", "attend", "pack", "add_linear"]
    layer += ["norm_pack", "gated_pack", "add_linear"]
    last = [*layer[:5], "select_rows", "pack", "select_rows", *layer[6:]]
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
    fused = rewrites_attention.fuse_attention(make_tape(case))
    assert not {"rope", "attention"} & set(names(fused))
    stores = [o for o in fused.operations if o.name == "store_qkv"]
    assert len(stores) == names(fused).count("attend") == NUM_LAYERS
    assert all(o.arguments[-1].rope is not None for o in stores)
    assert all((o.arguments[-1].k_norm is None) == (case == "llama_gqa") for o in stores)
    # Only the norms over hidden rows are left: two per layer and the last one.
    assert names(fused).count("rms_norm") == 2 * NUM_LAYERS + 1


# What is left to compute on the way into attention, once it has taken over what it can.
LEFT = {
    "mistral_window": set(),
    "gemma2": set(),
    "gemma3_pattern": set(),
    "gemma3n": set(),  # shared layers too
    "gemma4_keys_as_values": set(),
    "smollm3": set(),  # some layers do not rotate
    "llama4": set(),  # norms behind the rotation of neighbours, temperatures
    "gpt_oss": set(),
    "deepseek_v3": {"rope"},  # queries and rows are put together behind it
}


@pytest.mark.parametrize("case", LEFT)
def test_attention_takes_over_what_is_done_to_heads(case: str) -> None:
    fused = rewrites_attention.fuse_attention(make_tape(case))
    assert not {op.name for op in fused.operations} & set(rewrites_attention._NUM_OPERANDS)
    on_heads = {o.name for o in fused.operations if len(o.outputs[0].shape) == 2}
    ways = {"rope", "rotate", "rms_norm", "scale_by_position"}
    if case == "gemma3n":  # norms of per-layer inputs are no heads of attention
        ways.remove("rms_norm")
    assert on_heads & ways == LEFT[case]


def test_norms_of_values_and_shared_layers_are_taken_over() -> None:
    stores = [
        o
        for o in rewrites_attention.fuse_attention(make_tape("gemma3n")).operations
        if o.name == "store_qkv"
    ]
    shared = [o for o in stores if o.arguments[2] is None]
    assert len(stores) == 6
    assert len(shared) == 2
    assert all(o.arguments[-1].q_norm and o.arguments[-1].rope for o in stores)
    own = [o for o in stores if o not in shared]
    assert all(o.arguments[-1].k_norm and o.arguments[-1].v_norm for o in own)
    assert all(o.arguments[-1].v_norm.weight is None for o in own)


def test_norms_that_follow_the_rotation_stay_behind_it() -> None:
    fused = rewrites_attention.fuse_attention(make_tape("llama4"))
    forms = [o.arguments[-1] for o in fused.operations if o.name == "store_qkv"]
    assert [f.norms_follow_rope for f in forms] == [True, True, False, True]
    assert [f.position_scale is None for f in forms] == [True, True, False, True]


def test_a_norm_that_others_read_is_not_taken_over() -> None:
    """Queries are read a second time, so they must be computed where all can see them."""
    tape = make_tape("qwen3_tied")
    norm = next(o for o in tape.operations if o.name == "rms_norm" and len(o.output.shape) == 2)
    spy = Operation("activation", (norm.output, "tanh"), (TapeValue(998, Rows.TOKENS, (), 998),))
    fused = rewrites_attention.fuse_attention(Tape((*tape.operations, spy), tape.result))
    assert norm in fused.operations
    first = next(o for o in fused.operations if o.name == "store_qkv").arguments[-1]
    assert (first.q_norm, first.k_norm) == (None, None)
    assert first.rope is not None


def test_norms_with_other_eps_are_not_taken_over() -> None:
    tape = make_tape("qwen3_tied")
    norms = [o for o in tape.operations if o.name == "rms_norm" and len(o.output.shape) == 2]
    other = replace(norms[1], arguments=(*norms[1].arguments[:2], 0.5))
    fused = rewrites_attention.fuse_attention(tape.exchange({norms[1]: (other,)}))
    stores = [o.arguments[-1] for o in fused.operations if o.name == "store_qkv"]
    assert [form.q_norm is None for form in stores] == [True, False]


def test_a_value_that_is_selected_stays_whole_for_others() -> None:
    x, y, z, late, selected = (
        TapeValue(i, rows, (4,), i) for i, rows in enumerate([Rows.TOKENS] * 4 + [Rows.LOGITS])
    )
    operations = (
        Operation("embedding", (), (x,)),
        Operation("scale", (x, 2.0), (late,)),
        Operation("attention", (x,), (y,)),
        Operation("attention", (y,), (z,)),
        Operation("select_rows", (late, None), (selected,)),
    )
    hoisted = rewrites.hoist_row_selection(Tape(operations, selected))
    assert names(hoisted) == ["embedding", "select_rows", "scale", "attention", "attention"]
    assert hoisted.operations[3].arguments == (x,)
    assert hoisted.result == replace(late, rows=Rows.LOGITS)


def test_all_streams_are_selected_early() -> None:
    """Gemma 3n selects rows of each stream; nothing below the last attention computes others."""
    tape = rewrites.hoist_row_selection(make_tape("gemma3n"))
    last = max(i for i, o in enumerate(tape.operations) if "attention" in o.name)
    computed = [o for o in tape.operations[last + 1 :] if o.name != "select_rows"]
    assert all(value.rows is Rows.LOGITS for o in computed for value in o.outputs)


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
