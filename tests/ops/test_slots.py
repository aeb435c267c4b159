"""Values that live at the same time lie apart; others share memory."""

from __future__ import annotations

import pytest

from kvloom.ops import rewrites
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.slots import plan_slots
from kvloom.ops.tape import Rows, Tape, TapeValue, record
from tiny_models import CASES, build_loaded


def row_bytes(value: TapeValue) -> int:
    return 4 * value.width


def make_tape(case: str, is_fused: bool) -> Tape:
    tape = record(build_loaded(CASES[case], ReferenceBackend()))
    return rewrites.fuse(tape) if is_fused else tape


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("case", ["llama_mha_biases", "qwen3_tied"])
def test_nothing_is_overwritten_before_its_last_read(case: str, is_fused: bool) -> None:
    tape = make_tape(case, is_fused)
    plan = plan_slots(tape, row_bytes)
    holds: dict[int, int] = {}  # slot -> the value in it
    for operation in tape.operations:
        for value in operation.inputs:
            assert holds[plan.slot_of[value.base]] == value.base, operation.name
        for value in operation.outputs:
            if value.base == value.index:
                holds[plan.slot_of[value.index]] = value.index
                slot = plan.slots[plan.slot_of[value.index]]
                assert slot.rows is value.rows
                assert slot.row_bytes >= row_bytes(value)
    assert holds[plan.slot_of[tape.result.base]] == tape.result.base


def test_only_additions_write_where_they_read() -> None:
    tape = make_tape("llama_gqa", is_fused=True)
    plan = plan_slots(tape, row_bytes)
    for operation in tape.operations:
        if operation.outputs[0].base != operation.outputs[0].index:
            continue  # a view
        read = {plan.slot_of[value.base] for value in operation.inputs}
        written = {plan.slot_of[value.base] for value in operation.outputs}
        if operation.name == "add_linear":
            assert written == {plan.slot_of[operation.arguments[0].base]}
        else:
            assert not read & written, operation.name


def test_memory_does_not_grow_with_the_number_of_layers() -> None:
    two = plan_slots(make_tape("llama_gqa", True), row_bytes)
    config = CASES["llama_gqa"] | {"num_hidden_layers": 5}
    five = plan_slots(rewrites.fuse(record(build_loaded(config, ReferenceBackend()))), row_bytes)
    num_rows = {Rows.TOKENS: 10, Rows.LOGITS: 3}
    assert two.num_bytes(num_rows) == five.num_bytes(num_rows)
