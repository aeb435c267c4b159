"""A fused tape as a program of the native library."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.errors import UnsupportedModelError
from kvloom.ops.base import (
    Activation,
    AttentionMetadata,
    Batch,
    Communicator,
    KVLayer,
    Parameter,
    Rope,
    StepSizes,
)
from kvloom.ops.rewrites import HeadCounts
from kvloom.ops.slots import SlotPlan, plan_slots
from kvloom.ops.tape import Operation, Rows, Tape, TapeInput, TapeValue

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
        self._writers = tape.writers()
        self._program: Any = None
        self._emitter: Any = None
        self._check_operations()

    @property
    def activation_bytes(self) -> int:
        """Bytes of the arena, the threads' scratch, attention's states and the rotations."""
        num_rows = {Rows.TOKENS: self._sizes.max_num_tokens, Rows.LOGITS: self._max_num_rows}
        stores = [op for op in self._tape.operations if op.name == "store_qkv"]
        heads = {operation.arguments[2] for operation in stores}
        ropes = {operation.arguments[5] for operation in stores}
        return (
            self._plan_slots().num_bytes(num_rows)
            + self._scratch_bytes()
            + sum(map(self._attention_bytes, heads))
            + sum(table_bytes(rope, self._sizes.max_model_len) for rope in ropes)
        )

    def bind(self) -> None:
        """Build the program over the weights and the storage of the model's KV layers.

        Raises:
            ValueError: what the library refuses.
        """
        program = self._make_program(plan := self._plan_slots())
        emitter = _Emitter(self._library, program, plan, self._sizes.max_model_len)
        for operation in self._tape.operations:
            if operation.name in _COLLECTIVES:
                program.end_segment()
            else:
                emitter.emit(operation)
        program.finish()
        self._emitter, self._program = emitter, program

    def forward(self, batch: Batch) -> Array:
        """Logits [num_rows, vocab_size]: a view of native memory, valid until the next step."""
        library, program = self._library, self._program
        first = batch.attention[0]
        program.begin(
            library.BatchArrays(
                token_ids=batch.token_ids,
                positions=batch.positions,
                logits_rows=batch.logits_rows,
                query_start=first.query_start,
                seq_lens=first.seq_lens,
            ),
            [self._group_arrays(metadata) for metadata in batch.attention],
        )
        for segment, collective in enumerate(self._collectives):
            program.run_segment(segment)
            self._exchange(collective)
        program.run_segment(len(self._collectives))
        return self._view(self._tape.result)

    def _group_arrays(self, metadata: AttentionMetadata) -> Any:
        return self._library.GroupArrays(
            block_table=np.ascontiguousarray(metadata.block_table), slots=metadata.slot_mapping
        )

    def _exchange(self, collective: Operation) -> None:
        (value,) = collective.inputs
        run = getattr(self._communicator, collective.name)
        # A copy: other ranks may still read it when this one has gone on.
        np.copyto(self._view(collective.output), run(self._view(value).copy()))

    def _view(self, value: TapeValue) -> Array:
        view: Array = self._program.view(self._emitter.operand(value))
        return view

    def _check_operations(self) -> None:
        known = {*_COLLECTIVES, *_EMITTERS}
        for operation in self._tape.operations:
            if operation.name not in known:
                raise UnsupportedModelError(
                    f"the native backend cannot run this model: nothing computes "
                    f"{operation.name} where the model has it; use backend reference"
                )

    @property
    def _max_num_rows(self) -> int:
        return min(self._sizes.max_num_reqs, self._sizes.max_num_tokens)

    def _make_program(self, plan: SlotPlan) -> Any:
        sizes = self._library.ProgramSizes(
            max_num_tokens=self._sizes.max_num_tokens,
            max_num_rows=self._max_num_rows,
            max_num_requests=self._sizes.max_num_reqs,
            max_model_len=self._sizes.max_model_len,
        )
        slots = [self._library.SlotSpec(s.rows is Rows.LOGITS, s.row_bytes) for s in plan.slots]
        return self._library.Program(self._team, sizes, slots)

    def _scratch_bytes(self) -> int:
        weights = (
            argument.value
            for operation in self._tape.operations
            for argument in operation.arguments
            if isinstance(argument, Parameter) and len(argument.shape) == 2
        )
        needed = self._library.product_scratch_bytes
        most = max(needed(weight.format, weight.num_inputs) for weight in weights)
        return int(most * self._team.num_threads)

    def _attention_bytes(self, heads: HeadCounts) -> int:
        """As much as layers with these heads can need, whatever their KV is stored as."""
        shape = self._library.GroupShape(
            kv_format="float32",
            block_size=self._sizes.block_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            head_size_v=heads.head_size,
        )
        num_bytes: int = self._library.attention_bytes(
            shape, self._sizes.max_model_len, self._team.num_threads
        )
        return num_bytes

    def _plan_slots(self) -> SlotPlan:
        return plan_slots(self._tape, self._row_bytes)

    def _row_bytes(self, value: TapeValue) -> int:
        operation = self._writers[value.index]
        if operation.name not in _PACKED_FOR:
            return _FLOAT_BYTES * value.width
        weight = operation.arguments[_PACKED_FOR[operation.name]]
        row_bytes: int = self._library.packed_row_bytes(weight.value.format, value.width)
        return row_bytes


def table_bytes(rope: Rope, num_positions: int) -> int:
    """Bytes of `make_rotations`' table."""
    return _FLOAT_BYTES * num_positions * 2 * len(rope.inv_freq)


def make_rotations(rope: Rope, num_positions: int) -> Array:
    """[num_positions, 2 x num_pairs]: cosines, then sines, of each position's angles."""
    angles = np.outer(np.arange(num_positions), np.asarray(rope.inv_freq))
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * rope.attention_factor
    return np.ascontiguousarray(table, np.float32)


class _Emitter:
    """Adds operations of a fused tape to a program of the library, one method for each."""

    def __init__(
        self, library: ModuleType, program: Any, plan: SlotPlan, max_model_len: int
    ) -> None:
        self.program = program
        self._library = library
        self._plan = plan
        self._max_model_len = max_model_len
        self._rotations: dict[Rope, Array] = {}
        self._groups: dict[tuple[Any, ...], int] = {}

    def emit(self, operation: Operation) -> None:
        """Add one operation."""
        getattr(self, _EMITTERS[operation.name])(operation.output, *operation.arguments)

    def operand(self, value: TapeValue) -> Any:
        """The rows of a value as the library names them."""
        return self._library.Operand(self._slot(value), value.rows is Rows.LOGITS, value.width)

    def _slot(self, value: TapeValue) -> int:
        return self._plan.slot_of[value.base]

    def _embedding(self, out: TapeValue, _ids: TapeInput, table: Parameter, first_row: int) -> None:
        self.program.embedding(table.value, first_row, self.operand(out))

    def _rms_norm(self, out: TapeValue, x: TapeValue, weight: Parameter, eps: float) -> None:
        self.program.rms_norm(weight.value, eps, self.operand(x), self.operand(out))

    def _pack(self, out: TapeValue, x: TapeValue, weight: Parameter) -> None:
        self.program.pack(self.operand(x), None, 0.0, weight.value, self._slot(out))

    def _norm_pack(
        self, out: TapeValue, x: TapeValue, norm: Parameter, eps: float, weight: Parameter
    ) -> None:
        self.program.pack(self.operand(x), norm.value, eps, weight.value, self._slot(out))

    def _linear(
        self, out: TapeValue, x: TapeValue, weight: Parameter, bias: Parameter | None
    ) -> None:
        self._product(out, x, weight, bias, "store")

    def _add_linear(
        self,
        out: TapeValue,
        _residual: TapeValue,
        x: TapeValue,
        weight: Parameter,
        bias: Parameter | None,
    ) -> None:
        # The slot plan put the output where the residual lies.
        self._product(out, x, weight, bias, "add")

    def _gated_linear(
        self,
        out: TapeValue,
        x: TapeValue,
        weight: Parameter,
        bias: Parameter | None,
        activation: Activation,
    ) -> None:
        values = _value(bias), "gated", activation, self.operand(out)
        self.program.linear(self._slot(x), weight.value, *values)

    def _gated_pack(self, out: TapeValue, x: TapeValue, weight: Parameter, *rest: Any) -> None:
        bias, activation, next_weight = rest
        values = _value(bias), activation, next_weight.value, self.operand(out)
        self.program.gated_pack(self._slot(x), weight.value, *values)

    def _product(
        self,
        out: TapeValue,
        x: TapeValue,
        weight: Parameter,
        bias: Parameter | None,
        kind: str,
    ) -> None:
        values = _value(bias), kind, "silu", self.operand(out)
        self.program.linear(self._slot(x), weight.value, *values)

    def _add(self, out: TapeValue, a: TapeValue, b: TapeValue) -> None:
        self.program.add(self._slot(a), self._slot(b), self.operand(out))

    def _select_rows(self, out: TapeValue, x: TapeValue, _rows: TapeInput) -> None:
        self.program.select_rows(self.operand(x), self._slot(out))

    def _store_qkv(self, out: TapeValue, kv: KVLayer, x: TapeValue, *rest: Any) -> None:
        heads, norms, _positions, rope, scale = rest
        arrays = self._library.QueryKeyArrays(
            rotations=self._table(rope),
            q_norm=None if norms is None else norms.q.value,
            k_norm=None if norms is None else norms.k.value,
            norm_eps=0.0 if norms is None else norms.eps,
            q_scale=scale * math.log2(math.e),
        )
        group, memory = self._group(kv, heads.num_heads), self._memory(kv)
        self.program.store_qkv(group, memory, arrays, self.operand(x), self._slot(out))

    def _attend(self, out: TapeValue, kv: KVLayer, q: TapeValue) -> None:
        group, memory = self._group(kv, q.shape[0]), self._memory(kv)
        self.program.attend(group, memory, self._slot(q), self.operand(out))

    def _memory(self, kv: KVLayer) -> Any:
        storage = kv.storage
        return self._library.LayerMemory(storage.raw, storage.num_blocks)

    def _group(self, kv: KVLayer, num_heads: int) -> int:
        """Layers of one group with equal heads share what is planned per step."""
        spec: Any = kv.spec
        key = (kv.group, spec.num_kv_heads, spec.head_size, spec.value_head_size, num_heads)
        if key not in self._groups:
            shape = self._library.GroupShape(
                kv_format=spec.dtype.value,
                block_size=spec.block_size,
                num_heads=num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                head_size_v=spec.value_head_size,
            )
            self._groups[key] = self.program.attention_group(kv.group, shape, kv.storage.num_blocks)
        return self._groups[key]

    def _table(self, rope: Rope) -> Array:
        if rope not in self._rotations:
            self._rotations[rope] = make_rotations(rope, self._max_model_len)
        return self._rotations[rope]


def _value(parameter: Parameter | None) -> Any:
    return None if parameter is None else parameter.value


_EMITTERS = {
    name: f"_{name}"
    for name in (
        "embedding",
        "rms_norm",
        "pack",
        "norm_pack",
        "linear",
        "add_linear",
        "gated_linear",
        "gated_pack",
        "add",
        "select_rows",
        "store_qkv",
        "attend",
    )
}
