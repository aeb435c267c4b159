"""A model that is a function of its whole prefix, over a KV cache that remembers what it holds.

The cell of a slot holds the position, a hash of the prefix that ends there, the token, and the
layer: in the very bytes that the KV cache config gives it, so layers and groups that overlay each
other wrongly are found as well. Every cell that a query sees is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvloom.dtypes import DType
from kvloom.kv.spec import KVCacheConfig, KVCacheSpec, KVSpec, LayerSpec, MLAAttentionSpec
from kvloom.ops.base import KVLayer
from kvloom.runner.collectives import SingleRankCommunicator
from kvloom.runner.input_batch import RunnerLimits
from kvloom.runner.model_runner import ModelRunner
from visibility import first_visible_of

VOCAB_SIZE = 997
MAX_MODEL_LEN = 1024
CELL = 4  # int64 numbers: position, prefix hash, token, layer
_START = 1


def extend_hash(prefix: int, token: int) -> int:
    """The hash of a prefix with one more token."""
    return (prefix * 6364136223846793005 + int(token) + 1442695040888963407) % 2**63


def expected_text(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model generates by definition."""
    prefix = _START
    for token in prompt:
        prefix = extend_hash(prefix, token)
    text = []
    for _ in range(num_tokens):
        text.append(prefix % VOCAB_SIZE)
        prefix = extend_hash(prefix, text[-1])
    return text


def layer(name: str, head_size: int = 4, **kind: Any) -> LayerSpec:
    """A layer of one head: 2 x head_size float32 values per token."""
    return LayerSpec(name, 1, head_size, DType.FLOAT32, **kind)


FULL = [layer("layers.0.self_attn"), layer("layers.1.self_attn")]
HYBRID = [
    *(layer(f"layers.{i}.self_attn", sliding_window_size=48) for i in range(3)),
    layer("layers.3.self_attn"),
    *(layer(f"layers.{i}.self_attn", sliding_window_size=48) for i in range(4, 6)),
    layer("layers.6.self_attn"),
    layer("layers.7.self_attn", shares_kv_with="layers.6.self_attn"),
]
# Pages of two sizes.
MIXED = [
    layer("layers.0.self_attn", head_size=8, sliding_window_size=48),
    layer("layers.1.self_attn"),
    layer("layers.2.self_attn", head_size=8, sliding_window_size=48),
    layer("layers.3.self_attn", head_size=8),
]
CHUNKED = [
    layer("layers.0.self_attn", chunk_size=64),
    layer("layers.1.self_attn", chunk_size=64),
    layer("layers.2.self_attn"),
]
MODELS = {"full": FULL, "hybrid": HYBRID, "mixed": MIXED, "chunked": CHUNKED}


@dataclass
class Counts:
    """Reads, and those that found something else than was written for them."""

    num_reads: int = 0
    num_bad: int = 0
    num_steps: int = 0


class ShadowModel:
    """Declares layers; what it computes is in `ShadowExecutable`."""

    max_model_len = MAX_MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self.parameters: list[Any] = []
        self.spec = KVSpec(list(layers))
        self.attention_layers = [KVLayer(spec.name) for spec in layers]
        self.stored_in = {spec.name: spec.shares_kv_with or spec.name for spec in layers}

    def get_kv_spec(self) -> KVSpec:
        return self.spec


@dataclass
class ShadowExecutable:
    """Writes every token's cell, then reads what each query sees."""

    model: ShadowModel
    counts: Counts
    activation_bytes: int = 0
    computes_meanwhile: bool = False
    takes_late_tokens: bool = False
    keeps_best: bool = False
    ids: dict[str, int] = field(default_factory=dict)

    def bind(self) -> None:
        self.ids = {spec.name: i + 1 for i, spec in enumerate(self.model.spec.layers)}

    def forward(self, batch: Any, late_tokens: None = None) -> Any:
        assert late_tokens is None
        self.counts.num_steps += 1
        # A layer that sees all comes first: it tells the others what they do not see.
        layers = sorted(
            self.model.attention_layers, key=lambda one: first_visible_of(one.spec, 2**20)
        )
        hashes, before = self._run_layer(layers[0], batch, None)
        for one in layers[1:]:
            others, _ = self._run_layer(one, batch, before)
            # A layer whose cells are another prefix's tells so here.
            self.counts.num_bad += int(np.count_nonzero(others != hashes))
        logits = np.zeros((len(batch.logits_rows), VOCAB_SIZE), np.float32)
        best = hashes[batch.logits_rows] % VOCAB_SIZE
        logits[np.arange(len(best)), best] = 9.0
        return logits

    def _run_layer(self, one: KVLayer, batch: Any, before: list[int] | None) -> Any:
        """Write, then read.

        Returns:
            The hash of the prefix that ends at each token, [num_tokens], as this layer has it, and
            the hash before each request's first token, [num_reqs]; `before` is used where the layer
            does not see the token before.
        """
        meta = batch.attention[one.group]
        hashes = np.zeros(len(batch.token_ids), np.int64)
        found: list[int] = []
        is_own = self.model.stored_in[one.name] == one.name
        label = self.ids[self.model.stored_in[one.name]]
        spans = list(enumerate(zip(meta.query_start[:-1], meta.query_start[1:], strict=True)))
        # Requests of one step may read each other's blocks; the writer stands before the reader.
        for i, (start, stop) in spans:
            first = int(meta.num_computed_tokens[i])
            last = _START
            if first and first_visible_of(one.spec, first) < first:
                last = int(self._cell(one, meta, i, first - 1)[1])
            elif first:
                assert before is not None, "one layer has to see all"
                last = before[i]
            found.append(last)
            for token in range(start, stop):
                last = extend_hash(last, batch.token_ids[token])
                hashes[token] = last
                if is_own:
                    slot = divmod(int(meta.slot_mapping[token]), meta.block_size)
                    cell = (batch.positions[token], last, batch.token_ids[token], label)
                    one.storage[slot] = cell
        for i, (start, stop) in spans:
            self._read(one, meta, (i, label, int(stop - start)))
        return hashes, found

    def _cell(self, one: KVLayer, meta: Any, request: int, position: int) -> Any:
        block = meta.block_table[request, position // meta.block_size]
        return one.storage[block, position % meta.block_size]

    def _read(self, one: KVLayer, meta: Any, query: tuple[int, int, int]) -> None:
        """Check all cells that the queries of one request see."""
        request, label, num_queries = query
        stop = int(meta.seq_lens[request])
        firsts = [first_visible_of(one.spec, p) for p in range(stop - num_queries, stop)]
        positions = np.arange(firsts[0], stop)
        blocks = meta.block_table[request, positions // meta.block_size]
        cells = one.storage[blocks, positions % meta.block_size]  # [num_seen, CELL]
        bad = (cells[:, 0] != positions) | (cells[:, 3] != label)
        for i in range(1, len(cells)):
            bad[i] |= cells[i, 1] != extend_hash(int(cells[i - 1, 1]), cells[i, 2])
        self.counts.num_bad += int(np.count_nonzero(bad))
        self.counts.num_reads += sum(
            p + 1 - first for p, first in zip(range(stop - num_queries, stop), firsts, strict=True)
        )


class ShadowBackend:
    """Memory is bytes; a layer's storage is its cells, int64 [num_blocks, block_size, CELL]."""

    name = "shadow"
    pack_rows = None

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def compile(self, model: Any, communicator: Any, sizes: Any) -> ShadowExecutable:
        return ShadowExecutable(model, self.counts)

    def allocate_kv(self, size_bytes: int) -> Any:
        return np.full(size_bytes, 0x7F, np.uint8)  # nothing that a cell could hold

    def view_kv(self, raw: Any, spec: KVCacheSpec, num_blocks: int, offset_bytes: int = 0) -> Any:
        assert not isinstance(spec, MLAAttentionSpec)
        assert raw.nbytes % num_blocks == 0
        block_bytes = raw.nbytes // num_blocks
        assert offset_bytes + spec.page_size_bytes <= block_bytes
        cell_bytes = spec.page_size_bytes // spec.block_size
        assert cell_bytes >= CELL * 8
        return as_strided(
            raw[offset_bytes:].view(np.int64)[:CELL],
            (num_blocks, spec.block_size, CELL),
            (block_bytes, cell_bytes, 8),
        )

    def copy_blocks(self, storage: Any, copies: Any) -> None:
        for source, destination in copies:
            storage[destination] = storage[source]

    def to_host(self, value: Any) -> Any:
        return value


class ShadowWorker:
    """What the engines ask of `kvloom.runner.worker.Worker`."""

    def __init__(self, layers: Sequence[LayerSpec], limits: RunnerLimits) -> None:
        self.counts = Counts()
        self.model = ShadowModel(layers)
        self.runner = ModelRunner(
            self.model,  # type: ignore[arg-type]
            ShadowBackend(self.counts),  # type: ignore[arg-type]
            SingleRankCommunicator(),
            limits,
        )
        self.get_kv_cache_spec = self.runner.get_kv_cache_spec
        self.execute_model = self.runner.execute_model
        self.sample_tokens = self.runner.sample_tokens
        self.prepare_step = self.runner.prepare_step
        self.start_sampling = self.runner.start_sampling

    def load_model(self) -> None:
        self.runner.profile_run(0)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.runner.initialize_kv_cache(config)
