"""Runs tiny models on the native backend, several requests at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import AttentionMetadata, Batch, StepSizes
from kvloom.ops.isa import built_isas
from kvloom.ops.native import NativeBackend
from kvloom.runner.collectives import SingleRankCommunicator
from kvloom.weights.packing import float_rows
from tiny_models import make_weights, tensor_shapes

SIZES = StepSizes(max_num_tokens=1024, max_num_reqs=8, max_model_len=1024, block_size=16)
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
    """

    config: Mapping[str, Any]
    backend: NativeBackend
    kv_dtype: DType = DType.FLOAT32
    packed: Any = "F32"
    rank: TensorParallelRank = field(default_factory=TensorParallelRank)
    communicator: Any = field(default_factory=SingleRankCommunicator)
    sizes: StepSizes = SIZES

    def __post_init__(self) -> None:
        dtypes = ModelDTypes(DType.FLOAT32, self.kv_dtype)
        self.model: Model = build_model(self.config, self.rank, dtypes)
        self.executable = self.backend.compile(self.model, self.communicator, self.sizes)
        self._load_weights()
        for layer, spec in zip(
            self.model.attention_layers, self.model.get_kv_spec().layers, strict=True
        ):
            layer.spec = make_kv_cache_spec(spec, self.sizes.block_size)
            raw = self.backend.allocate_kv(layer.spec.page_size_bytes * NUM_BLOCKS)
            raw[:] = -1  # all bits set is a NaN in every float format
            layer.storage = self.backend.view_kv(raw, layer.spec, NUM_BLOCKS)
        self.executable.bind()

    def _load_weights(self) -> None:
        weights = make_weights(tensor_shapes(self.config))
        for parameter in self.model.parameters:
            parts = []
            for source in parameter.sources:
                part = weights[source.name]
                if (kept := source.slice) is not None:
                    cut = slice(kept.start, kept.stop)
                    part = part[cut] if kept.axis == 0 else part[:, cut]
                parts.append(part)
            array = np.concatenate(parts)
            parameter.value = (
                self.backend.pack(parameter, array)
                if array.ndim == 1
                else self.backend.pack_rows(parameter, self.packed, [float_rows(array)])
            )

    def step(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Logits [num_tokens, vocab_size] of each chunk's tokens."""
        batch = make_batch(chunks, self.sizes.block_size)
        logits = np.array(self.executable.forward(batch))
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
        return np.split(logits, ends[:-1])


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
