"""Requests that one device's memory holds: kvloom's layout against vLLM's, per hybrid model.

Both are plans of `kvloom plan`: vLLM's numbers are those it prints itself (the tests hold them
against its own plans), block 0 counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.cli.plan import make_plan
from kvloom.cli.plan_budget import MemorySource
from kvloom.config import EngineConfig
from kvloom.kv.planner import KVCachePlan, Layout

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "model_configs"
MEMORY_BYTES = 40 << 30
LENGTHS = (4096, 32_768, 131_072)


def plan_of(model: Path, max_model_len: int, layout: Layout) -> KVCachePlan:
    """With 16 tokens per block and 2,048 per step, in the config's dtype."""
    options = {
        "model": str(model),
        "max_model_len": max_model_len,
        "block_size": 16,
        "max_num_batched_tokens": 2048,
    }
    source = MemorySource("cuda", MEMORY_BYTES)
    return make_plan(EngineConfig.from_options(options), source, layout).plan


def row_of(model: Path, max_model_len: int) -> str:
    """One row of the table."""
    ours, theirs = (plan_of(model, max_model_len, layout) for layout in ("kvloom", "vllm"))
    groups = ours.configs[0].kv_cache_groups
    block_sizes = ", ".join(str(group.kv_cache_spec.block_size) for group in groups)
    held, held_by_vllm = ours.max_concurrency, theirs.max_concurrency
    return (
        f"| {model.stem} | {max_model_len:,} | {held:,.1f} | {held_by_vllm:,.1f} "
        f"| {held / held_by_vllm:.2f} | {block_sizes} | {ours.padding_percent:.1f} % |"
    )


def has_local_layers(config: Mapping[str, Any]) -> bool:
    """Whether some layers see a window or a chunk alone."""
    windows = config.get("sliding_window") and config.get("use_sliding_window", True)
    return bool(windows or config.get("attention_chunk_size"))


def main() -> None:
    """Print the table."""
    print("| model | tokens | kvloom | vLLM | times | block sizes | padding |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for path in sorted(CONFIGS.glob("*.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        for max_model_len in LENGTHS:
            if has_local_layers(config) and max_model_len <= config["max_position_embeddings"]:
                print(row_of(path, max_model_len), flush=True)


if __name__ == "__main__":
    main()
