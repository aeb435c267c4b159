"""A fused tape as a program of the native library."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.errors import UnsupportedModelError
from kvloom.ops.backend import LateTokens, StepSizes
from kvloom.ops.base import AttentionMetadata, Batch, Communicator, Experts, Parameter
from kvloom.ops.native_attention import attention_bytes
from kvloom.ops.native_lowering import Lowering, is_screened, makes_logits
from kvloom.ops.native_tables import table_bytes
from kvloom.ops.slots import SlotPlan, plan_slots
from kvloom.ops.tape import Operation, Rows, Tape, TapeValue

Array = npt.NDArray[np.float32]

_FLOAT_BYTES = 4
_COLLECTIVES = ("all_reduce", "all_gather")
# Operations whose result is packed rows -> which argument is the weight that reads them.
_PACKED_FOR = {"pack": 1, "norm_pack": 3, "gated_pack": 4}


class NativeProgram:
    """A model's forward pass: built when the KV cache is bound, then one call per step.

    Between the ranks of a tensor-parallel model the tape is cut into segments at the collectives,
    which run here, on views of the arena.
    """

    def __init__(
        self,
        tape: Tape,
        library_and_team: tuple[ModuleType, Any],
        communicator: Communicator,
        sizes: StepSizes,
    ) -> None:
        self._library, self._team = library_and_team
        self._tape = tape
        self._communicator = communicator
        self._sizes = sizes
        self._collectives = [op for op in tape.operations if op.name in _COLLECTIVES]
        self._has_attention = any(op.name == "attend" for op in tape.operations)
        self._writers = tape.writers()
        self._values = {value.index: value for op in tape.operations for value in op.outputs}
        self._program: Any = None
        self._logits: dict[int, Array] = {}  # views of its result, by their number of rows
        self._lowering: Any = None
        self.computes_meanwhile = self.takes_late_tokens = not self._collectives
        self.keeps_best = makes_logits(tape, self._writers[tape.result.index])
        self._check_operations()

    @property
    def activation_bytes(self) -> int:
        """Bytes of the arena, the threads' scratch, and what instructions keep for a step."""
        num_rows = {
            Rows.TOKENS: self._sizes.max_num_tokens,
            Rows.LOGITS: self._sizes.max_num_rows,
        }
        return (
            self._plan_slots().num_bytes(num_rows)
            + self._scratch_bytes()
            + attention_bytes(self._library, self._tape, self._sizes, self._team.num_threads)
            + table_bytes(self._tape, self._sizes.max_model_len)
            + self._order_bytes()
            + self._screen_bytes()
        )

    def bind(self) -> None:
        """Build the program over the weights and the storage of the model's KV layers.

        Raises:
            ValueError: what the library refuses.
        """
        program = self._make_program(plan := self._plan_slots())
        tools = self._library, self._team
        lowering = Lowering(tools, program, self._tape, plan, self._sizes)
        for operation in self._tape.operations:
            if operation.name in _COLLECTIVES:
                program.end_segment()
            else:
                lowering.add(operation)
        program.finish()
        self._lowering, self._program, self._logits = lowering, program, {}

    def forward(self, batch: Batch, late_tokens: LateTokens | None = None) -> Array:
        """Logits [num_rows, vocab_size]: a view of native memory, valid until the next step.

        Of a batch that wants the best only they are `BestOutputs` of the library, row by row.
        One rank alone only starts, and the team's `finish` waits for it.
        """
        library, program = self._library, self._program
        first = batch.attention[0]
        arrays = library.BatchArrays(
            token_ids=batch.token_ids,
            positions=batch.positions,
            logits_rows=batch.logits_rows,
            query_start=first.query_start,
            seq_lens=first.seq_lens,
            wants_best_only=batch.wants_best_only,
        )
        groups = [self._group_arrays(metadata) for metadata in batch.attention]
        if not self._has_attention:
            groups = []
        if self.takes_late_tokens:
            program.start(arrays, groups, self._late_arrays(late_tokens))
        else:
            self._run_segments(arrays, groups)
        num_rows = len(batch.logits_rows)
        if num_rows not in self._logits:
            self._logits[num_rows] = self._view(self._tape.result)
        return self._logits[num_rows]

    def _run_segments(self, arrays: Any, groups: list[Any]) -> None:
        self._program.begin(arrays, groups)
        for segment, collective in enumerate(self._collectives):
            self._program.run_segment(segment)
            self._exchange(collective)
        self._program.run_segment(len(self._collectives))

    def _late_arrays(self, late: LateTokens | None) -> Any:
        if late is None:
            return None
        return self._library.LateArrays(
            places=late.places, rows=late.rows, sampled_ids=late.sampled_ids
        )

    def _group_arrays(self, metadata: AttentionMetadata) -> Any:
        arrays = {
            "block_table": np.ascontiguousarray(metadata.block_table),
            "slots": metadata.slot_mapping,
        }
        if metadata.first_columns is not None:
            arrays["first_columns"] = metadata.first_columns
        return self._library.GroupArrays(**arrays)

    def _exchange(self, collective: Operation) -> None:
        (value,) = collective.inputs
        run = getattr(self._communicator, collective.name)
        # A copy: other ranks may still read it when this one has gone on.
        np.copyto(self._view(collective.output), run(self._view(value).copy()))

    def _view(self, value: TapeValue) -> Array:
        base = self._values[value.base]
        rows: Array = self._program.view(self._lowering.operand(base))
        return rows[:, value.first_column : value.first_column + value.width]

    def _check_operations(self) -> None:
        for operation in self._tape.operations:
            if operation.name not in _COLLECTIVES and not Lowering.knows(operation):
                raise UnsupportedModelError(
                    f"the native backend cannot run this model: nothing computes "
                    f"{operation.name} where the model has it; use backend reference"
                )

    def _make_program(self, plan: SlotPlan) -> Any:
        sizes = self._library.ProgramSizes(
            max_num_tokens=self._sizes.max_num_tokens,
            max_num_rows=self._sizes.max_num_rows,
            max_num_requests=self._sizes.max_num_reqs,
            max_model_len=self._sizes.max_model_len,
        )
        slots = [self._library.SlotSpec(s.rows is Rows.LOGITS, s.row_bytes) for s in plan.slots]
        return self._library.Program(self._team, sizes, slots)

    def _scratch_bytes(self) -> int:
        """As much as the most demanding instruction, for each thread."""
        needed = self._library.product_scratch_bytes
        weights = (p.value for op in self._tape.operations for p in _matrices(op))
        products = [needed(weight.format, weight.num_inputs) for weight in weights]
        routers = [
            self._library.route_scratch_bytes(logits.width, routing.num_groups)
            for logits, routing in self._arguments_of("route", 2)
        ]
        rows = [_FLOAT_BYTES * x.width for (x,) in self._arguments_of("pack_experts", 1)]
        most = max((*products, *routers, *rows, self._screened_row_bytes()))
        return int(most * self._team.num_threads)

    def _order_bytes(self) -> int:
        """Of the orders in which experts meet their tokens."""
        max_num_rows = max(self._sizes.max_num_tokens, self._sizes.max_num_rows)
        orders = {
            (experts.down.shape[0], routes.width // 2)
            for _, routes, experts in self._arguments_of("pack_experts", 3)
        }
        needed = self._library.expert_order_bytes
        return sum(needed(*order, max_num_rows) for order in orders)

    def _screen_bytes(self) -> int:
        """Of the int8 copy of a head by which its best outputs are found."""
        weight = self._screened_head()
        if weight is None:
            return 0
        shape = weight.num_outputs, weight.num_inputs
        return int(self._library.screen_bytes(*shape, self._sizes.max_num_rows))

    def _screened_row_bytes(self) -> int:
        weight = self._screened_head()
        if weight is None:
            return 0
        return int(self._library.packed_row_bytes(weight.format, weight.num_inputs))

    def _screened_head(self) -> Any:
        head = self._writers[self._tape.result.index]
        if not makes_logits(self._tape, head):
            return None
        _, weight, bias = head.arguments
        return weight.value if is_screened(weight.value, bias) else None

    def _arguments_of(self, name: str, count: int) -> Iterator[tuple[Any, ...]]:
        """The first arguments of all operations of a name."""
        return (op.arguments[:count] for op in self._tape.operations if op.name == name)

    def _plan_slots(self) -> SlotPlan:
        return plan_slots(self._tape, self._row_bytes)

    def _row_bytes(self, value: TapeValue) -> int:
        operation = self._writers[value.index]
        name, arguments = operation.name, operation.arguments
        if name in _PACKED_FOR:
            weight = arguments[_PACKED_FOR[name]].value
            return int(self._library.packed_row_bytes(weight.format, value.width))
        if name in ("pack_heads", "pack_experts", "gate_experts"):
            num_runs, width = value.shape
            weight = _stack_that_reads(operation).value
            return num_runs * int(self._library.stack_row_bytes(weight.format, width))
        return _FLOAT_BYTES * value.width


def _stack_that_reads(operation: Operation) -> Parameter:
    """The stack of matrices that the operation packs rows for."""
    last: Parameter | Experts = operation.arguments[-1]
    if isinstance(last, Parameter):
        return last
    return last.gate_up if operation.name == "pack_experts" else last.down


def _matrices(operation: Operation) -> Iterator[Parameter]:
    """The matrices, or stacks of them, that an operation multiplies by."""
    for argument in operation.arguments:
        if isinstance(argument, Experts):
            yield from (argument.gate_up, argument.down)
        elif isinstance(argument, Parameter) and argument.is_matrix:
            yield argument
