"""What the largest step needs beyond weights and KV: measured, without running all of its layers.

A model is rehearsed on a dummy batch. An operation's memory follows from its shapes alone, so each
one is computed, and its allocations traced, only the first time its shapes occur; in every further
layer it merely hands out memory of its result's size. What is alive between two operations is thus
real in every layer, and the measured peak is the one of the full run at the price of one layer.
What is allocated, the backend's own meter says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import cdiv
from kvloom.ops.backend import EagerBackend, MemoryMeter
from kvloom.ops.base import (
    Attention,
    AttentionMetadata,
    Batch,
    Communicator,
    Experts,
    KVLayer,
    Ops,
    Value,
)
from kvloom.ops.slots import plan_slots
from kvloom.ops.tape import Rows, record
from kvloom.runner.input_batch import IntArray, RunnerLimits

if TYPE_CHECKING:
    from kvloom.models.base import Model

# Queries attend in tiles, so the chunk with the longest context need not be the whole budget: more
# queries would take longer, not more memory.
_CHUNK = 256
_BLOCK = 1  # every table entry of the dummy batch
_FLOAT_BYTES = 4
# A step beyond it is rehearsed as a part of it, and the peak multiplied: memory grows with tokens
# and rows, or less, so this is never too little, and a start takes seconds whatever is asked for.
_MAX_REHEARSED_TOKENS = 8192


class LoneRank:
    """A rank whose peers are not there: its collectives cost what they would, and mean nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def all_reduce(self, x: Value) -> Value:
        """Memory for the sum."""
        return x if self.world_size == 1 else x.copy()

    def all_gather(self, x: Value) -> Value:
        """As wide as all ranks together."""
        return x if self.world_size == 1 else np.concatenate([x] * self.world_size, axis=-1)


def count_least_activation_bytes(
    model: Model, communicator: Communicator, limits: RunnerLimits
) -> int:
    """Bytes of the values alive at once if no operation took memory of its own; costs nothing."""
    slots = plan_slots(record(model, communicator.world_size), lambda v: _FLOAT_BYTES * v.width)
    return slots.num_bytes(
        {Rows.TOKENS: limits.max_num_batched_tokens, Rows.LOGITS: limits.max_num_logits_rows}
    )


def measure_peak_activation_bytes(
    model: Model, backend: EagerBackend, communicator: Communicator, limits: RunnerLimits
) -> int:
    """Peak bytes of the forward pass of a step with as many tokens and rows of logits as may be.

    One request of the step has a context of `max_model_len` tokens; where requests are joined, a
    step of single tokens counts as well, whose requests all have. Leaves the model's KV layers
    unbound.
    """
    num_parts = cdiv(limits.max_num_batched_tokens, _MAX_REHEARSED_TOKENS)
    num_tokens = cdiv(limits.max_num_batched_tokens, num_parts)
    num_rows = cdiv(limits.max_num_logits_rows, num_parts)
    lone = LoneRank(communicator.rank, communicator.world_size)
    peaks = []
    with _dummy_kv_cache(model, backend, limits), backend.meter() as meter:
        batches = [_chunks_batch(limits, num_tokens, num_rows)]
        if backend.joins_requests:
            batches.append(_single_tokens_batch(limits, min(limits.max_num_seqs, num_tokens)))
        for batch in batches:
            rehearsal = _Rehearsal(backend.ops(batch, lone), meter)
            model.forward(cast(Ops, rehearsal), batch)
            peaks.append(rehearsal.peak_bytes)
    return max(peaks) * num_parts


class _Rehearsal:
    """Operations that compute only shapes they have not seen, and note the peak of memory."""

    def __init__(self, ops: Ops, meter: MemoryMeter) -> None:
        self.peak_bytes = 0
        self._ops = ops
        self._meter = meter
        self._seen: dict[tuple[Any, ...], tuple[int, list[tuple[int, ...]]]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._run, name)

    def _run(self, name: str, *args: Any, **options: Any) -> Any:
        arguments = (*args, *options.values())
        key = (name, *options, *map(_signature, arguments))
        held_bytes = self._meter.held_bytes
        if key in self._seen:
            needed_bytes, shapes = self._seen[key]
            results = [self._meter.zeros(shape) for shape in shapes]
        else:
            self._meter.reset_peak()
            returned = getattr(self._ops, name)(*args, **options)
            needed_bytes = self._meter.peak_bytes - held_bytes
            results = list(returned) if isinstance(returned, tuple) else [returned]
            # Views cost nothing: they are made for real each time, lest they count twice.
            if not any(self._meter.is_view(r, a) for r in results for a in arguments):
                self._seen[key] = needed_bytes, [result.shape for result in results]
        self.peak_bytes = max(self.peak_bytes, held_bytes + needed_bytes)
        return tuple(results) if len(results) > 1 else results[0]


def _signature(argument: Any) -> Any:
    """What an operation's memory depends on: shapes of values and weights, a layer's spec."""
    if isinstance(argument, KVLayer):
        return argument.spec
    if isinstance(argument, list | tuple):
        return tuple(map(_signature, argument))
    if isinstance(argument, Experts | Attention):
        return tuple(_signature(getattr(argument, part.name)) for part in fields(argument))
    return getattr(argument, "shape", argument)


@contextmanager
def _dummy_kv_cache(model: Model, backend: EagerBackend, limits: RunnerLimits) -> Iterator[None]:
    """Bind every layer to two blocks: memory for reads depends on the table, not on the pool."""
    declared = {spec.name: spec for spec in model.get_kv_spec().layers}
    for layer in model.attention_layers:
        spec = make_kv_cache_spec(declared[layer.name], limits.block_size)
        if spec.shared_target is not None:
            spec = make_kv_cache_spec(declared[spec.shared_target], limits.block_size)
        layer.spec = spec
        layer.storage = backend.view_kv(
            backend.allocate_kv(2 * spec.page_size_bytes), spec, num_blocks=2
        )
    try:
        yield
    finally:
        for layer in model.attention_layers:
            layer.spec = layer.storage = None


def _chunks_batch(limits: RunnerLimits, num_tokens: int, num_rows: int) -> Batch:
    """Requests of `_CHUNK` tokens, `num_tokens` in all; the first one has the longest context."""
    counts = np.full(cdiv(num_tokens, _CHUNK), _CHUNK, np.int32)
    counts[-1] = num_tokens - _CHUNK * (len(counts) - 1)
    seq_lens = counts.copy()
    seq_lens[0] = max(limits.max_model_len, counts[0])
    return _dummy_batch(limits, counts, seq_lens, num_rows)


def _single_tokens_batch(limits: RunnerLimits, num_reqs: int) -> Batch:
    """Requests of one token each, all with the longest context."""
    counts = np.ones(num_reqs, np.int32)
    return _dummy_batch(limits, counts, counts * limits.max_model_len, num_reqs)


def _dummy_batch(
    limits: RunnerLimits, counts: IntArray, seq_lens: IntArray, num_rows: int
) -> Batch:
    """Requests with `counts` tokens each, that have `seq_lens` tokens then: all in one block."""
    num_tokens = int(counts.sum())
    num_blocks = cdiv(int(seq_lens.max()), limits.block_size)
    metadata = AttentionMetadata(
        block_table=np.full((len(counts), num_blocks), _BLOCK, np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int64),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        seq_lens=seq_lens,
        num_computed_tokens=seq_lens - counts,
        block_size=limits.block_size,
    )
    return Batch(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        logits_rows=np.arange(num_rows, dtype=np.int64),
        attention=[metadata],
    )
