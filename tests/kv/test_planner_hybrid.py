"""Plans of layers that differ: groups, one tensor for all of them, the reserve, the arithmetic."""

from __future__ import annotations

import re

import pytest

from kvloom.dtypes import DType
from kvloom.errors import CapacityError, ModelError
from kvloom.kv.planner import PlanRequest, make_kv_cache_specs, plan_kv_cache
from kvloom.kv.sizing import GroupCost
from kvloom.kv.spec import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVSpec,
    LayerSpec,
    SharedKVSpec,
    SlidingWindowSpec,
)

PAGE = 16 * 2 * 8 * 2  # bytes of 16 tokens of one head of 8 values
SIZES = {"head_size": 8, "dtype": DType.BFLOAT16}


def full(num_kv_heads: int = 1, block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, **SIZES)


def window(
    num_kv_heads: int = 1, block_size: int = 16, sliding_window: int = 100
) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, sliding_window=sliding_window, **SIZES
    )


def ask(max_model_len, budget: int = 64, model_max_len: int = 1 << 20, **rest) -> PlanRequest:
    return PlanRequest(max_model_len, model_max_len, budget, **rest)


def gemma_like(num_full: int = 2, num_windows: int = 4) -> dict[str, KVCacheSpec]:
    """Two window layers before each full one."""
    every = num_windows // num_full + 1
    kinds = (full() if i % every == every - 1 else window() for i in range(num_full + num_windows))
    return {f"layers.{i}": spec for i, spec in enumerate(kinds)}


def test_the_numbers_of_a_hybrid_plan():
    """2 full layers x 32 tokens fill what 4 window layers x 16 tokens do.

    1,024 stored tokens are 32 blocks of 32. The window of 100 touches at most
    cdiv(99, 16) + 1 = 8 blocks of 16, and 12 with a chunk of 64 in flight: cdiv(99 + 63, 16) + 1.
    """
    plan = plan_kv_cache(ask(1025), [gemma_like()], [1005 * 4 * PAGE + 7])
    (config,) = plan.configs
    assert config.kv_cache_groups == [
        KVCacheGroupSpec(["layers.0", "layers.1", "layers.3", "layers.4"], window()),
        KVCacheGroupSpec(["layers.2", "layers.5"], full(block_size=32)),
    ]
    assert config.kv_cache_tensors == [KVCacheTensor(1005 * 4 * PAGE, list(gemma_like()))]
    assert config.num_blocks == plan.num_blocks == 1005
    assert plan.block_bytes == [4 * PAGE]
    assert plan.group_bytes == [[4 * PAGE, 4 * PAGE]]
    assert plan.group_costs == [GroupCost(8, 4), GroupCost(32, 0)]
    assert (plan.num_blocks_per_request, plan.num_reserved_blocks) == (40, 4)
    assert plan.max_concurrency == (1005 - 1 - 4) / 40
    assert plan.padding_percent == 0.0
    assert plan.kv_bytes_per_token == 6 * PAGE // 16


def test_padding_is_the_part_of_a_request_that_no_layer_fills():
    """3 heads x 32 tokens are 6 pages, of which 2 window layers of 2 heads fill 4."""
    specs = {"a": full(3), "b": window(2), "c": window(2)}
    plan = plan_kv_cache(ask(1025), [specs], [1000 * 6 * PAGE])
    (config,) = plan.configs
    assert config.kv_cache_groups == [
        KVCacheGroupSpec(["a"], full(3, block_size=32)),
        KVCacheGroupSpec(["b", "c"], window(2)),
    ]
    assert plan.block_bytes == [6 * PAGE]
    assert plan.group_bytes == [[6 * PAGE, 4 * PAGE]]
    assert plan.group_costs == [GroupCost(32, 0), GroupCost(8, 4)]
    assert plan.padding_percent == pytest.approx(100 * (8 * 2) / (40 * 6))


def test_sharing_layers_join_the_group_of_their_target():
    specs = gemma_like() | {
        "layers.6": SharedKVSpec(block_size=16, target="layers.4"),
        "layers.7": SharedKVSpec(block_size=16, target="layers.5"),
    }
    plan = plan_kv_cache(ask(1025), [specs], [1005 * 4 * PAGE])
    (config,) = plan.configs
    names = [group.layer_names for group in config.kv_cache_groups]
    assert names == [
        ["layers.0", "layers.1", "layers.3", "layers.4", "layers.6"],
        ["layers.2", "layers.5", "layers.7"],
    ]
    assert config.kv_cache_tensors == [KVCacheTensor(1005 * 4 * PAGE, list(specs))]
    assert plan.group_bytes == [[4 * PAGE, 4 * PAGE]]
    assert plan.kv_bytes_per_token == 6 * PAGE // 16


def test_window_layers_alone_are_one_group_of_a_tensor_each():
    specs: dict[str, KVCacheSpec] = {"a": window(), "b": window()}
    plan = plan_kv_cache(ask(1025), [specs], [100 * 2 * PAGE])
    (config,) = plan.configs
    assert config.kv_cache_groups == [KVCacheGroupSpec(["a", "b"], window())]
    assert config.kv_cache_tensors == [
        KVCacheTensor(100 * PAGE, ["a"]),
        KVCacheTensor(100 * PAGE, ["b"]),
    ]
    assert plan.max_concurrency == (100 - 1 - 4) / 8


def test_ranks_have_the_same_groups():
    plan = plan_kv_cache(ask(1025), [gemma_like()] * 2, [900 * 4 * PAGE, 800 * 4 * PAGE])
    first, second = plan.configs
    assert first == second
    assert plan.num_blocks == 800


def test_stages_of_a_pipeline_have_parts_of_the_same_groups():
    layers = gemma_like(num_full=4, num_windows=8)
    names = list(layers)
    stages = [{n: layers[n] for n in names[:6]}, {n: layers[n] for n in names[6:]}]
    plan = plan_kv_cache(ask(1025), stages, [1000 * 4 * PAGE] * 2)
    first, second = plan.configs
    assert len(first.kv_cache_groups) == len(second.kv_cache_groups)
    for ours, theirs in zip(first.kv_cache_groups, second.kv_cache_groups, strict=True):
        assert ours.kv_cache_spec == theirs.kv_cache_spec
        assert len(ours.layer_names) == len(theirs.layer_names)  # dealt evenly
    assert plan.num_blocks == 1000
    assert first.kv_cache_tensors == [KVCacheTensor(1000 * 4 * PAGE, names[:6])]
    assert second.kv_cache_tensors == [KVCacheTensor(1000 * 4 * PAGE, names[6:])]


@pytest.mark.parametrize("num_blocks", [None, 30, 64])
def test_the_suggested_length_works_and_one_token_more_does_not(num_blocks):
    specs, memory = [gemma_like()], [(50 if num_blocks is None else 500) * 4 * PAGE + 1]
    with pytest.raises(CapacityError) as refusal:
        plan_kv_cache(ask(1 << 20, num_blocks=num_blocks), specs, memory)
    length = int(re.search(r"largest length that fits is (\d+)", str(refusal.value))[1])
    plan = plan_kv_cache(ask(length, num_blocks=num_blocks), specs, memory)
    assert plan.max_model_len == length
    assert plan.max_concurrency >= 1
    assert plan_kv_cache(ask("auto", num_blocks=num_blocks), specs, memory).max_model_len == length
    with pytest.raises(CapacityError, match="block 0"):
        plan_kv_cache(ask(length + 1, num_blocks=num_blocks), specs, memory)


def test_a_refusal_names_the_blocks_of_chunks():
    message = r"needs 45 blocks of KV \(40 blocks, 4 for chunks and block 0, which is reserved\)"
    specs, memory = [gemma_like()], [500 * 4 * PAGE]
    ask_44 = ask(1025, model_max_len=1025, num_blocks=44)
    with pytest.raises(CapacityError, match=message):
        plan_kv_cache(ask_44, specs, memory)
    planned = plan_kv_cache(ask(1025, model_max_len=1025, num_blocks=45), specs, memory)
    assert planned.max_concurrency == 1.0


def layer(name: str, shares_kv_with: str | None = None, **rest) -> LayerSpec:
    return LayerSpec(name, 1, 8, DType.BFLOAT16, shares_kv_with=shares_kv_with, **rest)


def test_a_layer_shares_the_kv_of_one_like_itself():
    near, far = {"sliding_window_size": 100}, {"sliding_window_size": 50}
    layers = [layer("a"), layer("b", **near), layer("c", "a"), layer("d", "b", **near)]
    specs = make_kv_cache_specs(KVSpec(layers), 16)
    assert specs == {
        "a": full(),
        "b": window(),
        "c": SharedKVSpec(block_size=16, target="a"),
        "d": SharedKVSpec(block_size=16, target="b"),
    }
    for wrong in (layer("c", "b"), layer("c", "a", **near), layer("c", "b", **far)):
        with pytest.raises(ModelError, match="layer c shares the KV of"):
            make_kv_cache_specs(KVSpec([*layers[:2], wrong]), 16)
    heads = LayerSpec("c", 2, 8, DType.BFLOAT16, shares_kv_with="a")
    with pytest.raises(ModelError, match="differs from it in kind or size"):
        make_kv_cache_specs(KVSpec([*layers[:2], heads]), 16)
