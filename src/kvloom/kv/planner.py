"""Layer specs and free bytes in, one KVCacheConfig per worker out, or a refusal that says why.

Specs know the bytes of a page, layouts which layers share a block; here blocks add up to a pool,
and the pool to requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from kvloom.config import AUTO, Auto
from kvloom.errors import CapacityError, ConfigError, ModelError, UnsupportedModelError
from kvloom.kv.grouping import (
    add_sharing_layers,
    deal_layers,
    groups_of_worker,
    layer_types,
    merge_layers,
)
from kvloom.kv.layout import LayerType, LayoutProblem, find_layout
from kvloom.kv.layout_vllm import group_as_vllm, num_blocks_as_vllm
from kvloom.kv.memory import MemoryBudget, format_bytes
from kvloom.kv.sizing import GroupCost, Pool, Worker
from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVLimits,
    KVSpec,
    LayerSpec,
    MLAAttentionSpec,
    SharedKVSpec,
    SlidingWindowSpec,
)

Layout = Literal["kvloom", "vllm"]


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
        layout: how layers that differ share the pool: kvloom's way, or vLLM's to compare with.
    """

    max_model_len: int | Auto
    model_max_len: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    budgets: tuple[MemoryBudget, ...] = ()
    remedy: str = "give the cache more memory with memory_share or kv_cache_bytes"
    layout: Layout = "kvloom"


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The plan, with the numbers it rests on. Lists of workers have one entry per worker.

    Attributes:
        max_model_len: as asked, or as "auto" was resolved.
        num_blocks: of every worker, block 0 included.
        num_blocks_per_request: the most that one request of `max_model_len` holds, but for chunks.
        num_reserved_blocks: kept once for the pool, for what chunks in flight hold beyond that.
        group_costs: these two, per group.
        max_concurrency: requests of `max_model_len` that the blocks hold, block 0 and the reserve
            not counted.
        padding_percent: part of the blocks of such requests that no layer fills.
        kv_bytes_per_token: bytes a stored token takes over a worker's layers; the largest worker's.
        block_bytes: bytes of a block.
        group_bytes: bytes of a block that the layers of each group fill.
        available_bytes: what the worker offered for KV.
        configs: what each worker allocates.
    """

    max_model_len: int
    num_blocks: int
    num_blocks_per_request: int
    num_reserved_blocks: int
    group_costs: list[GroupCost]
    max_concurrency: float
    padding_percent: float
    kv_bytes_per_token: int
    block_bytes: list[int]
    group_bytes: list[list[int]]
    available_bytes: list[int]
    configs: list[KVCacheConfig]


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
    if layer.is_latent:
        return MLAAttentionSpec(**stored)
    if window is not None:
        return SlidingWindowSpec(**stored, sliding_window=window)
    if chunk is not None:
        return ChunkedLocalAttentionSpec(**stored, attention_chunk_size=chunk)
    return FullAttentionSpec(**stored)


def make_kv_cache_specs(kv_spec: KVSpec, block_size: int) -> dict[str, KVCacheSpec]:
    """How each layer's KV is stored, by its name, in order.

    Raises:
        ModelError: a layer shares KV that it would read otherwise than it was stored.
        UnsupportedModelError: a layer has a window and chunks.
    """
    layers = {layer.name: layer for layer in kv_spec.layers}
    for layer in layers.values():
        target = layers.get(layer.shares_kv_with or layer.name)
        unshared = replace(layer, shares_kv_with=None)
        if target is not None and unshared != replace(target, name=layer.name, shares_kv_with=None):
            raise ModelError(
                f"layer {layer.name} shares the KV of {target.name}, which differs from it in kind "
                "or size; correct the model's shares_kv_with"
            )
    return {name: make_kv_cache_spec(layer, block_size) for name, layer in layers.items()}


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
    """Merge all workers' layers, lay them out, count the blocks that every worker can hold.

    `kv_cache_specs` and `available_memory` (bytes) have one entry per worker.

    Raises:
        CapacityError: no memory, or not enough for one request of the length asked for.
        ConfigError: the length, or the workers, cannot go together.
        ModelError: the layers are of a kind, or a mixture, that cannot be planned.
    """
    planner = _Planner(request, kv_cache_specs, available_memory)
    max_model_len, pool = planner.resolve()
    return KVCachePlan(
        max_model_len=max_model_len,
        num_blocks=pool.num_blocks,
        num_blocks_per_request=pool.num_steady_blocks,
        num_reserved_blocks=pool.num_reserved_blocks,
        group_costs=pool.costs,
        max_concurrency=float(pool.requests_held),
        padding_percent=max(w.padding_percent(pool.costs) for w in pool.workers),
        kv_bytes_per_token=max(w.bytes_per_token for w in pool.workers),
        block_bytes=[w.block_bytes for w in pool.workers],
        group_bytes=[w.group_bytes for w in pool.workers],
        available_bytes=list(available_memory),
        configs=[w.config(pool.num_blocks) for w in pool.workers],
    )


class _Planner:
    """The pool for sequences of any length, and the length to take."""

    def __init__(
        self,
        request: PlanRequest,
        kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
        available_memory: Sequence[int],
    ) -> None:
        self._request = request
        self._layers = merge_layers(kv_cache_specs)
        self._types = layer_types(self._layers)
        self._offers = list(zip(kv_cache_specs, available_memory, strict=True))
        self._check_memory()
        storing = {name: self._layers[name] for names in self._types.values() for name in names}
        self._vllm = group_as_vllm(storing)
        self._found: dict[KVLimits, list[KVCacheGroupSpec]] = {}

    def _check_memory(self) -> None:
        for index, (_, available) in enumerate(self._offers):
            if available <= 0:
                raise CapacityError(
                    f"worker {index} has no memory for KV: {format_bytes(available)} left"
                    f"{_arithmetic(self._request, index)}; {self._request.remedy}"
                )

    def resolve(self) -> tuple[int, Pool]:
        """The length asked for if one request of it fits, "auto": the largest that does; its pool.

        Raises:
            CapacityError: no such length.
            ConfigError: a length beyond the model's.
        """
        request = self._request
        asked = request.model_max_len if request.max_model_len == AUTO else request.max_model_len
        if asked > request.model_max_len:
            raise ConfigError(
                f"max_model_len is {asked}, but the model was made for at most "
                f'{request.model_max_len}; give at most that, or "auto"'
            )
        pool = self._pool(asked)
        if pool.fits:
            return asked, pool
        largest = self._largest_fit(asked)
        if request.max_model_len == AUTO and largest:
            return largest, self._pool(largest)
        raise CapacityError(_too_long(request, pool, asked, largest))

    def _largest_fit(self, at_most: int) -> int:
        """The largest length that fits, 0 if none does."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._pool(middle).fits else (low, middle - 1)
        return low

    def _pool(self, max_model_len: int) -> Pool:
        """The blocks there are, in the layout for sequences of this length."""
        limits = self._limits(max_model_len)
        if self._request.layout == "vllm":
            return self._vllm_pool(limits)
        groups = self._groups(limits)
        stored = limits.max_stored_tokens
        costs = [
            GroupCost(spec.num_steady_blocks(stored), spec.num_transient_blocks(limits))
            for spec in (group.kv_cache_spec for group in groups)
        ]
        workers = self._workers(groups)
        return Pool(workers, self._count_blocks(workers), costs)

    def _vllm_pool(self, limits: KVLimits) -> Pool:
        if self._vllm is None:
            raise UnsupportedModelError(
                "vLLM has no layout for these layers; plan them in kvloom's (--layout kvloom)"
            )
        specs = [group.kv_cache_spec for group in self._vllm.groups]
        costs = [GroupCost(num_blocks_as_vllm(spec, limits), 0) for spec in specs]
        workers = self._workers(self._vllm.groups, self._vllm.min_page_bytes)
        return Pool(workers, self._count_blocks(workers), costs, counts_null_block=True)

    def _limits(self, max_model_len: int) -> KVLimits:
        return KVLimits(max_model_len, self._request.max_num_batched_tokens)

    def _groups(self, limits: KVLimits) -> list[KVCacheGroupSpec]:
        """The groups that hold most requests, and no fewer than vLLM's do."""
        if self._request.num_blocks is not None:  # lengths must not change what a block is
            limits = self._limits(self._request.model_max_len)
        if limits not in self._found:
            types = tuple(LayerType(spec, len(names)) for spec, names in self._types.items())
            problem = LayoutProblem(types, self._memory_of_model(), limits)
            held = self._vllm and self._vllm.requests_held(problem.memory_bytes, limits)
            shapes = find_layout(problem, at_least=held or Fraction(0))
            self._found[limits] = deal_layers(self._types, shapes)
        return self._found[limits]

    def _memory_of_model(self) -> int:
        """What a worker with all layers would offer, by the tightest one, as layers are spread."""
        model_bytes = sum(spec.page_size_bytes for spec in self._layers.values())
        return min(
            available * model_bytes // sum(spec.page_size_bytes for spec in specs.values())
            for specs, available in self._offers
        )

    def _workers(self, groups: Sequence[KVCacheGroupSpec], min_page_bytes: int = 0) -> list[Worker]:
        groups = add_sharing_layers(groups, self._layers)
        return [
            Worker(i, groups_of_worker(specs, groups), specs, available, min_page_bytes)
            for i, (specs, available) in enumerate(self._offers)
        ]

    def _count_blocks(self, workers: list[Worker]) -> int:
        """Blocks that fit the tightest worker, or as many as were asked for."""
        request = self._request
        tightest = _tightest(workers)
        num_blocks = tightest.available_bytes // tightest.block_bytes
        if request.num_blocks is None:
            return num_blocks
        if request.num_blocks > num_blocks:
            raise CapacityError(
                f"num_blocks is {request.num_blocks}, but {_room(tightest, num_blocks)}"
                f"{_arithmetic(request, tightest.index)}; ask for at most {num_blocks}, or "
                f"{request.remedy}"
            )
        return request.num_blocks


def _tightest(workers: Sequence[Worker]) -> Worker:
    return min(workers, key=lambda w: w.available_bytes // w.block_bytes)


def _too_long(request: PlanRequest, pool: Pool, asked: int, largest: int) -> str:
    fits = (
        f'the largest length that fits is {largest}: set max_model_len to it or to "auto"'
        if largest
        else "no length fits"
    )
    remedy = request.remedy if request.num_blocks is None else "raise num_blocks"
    chunks = f", {pool.num_reserved_blocks} for chunks" if pool.num_reserved_blocks else ""
    needed = pool.num_steady_blocks + pool.num_reserved_blocks + 1
    needs = f"{pool.num_steady_blocks} blocks{chunks} and block 0, which is reserved"
    tightest = _tightest(pool.workers)
    return (
        f"one request of max_model_len {asked} needs {needed} blocks of KV ({needs}), but "
        f"{_room(tightest, pool.num_blocks)}{_arithmetic(request, tightest.index)}; {fits}, or "
        f"{remedy}"
    )


def _room(worker: Worker, num_blocks: int) -> str:
    """Blocks are counted, as rounded bytes may read the same on both sides."""
    return (
        f"worker {worker.index} has {num_blocks} of {format_bytes(worker.block_bytes)} each, from "
        f"{format_bytes(worker.available_bytes)} for KV"
    )


def _arithmetic(request: PlanRequest, worker: int) -> str:
    """How the worker's memory came about, in brackets; empty if nobody said."""
    if not request.budgets:
        return ""
    lines = request.budgets[worker].lines
    return f" [{', '.join(f'{line.label}: {format_bytes(line.num_bytes)}' for line in lines)}]"
