"""Which values of a tape share memory: a slot holds one value after another. Standard library only.

A slot has rows of one kind, so that its size is row_bytes x the step's rows whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom.ops.tape import Operation, Rows, Tape, TapeValue

# Operations that may write where one of their inputs lies -> which argument that is.
_IN_PLACE = {
    **dict.fromkeys(("add_linear", "add", "add_norm", "multiply", "multiply_columns"), 0),
    **dict.fromkeys(("scale", "soft_cap", "activation"), 0),
}


@dataclass(slots=True)
class Slot:
    """Memory for one value at a time.

    Attributes:
        row_bytes: of the widest value that lies here.
    """

    rows: Rows
    row_bytes: int


@dataclass(slots=True)
class SlotPlan:
    """The slots of a tape.

    Attributes:
        slot_of: by the index of a value that has memory (`TapeValue.base`).
    """

    slots: list[Slot] = field(default_factory=list)
    slot_of: dict[int, int] = field(default_factory=dict)

    def num_bytes(self, num_rows: dict[Rows, int]) -> int:
        """Bytes of all slots for so many rows."""
        return sum(slot.row_bytes * num_rows[slot.rows] for slot in self.slots)


def plan_slots(tape: Tape, row_bytes: Callable[[TapeValue], int]) -> SlotPlan:
    """Give every value a slot that no other living value has.

    A value lives from the operation that writes it to the last that reads it or a view of it. An
    operation never writes where its inputs lie, but for those that compute value by value.
    """
    plan, last_reads, free = SlotPlan(), tape.last_reads(), list[int]()
    for position, operation in enumerate(tape.operations):
        reused = _reused_slot(operation, plan, last_reads, position)
        for value in operation.outputs:
            if value.base != value.index:
                continue  # a view
            slot = reused if reused is not None else _take_slot(plan, free, value, row_bytes(value))
            plan.slot_of[value.index] = slot
        dying = {v.base for v in (*operation.inputs, *operation.outputs)}
        free += sorted(
            plan.slot_of[base]
            for base in dying
            if last_reads[base] == position and plan.slot_of[base] != reused
        )
    return plan


def _reused_slot(
    operation: Operation, plan: SlotPlan, last_reads: dict[int, int], position: int
) -> int | None:
    if operation.name not in _IN_PLACE:
        return None
    value = operation.arguments[_IN_PLACE[operation.name]]
    ends_here = last_reads[value.base] == position and value.base == value.index
    # A view of the same memory may be read at other places than are being written.
    is_viewed = any(other.base == value.base and other != value for other in operation.inputs)
    return plan.slot_of[value.index] if ends_here and not is_viewed else None


def _take_slot(plan: SlotPlan, free: list[int], value: TapeValue, row_bytes: int) -> int:
    """The free slot that fits most tightly, or the widest one, widened; or else a new one."""
    fitting = [i for i in free if plan.slots[i].rows is value.rows]
    if not fitting:
        plan.slots.append(Slot(value.rows, row_bytes))
        return len(plan.slots) - 1
    wide_enough = [i for i in fitting if plan.slots[i].row_bytes >= row_bytes]
    slot = (
        min(wide_enough, key=lambda i: plan.slots[i].row_bytes)
        if wide_enough
        else max(fitting, key=lambda i: plan.slots[i].row_bytes)
    )
    plan.slots[slot].row_bytes = max(plan.slots[slot].row_bytes, row_bytes)
    free.remove(slot)
    return slot
