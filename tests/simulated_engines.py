"""Engines to simulate: a tiny model's, or one whose layers, blocks and costs a test names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.config import EngineConfig
from kvloom.dtypes import DType
from kvloom.kv.memory import GIB, MemoryBudget, MemoryUse, explicit_budget
from kvloom.models.base import ModelDTypes
from kvloom.simulate.setup import ModelSource, SimulatedEngine, plan_engine
from kvloom.simulate.trace import TraceRequest
from kvloom.simulate.work import StepShape
from tiny_models import BASE

CONFIGS = Path(__file__).parent / "data" / "model_configs"
TINY = {"model_type": "llama", **BASE, "max_position_embeddings": 200_000}


@dataclass(frozen=True)
class UnitCost:
    """Every step takes a second: times are step numbers."""

    def step_seconds(self, step: StepShape) -> float:
        return 1.0


@dataclass(frozen=True)
class GivenMemory:
    """So many bytes for KV on every rank."""

    kv_bytes: int
    remedy: str = "give more"

    def budget(self, use: MemoryUse, num_ranks: int) -> MemoryBudget:
        return explicit_budget(self.kv_bytes, use)


def make_engine(
    fields: dict[str, Any] | str = "",
    block_size: int = 4,
    kv_bytes: int = GIB,
    **options: Any,
) -> SimulatedEngine:
    """An engine over `fields`, a config by its name, or a tiny model."""
    if isinstance(fields, str):
        fields = json.loads((CONFIGS / f"{fields}.json").read_text()) if fields else TINY
    source = ModelSource(
        fields=fields,
        dtypes=ModelDTypes(DType.FLOAT32, DType.FLOAT32),
        block_size=block_size,
    )
    return plan_engine(EngineConfig.from_options(options), source, GivenMemory(kv_bytes))


def requests_of(*rows: tuple[float, int, int]) -> list[TraceRequest]:
    """(arrival, prompt tokens, output tokens) each, with nothing in common."""
    return [
        TraceRequest(arrival, ((index, num_prompt),), num_output)
        for index, (arrival, num_prompt, num_output) in enumerate(rows)
    ]
