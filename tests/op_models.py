"""Models of a few operations whose inputs are given arrays, for tests of operations by themselves.

An input is embedded: token t reads row t of a table. So tests need nothing but a model and a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.dtypes import DType
from kvloom.ops.backend import StepSizes
from kvloom.ops.base import Batch, Ops, Parameter
from kvloom.ops.native import NativeBackend
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.source import Source
from kvloom.runner.collectives import SingleRankCommunicator
from native_runner import Chunk, make_batch, make_table

Array = Any
Compute = Callable[[Ops, Mapping[str, Any], Batch], Any]
MAX_TOKENS = 64
SIZES = StepSizes(
    max_num_tokens=MAX_TOKENS,
    max_num_reqs=4,
    max_num_rows=MAX_TOKENS,
    max_model_len=128,
    block_size=16,
)


@dataclass
class OpModel:
    """Runs `compute(ops, values, batch)`: values has a value per input and a parameter per weight.

    Attributes:
        inputs: [num_tokens, width] each.
        weights: parameters, those of three axes stacked.
        compute: returns what is asked for; its rows are selected by `logits_rows`.
    """

    inputs: Mapping[str, Array]
    weights: Mapping[str, Parameter]
    compute: Compute

    def __post_init__(self) -> None:
        self.tables = {name: make_parameter(f"table {name}", x) for name, x in self.inputs.items()}

    def forward(self, ops: Ops, batch: Batch) -> Any:
        values = {n: ops.embedding(batch.token_ids, table) for n, table in self.tables.items()}
        result = self.compute(ops, {**values, **self.weights}, batch)
        return ops.select_rows(result, batch.logits_rows)


def make_parameter(name: str, array: Array) -> Parameter:
    """A parameter of the array's shape; arrays of three axes and matrices of biases are stacks."""
    source = Source(name, array.shape)
    is_stacked = array.ndim == 3 or name.endswith("bias")
    return Parameter(name, array.shape, DType.FLOAT32, (source,), is_stacked=is_stacked)


def make_step(num_tokens: int, rows: Any = None) -> Batch:
    """One request of the tokens 0, 1, ... at positions from 0 on."""
    batch = make_batch([Chunk(range(num_tokens), make_table(1, 8))], 16)
    return (
        batch
        if rows is None
        else Batch(batch.token_ids, batch.positions, np.array(rows, np.int64), batch.attention)
    )


def run_reference(
    inputs: Mapping[str, Array], weights: Mapping[str, Array], compute: Compute, batch: Batch
) -> Array:
    """What the reference computes, as [num_rows, width]."""
    backend = ReferenceBackend()
    parameters = {name: make_parameter(name, x) for name, x in weights.items()}
    model = OpModel(inputs, parameters, compute)
    for parameter, array in _filled(model, inputs, weights):
        parameter.value = backend.pack(parameter, array)
    result = model.forward(backend.ops(batch, SingleRankCommunicator()), batch)
    return result.reshape(len(result), -1)


def run_native(
    backend: NativeBackend,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    compute: Compute,
    *batches: Batch,
) -> list[Array]:
    """What the native library computes of the same, for each step."""
    parameters = {name: make_parameter(name, x) for name, x in weights.items()}
    model = OpModel(inputs, parameters, compute)
    program = backend.compile(model, SingleRankCommunicator(), SIZES)
    for parameter, array in _filled(model, inputs, weights):
        parameter.value = backend.pack(parameter, array)
    program.bind()
    return [np.array(backend.to_host(program.forward(batch))) for batch in batches]


def _filled(
    model: OpModel, inputs: Mapping[str, Array], weights: Mapping[str, Array]
) -> list[tuple[Parameter, Array]]:
    tables = [(table, inputs[name]) for name, table in model.tables.items()]
    return tables + [(parameter, weights[name]) for name, parameter in model.weights.items()]
