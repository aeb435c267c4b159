"""From a model's config to what a simulated engine starts with: its plan, and its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvloom.config import EngineConfig
from kvloom.kv.memory import MemoryBudget, MemoryUse
from kvloom.kv.planner import (
    KVCachePlan,
    Layout,
    PlanRequest,
    make_kv_cache_specs,
    plan_kv_cache,
)
from kvloom.kv.spec import KVCacheSpec, KVLimits
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.simulate.work import ModelWork, count_work


class Memory(Protocol):
    """Where the memory of ranks comes from."""

    @property
    def remedy(self) -> str:
        """How there can be more of it."""

    def budget(self, use: MemoryUse, num_ranks: int) -> MemoryBudget:
        """What one of `num_ranks` ranks may use for KV."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What all replicas have in common.

    Attributes:
        plan: the planner's.
        work: of the first rank.
        weights_bytes: of the rank with the most.
    """

    config: EngineConfig
    plan: KVCachePlan
    work: ModelWork
    weights_bytes: int

    @property
    def limits(self) -> KVLimits:
        """What bounds one request."""
        return KVLimits(self.plan.max_model_len, self.config.scheduler.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model without its weights.

    Attributes:
        fields: of its config.json.
        block_size: tokens per block, resolved for the device.
    """

    fields: Mapping[str, Any]
    dtypes: ModelDTypes
    block_size: int


@dataclass(frozen=True, slots=True)
class RankModels:
    """A model cut into ranks: what planning and costs need of it. Lists have an entry per rank."""

    specs: list[dict[str, KVCacheSpec]]
    weights_bytes: list[int]
    work: ModelWork
    max_model_len: int


def build_ranks(config: EngineConfig, source: ModelSource) -> RankModels:
    """Build every rank's model, without weights.

    Raises:
        ModelError, ParallelSizeError: with the remedy.
    """
    num_ranks = config.parallel.tensor_parallel_size
    longest = config.model.max_model_len
    models = [
        build_model(source.fields, TensorParallelRank(rank, num_ranks), source.dtypes, longest)
        for rank in range(num_ranks)
    ]
    return RankModels(
        specs=[make_kv_cache_specs(model.get_kv_spec(), source.block_size) for model in models],
        weights_bytes=[sum(p.num_bytes for p in model.parameters) for model in models],
        work=count_work(models[0], num_ranks),
        max_model_len=models[0].max_model_len,
    )


def plan_ranks(
    config: EngineConfig, ranks: RankModels, memory: Memory, layout: Layout = "kvloom"
) -> KVCachePlan:
    """Plan as an engine does at its start, activations not counted.

    Raises:
        CapacityError, ConfigError: with the remedy.
    """
    num_ranks = len(ranks.weights_bytes)
    budgets = tuple(memory.budget(MemoryUse(size, 0), num_ranks) for size in ranks.weights_bytes)
    request = PlanRequest(
        max_model_len=config.model.max_model_len,
        model_max_len=ranks.max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_blocks=config.cache.num_blocks,
        budgets=budgets,
        remedy=memory.remedy,
        layout=layout,
    )
    return plan_kv_cache(request, ranks.specs, [budget.kv_bytes for budget in budgets])


def plan_engine(config: EngineConfig, source: ModelSource, memory: Memory) -> SimulatedEngine:
    """Both: see `build_ranks` and `plan_ranks`."""
    ranks = build_ranks(config, source)
    plan = plan_ranks(config, ranks, memory)
    return SimulatedEngine(config, plan, ranks.work, max(ranks.weights_bytes))
