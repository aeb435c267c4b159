"""Runs tiny models on the native backend, several requests at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import KVCacheSpec
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.backend import StepSizes
from kvloom.ops.base import AttentionMetadata, Batch, KVLayer, Parameter
from kvloom.ops.isa import built_isas
from kvloom.ops.native import NativeBackend
from kvloom.runner.collectives import SingleRankCommunicator
from kvloom.weights.loader import load_weights
from kvloom.weights.steps import rows_of_units
from memory_checkpoint import MemoryCheckpoint
from tiny_models import make_weights, tensor_shapes
from visibility import first_visible_of

SIZES = StepSizes(
    max_num_tokens=1024, max_num_reqs=8, max_num_rows=1024, max_model_len=1024, block_size=16
)
NUM_BLOCKS = 200


def make_backend(num_threads: int = 2) -> NativeBackend:
    """The native backend, or a skipped test where the library was not built."""
    if not built_isas():
        pytest.skip("the native library is not built")
    return NativeBackend(num_threads)


@dataclass
class NativeRunner:
    """A model over one pool of blocks that starts out as NaN everywhere.

    Attributes:
        packed: what matrices are packed as.
        weights: random ones if there are none.
    """

    config: Mapping[str, Any]
    backend: NativeBackend
    kv_dtype: DType = DType.FLOAT32
    packed: Any = "F32"
    rank: TensorParallelRank = field(default_factory=TensorParallelRank)
    communicator: Any = field(default_factory=SingleRankCommunicator)
    sizes: StepSizes = SIZES
    weights: Mapping[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        dtypes = ModelDTypes(DType.FLOAT32, self.kv_dtype)
        self.model: Model = build_model(self.config, self.rank, dtypes)
        self.executable = self.backend.compile(self.model, self.communicator, self.sizes)
        self._load_weights()
        self.group_specs: list[KVCacheSpec] = []
        bound: dict[str, KVLayer] = {}
        for layer, spec in zip(
            self.model.attention_layers, self.model.get_kv_spec().layers, strict=True
        ):
            if spec.shares_kv_with is not None:
                target = bound[spec.shares_kv_with]
                layer.spec, layer.group, layer.storage = target.spec, target.group, target.storage
            else:
                self._bind(layer, make_kv_cache_spec(spec, self.sizes.block_size))
            bound[layer.name] = layer
        self.executable.bind()

    def _bind(self, layer: KVLayer, spec: KVCacheSpec) -> None:
        """Memory of its own, in the group of the layers with an equal spec."""
        if spec not in self.group_specs:
            self.group_specs.append(spec)
        layer.spec, layer.group = spec, self.group_specs.index(spec)
        raw = self.backend.allocate_kv(spec.page_size_bytes * NUM_BLOCKS)
        raw[:] = -1  # all bits set is a NaN in every float format
        layer.storage = self.backend.view_kv(raw, spec, NUM_BLOCKS)

    def _load_weights(self) -> None:
        weights = self.weights or make_weights(tensor_shapes(self.config))
        load_weights(self.model, MemoryCheckpoint(weights), self._pack)

    def _pack(self, parameter: Parameter, array: np.ndarray) -> Any:
        if not parameter.is_matrix:
            return self.backend.pack(parameter, array)
        rows = rows_of_units(array.reshape(-1, array.shape[-1]), "F32", 0)
        return self.backend.pack_rows(parameter, self.packed, [rows])

    def step(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Logits [num_tokens, vocab_size] of each chunk's tokens."""
        batch = self.make_batch(chunks)
        logits = self.forward(batch).copy()
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
        return np.split(logits, ends[:-1])

    def forward(self, batch: Batch) -> np.ndarray:
        """Logits [num_rows, vocab_size]: a view, valid until the next step."""
        logits: np.ndarray = self.backend.to_host(self.executable.forward(batch))
        return logits

    def make_batch(self, chunks: Sequence[Chunk]) -> Batch:
        """The step over these chunks; blocks that no query sees are not in the tables."""
        batch = make_batch(chunks, self.sizes.block_size)
        (whole,) = batch.attention
        groups = []
        for spec in self.group_specs:
            table = whole.block_table.copy()
            for row, num_computed in zip(table, whole.num_computed_tokens, strict=True):
                row[: first_visible_of(spec, int(num_computed)) // spec.block_size] = 0
            groups.append(replace(whole, block_table=table))
        return replace(batch, attention=groups)


def cut_tables(batch: Batch, specs: Sequence[KVCacheSpec]) -> Batch:
    """The batch with tables that begin with the first block that a query of the step sees."""
    groups = []
    for spec, metadata in zip(specs, batch.attention, strict=True):
        firsts = [
            first_visible_of(spec, int(n)) // spec.block_size for n in metadata.num_computed_tokens
        ]
        table = metadata.block_table
        cut = np.zeros_like(table)
        for row, whole, first in zip(cut, table, firsts, strict=True):
            row[: len(row) - first] = whole[first:]
        width = max(
            -(-int(n) // spec.block_size) - first
            for n, first in zip(metadata.seq_lens, firsts, strict=True)
        )
        firsts_array = np.array(firsts, np.int32)
        groups.append(replace(metadata, block_table=cut[:, :width], first_columns=firsts_array))
    return replace(batch, attention=groups)


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a request, whose table is `table`, after `num_computed` tokens."""

    token_ids: Sequence[int]
    table: np.ndarray
    num_computed: int = 0


def make_table(seed: int, num_blocks: int = 64, first: int = 1) -> np.ndarray:
    """A request's blocks, out of order."""
    rng = np.random.default_rng(seed)
    return (first + rng.permutation(num_blocks)).astype(np.int32)


def make_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    counts = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
    computed = np.array([chunk.num_computed for chunk in chunks], np.int32)
    places = [c.num_computed + np.arange(len(c.token_ids)) for c in chunks]
    slots = [
        c.table[p // block_size].astype(np.int64) * block_size + p % block_size
        for c, p in zip(chunks, places, strict=True)
    ]
    metadata = AttentionMetadata(
        block_table=np.stack([chunk.table for chunk in chunks]),
        slot_mapping=np.concatenate(slots),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        seq_lens=computed + counts,
        num_computed_tokens=computed,
        block_size=block_size,
    )
    num_tokens = int(counts.sum())
    return Batch(
        token_ids=np.concatenate([np.asarray(c.token_ids, np.int64) for c in chunks]),
        positions=np.concatenate(places),
        logits_rows=np.arange(num_tokens),
        attention=[metadata],
    )
