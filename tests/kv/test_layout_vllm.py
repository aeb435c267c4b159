"""`--layout vllm` against what vLLM itself planned, for every row of its reference plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from config_specs import layer_specs
from kvloom.dtypes import DType
from kvloom.errors import CapacityError
from kvloom.kv.layout_vllm import group_as_vllm
from kvloom.kv.planner import KVCachePlan, PlanRequest, make_kv_cache_spec, plan_kv_cache
from kvloom.kv.spec import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

DATA = Path(__file__).parents[1] / "data"
CONFIGS = {
    path.stem: json.loads(path.read_text()) for path in (DATA / "model_configs").glob("*.json")
}


class Row(NamedTuple):
    model: str
    num_ranks: int
    max_model_len: int
    memory_bytes: int
    num_blocks: int | None
    concurrency: float | None
    group_layers: list[int] | None


ROWS = [Row(*row) for row in json.loads((DATA / "vllm_plans.json").read_text())["rows"]]


def plan(row: Row, layout: str) -> KVCachePlan:
    layers = layer_specs(CONFIGS[row.model], row.num_ranks)
    specs = {layer.name: make_kv_cache_spec(layer, 16) for layer in layers}
    request = PlanRequest(row.max_model_len, 1 << 24, 2048, layout=layout)
    return plan_kv_cache(request, [specs] * row.num_ranks, [row.memory_bytes] * row.num_ranks)


def row_id(row: Row) -> str:
    return "-".join(map(str, row[:4]))


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_vllm_layout_equals_that_of_vllm(row):
    if row.num_blocks is None:
        with pytest.raises(CapacityError, match="largest length that fits"):
            plan(row, "vllm")
        return
    planned = plan(row, "vllm")
    storing = {layer.name for layer in layer_specs(CONFIGS[row.model]) if not layer.shares_kv_with}
    groups = planned.configs[0].kv_cache_groups
    assert [len(storing & set(group.layer_names)) for group in groups] == row.group_layers
    assert planned.num_blocks == row.num_blocks
    assert planned.max_concurrency == pytest.approx(row.concurrency, abs=6e-4)  # three decimals
    assert planned.num_reserved_blocks == 0


@pytest.mark.parametrize("row", [row for row in ROWS if row.num_blocks], ids=row_id)
def test_our_layout_holds_no_fewer(row):
    """vLLM counts its null block among those that hold requests."""
    planned = plan(row, "kvloom")
    at_least = row.concurrency * (row.num_blocks - 1) / row.num_blocks
    assert planned.max_concurrency >= at_least - 1e-3
    pool_bytes = planned.num_blocks * planned.block_bytes[0]
    assert pool_bytes <= row.memory_bytes


@pytest.mark.parametrize(
    ("model", "times"), [("gemma-3-270m", 2.4), ("gemma-3n-e4b-text", 2.2), ("gpt-oss-20b", 1.4)]
)
def test_short_windows_hold_many_more(model, times):
    (row,) = (r for r in ROWS if r[:4] == (model, 1, 4096, 40 << 30))
    assert plan(row, "kvloom").max_concurrency >= times * row.concurrency


def test_the_reference_has_plans_and_refusals():
    assert len(ROWS) == 166
    assert sum(row.num_blocks is None for row in ROWS) == 10


# Where the reference plans have no row: pages of several sizes.


def full(num_kv_heads: int, block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=64, dtype=DType.BFLOAT16
    )


def window(num_kv_heads: int, block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=64,
        dtype=DType.BFLOAT16,
        sliding_window=100,
    )


PAGE = 16 * 2 * 64 * 2  # of one head


def test_full_layers_of_several_sizes_are_one_group():
    layers: dict[str, KVCacheSpec] = {"a": full(1), "b": full(3)}
    layout = group_as_vllm(layers)
    assert layout.groups == [KVCacheGroupSpec(["a", "b"], full(1))]
    assert layout.block_bytes == 4 * PAGE
    planned = plan_kv_cache(PlanRequest(161, 161, 2048, layout="vllm"), [layers], [400 * PAGE])
    assert (planned.num_blocks, planned.num_blocks_per_request) == (100, 11)
    assert [t.size for t in planned.configs[0].kv_cache_tensors] == [100 * PAGE, 300 * PAGE]


def test_a_smaller_page_takes_more_tokens_if_they_fill_it():
    layout = group_as_vllm({"a": full(1), "b": window(2)})
    assert layout.groups == [
        KVCacheGroupSpec(["a"], full(1, block_size=32)),
        KVCacheGroupSpec(["b"], window(2)),
    ]
    assert layout.block_bytes == 2 * PAGE


def test_a_smaller_page_is_padded_if_they_do_not():
    layers: dict[str, KVCacheSpec] = {"a": full(2), "b": window(3), "c": window(3)}
    layout = group_as_vllm(layers)
    assert [group.layer_names for group in layout.groups] == [["a"], ["b"], ["c"]]
    assert layout.groups[0].kv_cache_spec == full(2)
    planned = plan_kv_cache(PlanRequest(161, 161, 2048, layout="vllm"), [layers], [300 * PAGE])
    assert planned.block_bytes == [3 * PAGE]
    assert planned.group_bytes == [[2 * PAGE, 3 * PAGE, 3 * PAGE]]


def test_latent_layers_that_do_not_fill_the_page_have_no_layout():
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=DType.BFLOAT16)
    assert group_as_vllm({"a": latent, "b": window(1)}) is None
