"""Layer specs and free bytes in, one KVCacheConfig per worker out, or a refusal that says why.

Specs know the bytes of a page; here pages add up to blocks, blocks to a pool, the pool to requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvloom.config import AUTO, Auto
from kvloom.errors import CapacityError, ConfigError, UnsupportedModelError
from kvloom.kv.grouping import group_layers, groups_of_worker, merge_layers
from kvloom.kv.memory import MemoryBudget, format_bytes
from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVLimits,
    LayerSpec,
    SharedKVSpec,
    SlidingWindowSpec,
    cdiv,
)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked of the cache.

    Attributes:
        max_model_len: prompt plus output tokens of one request; "auto" is `model_max_len`, or the
            largest length that fits if that is less.
        model_max_len: most tokens of one request the model was made for.
        max_num_batched_tokens: tokens one step may add to a request.
        num_blocks: blocks to make, block 0 included, in place of as many as fit; None for those.
        budgets: how each worker's memory came about; only messages read it. Empty, or one each.
        remedy: how whoever asks can come to more memory for KV, for messages.
    """

    max_model_len: int | Auto
    model_max_len: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    budgets: tuple[MemoryBudget, ...] = ()
    remedy: str = "give the cache more memory with memory_share or kv_cache_bytes"


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The plan, with the numbers it rests on. Lists have one entry per worker.

    Attributes:
        max_model_len: as asked, or as "auto" was resolved.
        num_blocks: of every worker, block 0 included.
        num_blocks_per_request: the most that one request of `max_model_len` holds.
        max_concurrency: requests of `max_model_len` that the blocks hold, block 0 not counted.
        padding_percent: part of the pool that no layer fills, as groups differ in bytes.
        kv_bytes_per_token: bytes a stored token takes over a worker's layers; the largest worker's.
        block_bytes: bytes of one block over all layers of the worker.
        available_bytes: what the worker offered for KV.
        configs: what each worker allocates.
    """

    max_model_len: int
    num_blocks: int
    num_blocks_per_request: int
    max_concurrency: float
    padding_percent: float
    kv_bytes_per_token: int
    block_bytes: list[int]
    available_bytes: list[int]
    configs: list[KVCacheConfig]


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker's part of the groups, and the memory it offers."""

    index: int
    groups: list[KVCacheGroupSpec]
    specs: Mapping[str, KVCacheSpec]
    available_bytes: int

    @property
    def group_bytes(self) -> list[int]:
        """Bytes that one block of each group fills."""
        return [sum(self.specs[n].page_size_bytes for n in g.layer_names) for g in self.groups]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: any group may take it, so the largest counts."""
        return max(self.group_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one stored token over all layers."""
        return sum(cdiv(s.page_size_bytes, s.block_size) for s in self.specs.values())


@dataclass(frozen=True, slots=True)
class _Pool:
    """The blocks every worker has, and the groups that draw on them."""

    groups: list[KVCacheGroupSpec]
    num_blocks: int
    max_num_batched_tokens: int

    def blocks_of_request(self, max_model_len: int) -> int:
        """The most blocks one request of this length holds, over all groups."""
        limits = KVLimits(max_model_len, self.max_num_batched_tokens)
        stored = limits.max_stored_tokens
        return sum(g.kv_cache_spec.max_num_blocks(stored, limits) for g in self.groups)

    def fits(self, max_model_len: int) -> bool:
        """Whether one request of this length can run alone."""
        return self.blocks_of_request(max_model_len) < self.num_blocks

    def largest_fit(self, at_most: int) -> int:
        """The largest length that fits, 0 if none does."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low


def make_kv_cache_spec(layer: LayerSpec, block_size: int) -> KVCacheSpec:
    """How a layer's KV is stored in blocks of `block_size` tokens.

    Raises:
        UnsupportedModelError: the layer has a window and chunks.
    """
    if layer.shares_kv_with is not None:
        return SharedKVSpec(block_size=block_size, target=layer.shares_kv_with)
    window, chunk = layer.sliding_window_size, layer.chunk_size
    if window is not None and chunk is not None:
        raise UnsupportedModelError(
            f"layer {layer.name} has a sliding window and attention chunks; choose a model whose "
            "layers have one of them"
        )
    stored: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": layer.num_kv_heads,
        "head_size": layer.head_size,
        "dtype": layer.dtype,
        "head_size_v": layer.head_size_v,
        "num_global_kv_heads": layer.num_global_kv_heads,
    }
    if window is not None:
        return SlidingWindowSpec(**stored, sliding_window=window)
    if chunk is not None:
        return ChunkedLocalAttentionSpec(**stored, attention_chunk_size=chunk)
    return FullAttentionSpec(**stored)


def get_kv_cache_configs(
    config: PlanRequest,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
) -> list[KVCacheConfig]:
    """What each worker allocates: see `plan_kv_cache`."""
    return plan_kv_cache(config, kv_cache_specs, available_memory).configs


def plan_kv_cache(
    request: PlanRequest,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
) -> KVCachePlan:
    """Merge all workers' layers, group them, count the blocks that every worker can hold.

    `kv_cache_specs` and `available_memory` (bytes) have one entry per worker.

    Raises:
        CapacityError: no memory, or not enough for one request of the length asked for.
        ConfigError: the length, or the workers, cannot go together.
        ModelError: the layers are of a kind, or a mixture, that cannot be planned.
    """
    groups = group_layers(merge_layers(kv_cache_specs))
    workers = [
        _Worker(i, groups_of_worker(specs, groups), specs, available)
        for i, (specs, available) in enumerate(zip(kv_cache_specs, available_memory, strict=True))
    ]
    tightest = min(workers, key=lambda w: w.available_bytes // w.block_bytes)
    pool = _Pool(groups, _count_blocks(request, tightest), request.max_num_batched_tokens)
    max_model_len = _resolve_max_model_len(request, pool, tightest)
    num_blocks_per_request = pool.blocks_of_request(max_model_len)
    return KVCachePlan(
        max_model_len=max_model_len,
        num_blocks=pool.num_blocks,
        num_blocks_per_request=num_blocks_per_request,
        max_concurrency=(pool.num_blocks - 1) / num_blocks_per_request,
        padding_percent=max(_padding_percent(w) for w in workers),
        kv_bytes_per_token=max(w.bytes_per_token for w in workers),
        block_bytes=[w.block_bytes for w in workers],
        available_bytes=list(available_memory),
        configs=[
            KVCacheConfig(pool.num_blocks, _tensors(w, pool.num_blocks), w.groups) for w in workers
        ],
    )


def _tensors(worker: _Worker, num_blocks: int) -> list[KVCacheTensor]:
    """One tensor per layer that stores KV; the layers that read it alias it."""
    tensors: dict[str, KVCacheTensor] = {}
    for name, spec in worker.specs.items():
        if spec.shared_target is None:
            tensors[name] = KVCacheTensor(spec.page_size_bytes * num_blocks, [name])
        else:
            tensors[spec.shared_target].shared_by.append(name)
    return list(tensors.values())


def _padding_percent(worker: _Worker) -> float:
    """What blocks leave empty, if all groups use equally many."""
    filled = sum(worker.group_bytes) / len(worker.groups)
    return 100.0 * (1.0 - filled / worker.block_bytes)


def _count_blocks(request: PlanRequest, tightest: _Worker) -> int:
    """Blocks that fit the tightest worker, or as many as were asked for."""
    if tightest.available_bytes <= 0:
        raise CapacityError(
            f"worker {tightest.index} has no memory for KV: "
            f"{format_bytes(tightest.available_bytes)} left{_arithmetic(request, tightest)}; "
            f"{request.remedy}"
        )
    num_blocks = tightest.available_bytes // tightest.block_bytes
    if request.num_blocks is None:
        return num_blocks
    if request.num_blocks > num_blocks:
        raise CapacityError(
            f"num_blocks is {request.num_blocks}, but {_room(tightest, num_blocks)}"
            f"{_arithmetic(request, tightest)}; ask for at most {num_blocks}, or {request.remedy}"
        )
    return request.num_blocks


def _resolve_max_model_len(request: PlanRequest, pool: _Pool, tightest: _Worker) -> int:
    """The length asked for if one request of it fits; "auto" is the largest that does."""
    asked = request.model_max_len if request.max_model_len == AUTO else request.max_model_len
    if asked > request.model_max_len:
        raise ConfigError(
            f"max_model_len is {asked}, but the model was made for at most "
            f'{request.model_max_len}; give at most that, or "auto"'
        )
    if pool.fits(asked):
        return asked
    largest = pool.largest_fit(asked)
    if request.max_model_len == AUTO and largest:
        return largest
    raise CapacityError(_too_long(request, pool, tightest, asked))


def _too_long(request: PlanRequest, pool: _Pool, tightest: _Worker, asked: int) -> str:
    needed = pool.blocks_of_request(asked)
    largest = pool.largest_fit(asked)
    fits = (
        f'the largest length that fits is {largest}: set max_model_len to it or to "auto"'
        if largest
        else "no length fits"
    )
    remedy = request.remedy if request.num_blocks is None else "raise num_blocks"
    needs = f"{needed} blocks and block 0, which is reserved"
    return (
        f"one request of max_model_len {asked} needs {needed + 1} blocks of KV ({needs}), but "
        f"{_room(tightest, pool.num_blocks)}{_arithmetic(request, tightest)}; {fits}, or {remedy}"
    )


def _room(worker: _Worker, num_blocks: int) -> str:
    """Blocks are counted, as rounded bytes may read the same on both sides."""
    return (
        f"worker {worker.index} has {num_blocks} of {format_bytes(worker.block_bytes)} each, from "
        f"{format_bytes(worker.available_bytes)} for KV"
    )


def _arithmetic(request: PlanRequest, worker: _Worker) -> str:
    """How the worker's memory came about, in brackets; empty if nobody said."""
    if not request.budgets:
        return ""
    lines = request.budgets[worker.index].lines
    return f" [{', '.join(f'{line.label}: {format_bytes(line.num_bytes)}' for line in lines)}]"
