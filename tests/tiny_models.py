"""Tiny random models for tests and for `scripts/golden`: configs, weights and a one-request runner.

Their weights come from numpy's seeded generator, so that both sides make the same ones.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvloom.dtypes import DType
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import KVCacheSpec, LayerSpec
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import AttentionMetadata, Batch
from kvloom.runner.collectives import SingleRankCommunicator, make_thread_communicators
from kvloom.weights.loader import load_weights
from memory_checkpoint import MemoryCheckpoint
from visibility import first_visible

BASE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}

# Short original lengths and a small base, so that 24 positions reach every part of a scaled rope.
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}


def _llama(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **BASE, **changes}


def _qwen2(**changes: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", **BASE, "use_sliding_window": False, **changes}


def _qwen3(**changes: Any) -> dict[str, Any]:
    return {"model_type": "qwen3", **BASE, "use_sliding_window": False, "head_dim": 16, **changes}


def _mistral(**changes: Any) -> dict[str, Any]:
    return {"model_type": "mistral", **BASE, "sliding_window": None, **changes}


CASES: dict[str, dict[str, Any]] = {
    "llama_gqa": _llama(),
    "llama_tied": _llama(tie_word_embeddings=True),
    "llama_mha_biases": _llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama_mqa_head_dim": _llama(num_key_value_heads=1, head_dim=16),
    "llama_gelu": _llama(hidden_act="gelu"),
    "llama_gelu_tanh": _llama(hidden_act="gelu_pytorch_tanh"),
    "llama_theta": _llama(rope_theta=50.0),
    "llama_linear": _llama(rope_scaling={"type": "linear", "factor": 3.0}),
    "llama_llama3": _llama(rope_theta=500.0, rope_scaling=_LLAMA3),
    "llama_llama3_v5": {
        **{k: v for k, v in _llama().items() if k != "rope_theta"},
        "rope_parameters": {**_LLAMA3, "rope_theta": 500.0},
    },
    "llama_yarn": _llama(rope_theta=100.0, rope_scaling=_YARN),
    "llama_yarn_mscale": _llama(
        rope_theta=100.0, rope_scaling={**_YARN, "mscale": 1.5, "mscale_all_dim": 0.5}
    ),
    "llama_yarn_attention_factor": _llama(
        rope_theta=100.0,
        rope_scaling={**_YARN, "attention_factor": 1.3, "truncate": False},
    ),
    "qwen2_tied": _qwen2(tie_word_embeddings=True),
    "qwen2_untied_mha": _qwen2(num_key_value_heads=4),
    "qwen2_yarn": _qwen2(rope_theta=100.0, rope_scaling=_YARN),
    "qwen3_tied": _qwen3(tie_word_embeddings=True),
    "qwen3_biases_mqa": _qwen3(num_key_value_heads=1, attention_bias=True),
    "qwen3_yarn": _qwen3(rope_theta=100.0, rope_scaling=_YARN),
    "mistral_gqa": _mistral(),
    "mistral_head_dim_tied": _mistral(head_dim=16, tie_word_embeddings=True),
}

NUM_TOKENS = 24
GOLDEN_ROWS = slice(2, None, 3)  # the positions whose logits are kept


def make_token_ids(case: str) -> list[int]:
    """The case's prompt: NUM_TOKENS ids of BASE's vocabulary."""
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    return [int(x) for x in rng.random(NUM_TOKENS) * BASE["vocab_size"]]


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the config's checkpoint, by Hugging Face name."""
    model = build_model(config, TensorParallelRank(), ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    return {s.name: s.shape for parameter in model.parameters for s in parameter.sources}


def make_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Uniform values per tensor, seeded by its name, sized so that logits come out around 1."""
    weights = {}
    for name, shape in shapes.items():
        values = 2.0 * np.random.default_rng(zlib.crc32(name.encode())).random(shape) - 1.0
        if len(shape) > 1:
            values *= 1.7 if "embed" in name else 2.5 / shape[-1] ** 0.5
        elif "norm" in name or "scal" in name:
            values = 1.0 + 0.3 * values
        weights[name] = values.astype(np.float32)
    return weights


def build_loaded(
    config: Mapping[str, Any],
    backend: Any,
    rank: TensorParallelRank = TensorParallelRank(),  # noqa: B008 - frozen, so it may be shared
) -> Model:
    """A model of `config` with `make_weights`' weights, as the loader arranges them."""
    model = build_model(config, rank, ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    load_weights(model, MemoryCheckpoint(make_weights(tensor_shapes(config))), backend.pack)
    return model


class TinyRunner:
    """Runs one request through a model, chunk by chunk, over blocks that do not lie in order.

    Every layer that stores KV is a group of its own. The pools are filled with NaN first, and
    blocks that no later token sees are taken from the table and filled with NaN again: a read of
    what is not there shows.
    """

    def __init__(self, model: Model, backend: Any, block_size: int = 4) -> None:
        self.model, self.backend, self.block_size = model, backend, block_size
        self.num_blocks = 1 + -(-model.max_model_len // block_size)
        self.num_computed = 0
        self._groups: list[_LayerGroup] = []
        bound = {}  # layer name -> the KVLayer that it is or reads
        for layer, spec in zip(model.attention_layers, model.get_kv_spec().layers, strict=True):
            if spec.shares_kv_with is not None:
                target = bound[spec.shares_kv_with]
                layer.spec, layer.group, layer.storage = target.spec, target.group, target.storage
            else:
                group = _LayerGroup(spec, backend, block_size, self.num_blocks)
                layer.spec, layer.group = group.spec, len(self._groups)
                layer.storage = backend.view_kv(group.raw, group.spec, self.num_blocks)
                self._groups.append(group)
            bound[layer.name] = layer

    def step(
        self,
        token_ids: Sequence[int],
        communicator: Any = None,
        rows: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Logits [num_rows, vocab_size] of the request's next tokens; of all unless `rows` says."""
        start, end = self.num_computed, self.num_computed + len(token_ids)
        batch = Batch(
            token_ids=np.array(token_ids, np.int64),
            positions=np.arange(start, end),
            logits_rows=np.arange(len(token_ids)) if rows is None else np.array(rows),
            attention=[group.metadata(start, end) for group in self._groups],
        )
        self.num_computed = end
        ops = self.backend.ops(batch, communicator or SingleRankCommunicator())
        return self.backend.to_host(self.model.forward(ops, batch))


class _LayerGroup:
    """The blocks of one layer and the request's table of them."""

    def __init__(self, layer: LayerSpec, backend: Any, block_size: int, num_blocks: int) -> None:
        self.layer = layer
        self.spec: KVCacheSpec = make_kv_cache_spec(layer, block_size)
        self.raw = backend.allocate_kv(self.spec.page_size_bytes * num_blocks)
        self.raw[:] = -1  # all bits set is a NaN in every float format
        rng = np.random.default_rng(block_size)
        self.table = (1 + rng.permutation(num_blocks - 1)).astype(np.int32)

    def metadata(self, start: int, end: int) -> AttentionMetadata:
        """Of a step over the positions [start, end)."""
        size = self.spec.block_size
        first = first_visible(start, self.layer.sliding_window_size, self.layer.chunk_size)
        self._drop_before(first // size)
        positions = np.arange(start, end)
        return AttentionMetadata(
            block_table=self.table[None].copy(),
            slot_mapping=self.table[positions // size].astype(np.int64) * size + positions % size,
            query_start=np.array([0, end - start], np.int32),
            seq_lens=np.array([end], np.int32),
            num_computed_tokens=np.array([start], np.int32),
            block_size=size,
        )

    def _drop_before(self, column: int) -> None:
        blocks = self.raw.reshape(-1, self.spec.page_size_bytes)
        blocks[self.table[:column]] = -1
        self.table[:column] = 0


def run_ranks(world_size: int, work: Callable[[TensorParallelRank, Any], Any]) -> list[Any]:
    """`work(rank, communicator)` of every rank on a thread of its own; the results by rank."""
    results: list[Any] = [None] * world_size
    communicators = make_thread_communicators(world_size)

    def run(rank: int) -> None:
        try:
            results[rank] = work(TensorParallelRank(rank, world_size), communicators[rank])
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            results[rank] = error
            if world_size > 1:
                communicators[rank].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
