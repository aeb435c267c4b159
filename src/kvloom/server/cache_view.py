"""What the live cache page shows: snapshots of the pool, told as changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvloom.engine.async_llm import AsyncLLM
from kvloom.engine.core import EngineCore
from kvloom.errors import UnavailableError
from kvloom.kv.manager import CacheStats
from kvloom.kv.pool import NULL_BLOCK_ID
from kvloom.kv.spec import KVCacheSpec
from kvloom.sched.stats import SchedulerStats
from kvloom.server.block_tracker import CachedBlock
from kvloom.server.connection import to_json
from kvloom.server.metrics import EngineMetrics, block_tables

_UPDATE_SECONDS = 0.1
_NUM_HASH_BYTES = 8  # of those shown: enough to tell blocks apart by eye

Block = tuple[int, "str | None", tuple[str, ...], int]
"""(group, beginning of its hash, requests that hold it, its column in their tables or -1)"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps: copies, so that it can be read at leisure."""

    num_steps: int
    requests: list[dict[str, Any]]
    tables: dict[str, tuple[list[int], ...]]
    cached: dict[int, CachedBlock]
    cache: CacheStats
    scheduler: SchedulerStats


def take_snapshot(core: EngineCore, metrics: EngineMetrics) -> Snapshot:
    """Copy what is shown; on the engine's thread."""
    metrics.catch_up(time.perf_counter())
    requests = metrics.requests
    return Snapshot(
        core.stats.steps.num_steps,
        [
            {
                "id": request.req_id,
                "status": request.status.value,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_tokens": request.num_tokens,
                "num_computed_tokens": request.num_computed_tokens,
                "num_cached_tokens": request.num_cached_tokens,
                "max_tokens": request.sampling_params.max_tokens,
                "num_preemptions": request.num_preemptions,
            }
            for request in requests
        ],
        block_tables(core, [request.req_id for request in requests]),
        dict(metrics.tracker.cached),
        core.manager.stats,
        core.scheduler.stats,
    )


def describe_pool(core: EngineCore) -> dict[str, Any]:
    """What does not change: the size of the pool, and its groups."""
    config = core.plan.configs[0]
    return {
        "type": "pool",
        "num_blocks": config.num_blocks,
        "groups": [
            {
                "kind": _kind(group.kv_cache_spec),
                "block_size": group.kv_cache_spec.block_size,
                "num_layers": len(group.layer_names),
            }
            for group in config.kv_cache_groups
        ],
    }


def blocks_of(snapshot: Snapshot) -> dict[int, Block]:
    """All blocks that hold something, by id."""
    owners: dict[int, list[str]] = {}
    places: dict[int, tuple[int, int]] = {}
    for req_id, tables in snapshot.tables.items():
        for group, table in enumerate(tables):
            for column, block_id in enumerate(table):
                if block_id != NULL_BLOCK_ID:
                    owners.setdefault(block_id, []).append(req_id)
                    places[block_id] = (group, column)
    blocks: dict[int, Block] = {}
    for block_id, (group, column) in places.items():
        cached = snapshot.cached.get(block_id)
        blocks[block_id] = (group, _short(cached), tuple(owners[block_id]), column)
    for block_id, cached in snapshot.cached.items():
        if block_id not in blocks:
            blocks[block_id] = (cached.group, _short(cached), (), -1)
    return blocks


def describe_changes(
    snapshot: Snapshot, before: dict[int, Block], now: dict[int, Block]
) -> dict[str, Any]:
    """What to draw anew: blocks that changed, ids of those that hold nothing any more."""
    return {
        "type": "update",
        "num_steps": snapshot.num_steps,
        "requests": snapshot.requests,
        "blocks": [[i, *block] for i, block in now.items() if before.get(i) != block],
        "freed": [block_id for block_id in before if block_id not in now],
        "num_running": snapshot.scheduler.num_running,
        "num_waiting": snapshot.scheduler.num_waiting,
        "num_preemptions": snapshot.scheduler.num_preemptions,
        "num_used_blocks": snapshot.cache.num_used_blocks,
        "num_queried_tokens": snapshot.cache.num_queried_tokens,
        "num_hit_tokens": snapshot.cache.num_hit_tokens,
    }


async def cache_events(llm: AsyncLLM, metrics: EngineMetrics) -> AsyncIterator[str]:
    """The pool, then its changes ten times a second; the first ones are all there is."""
    before: dict[int, Block] = {}
    with suppress(UnavailableError):  # the server ends
        yield to_json(await llm.inspect(describe_pool))
        while True:
            snapshot = await llm.inspect(lambda core: take_snapshot(core, metrics))
            text, before = await asyncio.to_thread(_update, snapshot, before)
            yield text
            await asyncio.sleep(_UPDATE_SECONDS)


def _update(snapshot: Snapshot, before: dict[int, Block]) -> tuple[str, dict[int, Block]]:
    now = blocks_of(snapshot)
    return to_json(describe_changes(snapshot, before, now)), now


def _kind(spec: KVCacheSpec) -> str:
    """Full, sliding window, chunked local, ...: the name of the spec in words."""
    name = type(spec).__name__.removesuffix("Spec").removesuffix("Attention")
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()
    return "MLA" if name == "MLA" else words


def _short(cached: CachedBlock | None) -> str | None:
    return None if cached is None else cached.block_hash[:_NUM_HASH_BYTES].hex()
