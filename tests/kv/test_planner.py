"""Plans and refusals of the planner: the issue's golden numbers and the shared cases."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.dtypes import DType
from kvloom.errors import CapacityError, ConfigError, ModelError, UnsupportedModelError
from kvloom.kv.memory import GIB, HostMemory, MemoryUse, cpu_budget
from kvloom.kv.planner import PlanRequest, get_kv_cache_configs, plan_kv_cache
from kvloom.kv.spec import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SharedKVSpec,
)


def full(num_kv_heads: int = 4, block_size: int = 16, head_size: int = 128) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=DType.BFLOAT16,
        num_global_kv_heads=8,
    )


def layers(num_layers: int, spec: KVCacheSpec | None = None) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}.self_attn": spec or full() for i in range(num_layers)}


def ask(max_model_len="auto", model_max_len=1 << 20, **rest) -> PlanRequest:
    return PlanRequest(max_model_len, model_max_len, 2048, **rest)


PAGE = 32_768  # of full(): 2 x 16 tokens x 4 heads x 128 values x 2 bytes


def test_golden_two_layers_on_two_ranks():
    configs = get_kv_cache_configs(ask(4096), [layers(2)] * 2, [GIB, GIB])
    assert len(configs) == 2
    for config in configs:
        assert config.num_blocks == 16_384
        assert config.kv_cache_tensors == [
            KVCacheTensor(536_870_912, ["layers.0.self_attn"]),
            KVCacheTensor(536_870_912, ["layers.1.self_attn"]),
        ]
        names = ["layers.0.self_attn", "layers.1.self_attn"]
        assert config.kv_cache_groups == [KVCacheGroupSpec(names, full())]
        assert config.kv_cache_groups[0].kv_cache_spec.num_kv_heads == 4
        assert config.kv_cache_groups[0].kv_cache_spec.total_num_kv_heads == 8


def test_the_numbers_of_a_plan():
    plan = plan_kv_cache(ask(1025), [layers(2)], [101 * 2 * PAGE + 5])
    assert plan.max_model_len == 1025
    assert plan.num_blocks == 101
    assert plan.num_blocks_per_request == 64  # 1,024 stored tokens
    assert plan.max_concurrency == 100 / 64
    assert plan.padding_percent == 0.0
    assert plan.kv_bytes_per_token == 2 * PAGE // 16
    assert plan.block_bytes == [2 * PAGE]
    assert plan.available_bytes == [101 * 2 * PAGE + 5]


def test_every_worker_gets_what_the_smallest_can_hold():
    memory = [50 * 2 * PAGE, 20 * 2 * PAGE, 30 * 2 * PAGE]
    configs = get_kv_cache_configs(ask(), [layers(2)] * 3, memory)
    assert [c.num_blocks for c in configs] == [20, 20, 20]
    assert all(t.size == 20 * PAGE for c in configs for t in c.kv_cache_tensors)


def test_workers_may_hold_different_layers():
    """As the stages of a pipeline do: one group, each worker with its own part of it."""
    first = {"a": full(), "b": full(), "c": full()}
    configs = get_kv_cache_configs(ask(), [first, {"d": full()}], [30 * PAGE, 30 * PAGE])
    assert [c.num_blocks for c in configs] == [10, 10]
    assert [g.layer_names for c in configs for g in c.kv_cache_groups] == [["a", "b", "c"], ["d"]]
    assert [t.shared_by for t in configs[1].kv_cache_tensors] == [["d"]]


def test_a_sharing_layer_aliases_the_tensor_of_its_target():
    specs = {
        "a": full(),
        "b": full(),
        "c": SharedKVSpec(block_size=16, target="a"),
        "d": SharedKVSpec(block_size=16, target="a"),
    }
    plan = plan_kv_cache(ask(), [specs], [10 * 2 * PAGE])
    (config,) = plan.configs
    assert config.num_blocks == 10  # a sharing layer takes no bytes
    assert [t.shared_by for t in config.kv_cache_tensors] == [["a", "c", "d"], ["b"]]
    assert [t.size for t in config.kv_cache_tensors] == [10 * PAGE, 10 * PAGE]
    assert config.kv_cache_groups == [KVCacheGroupSpec(["a", "b", "c", "d"], full())]


@pytest.mark.parametrize(
    ("target", "order"),
    [("b", ["a", "c", "b"]), ("missing", ["a", "c"]), ("c", ["a", "c"]), ("d", ["a", "d", "c"])],
)
def test_a_sharing_layer_needs_an_earlier_layer_that_stores(target, order):
    sharing = SharedKVSpec(block_size=16, target=target)
    kinds = {"a": full(), "b": full(), "c": sharing, "d": SharedKVSpec(block_size=16, target="a")}
    with pytest.raises(ModelError, match=f"layer c shares the KV of {target}"):
        plan_kv_cache(ask(), [{name: kinds[name] for name in order}], [GIB])


# Case 2 of the shared cases: the boundary, and the length that the refusal suggests.


def suggested_length(message: str) -> int:
    return int(re.search(r"largest length that fits is (\d+)", message)[1])


@pytest.mark.parametrize("as_memory", [True, False])
def test_boundary_of_64_blocks(as_memory):
    """A pool of 64 blocks has 63 usable ones: 1,008 stored tokens and the last token."""
    memory = 64 * 2 * PAGE if as_memory else GIB
    blocks = None if as_memory else 64
    with pytest.raises(CapacityError) as refusal:
        plan_kv_cache(ask(16 * 63 + 32, num_blocks=blocks), [layers(2)], [memory])
    length = suggested_length(str(refusal.value))
    assert length == 1009
    plan = plan_kv_cache(ask(length, num_blocks=blocks), [layers(2)], [memory])
    assert (plan.max_model_len, plan.num_blocks, plan.max_concurrency) == (1009, 64, 1.0)
    for more in (1, 17):
        with pytest.raises(CapacityError):
            plan_kv_cache(ask(length + more, num_blocks=blocks), [layers(2)], [memory])


@settings(max_examples=200)
@given(
    block_size=st.sampled_from([1, 2, 16, 256]),
    num_blocks=st.integers(2, 300),
    excess=st.integers(1, 1000),
    num_workers=st.integers(1, 3),
)
def test_the_suggested_length_works_and_one_token_more_does_not(
    block_size, num_blocks, excess, num_workers
):
    specs = [layers(3, full(block_size=block_size))] * num_workers
    memory = [specs[0]["layers.0.self_attn"].page_size_bytes * 3 * num_blocks] * num_workers
    too_long = (num_blocks - 1) * block_size + 1 + excess
    with pytest.raises(CapacityError) as refusal:
        plan_kv_cache(ask(too_long), specs, memory)
    length = suggested_length(str(refusal.value))
    assert plan_kv_cache(ask(length), specs, memory).max_model_len == length
    with pytest.raises(CapacityError):
        plan_kv_cache(ask(length + 1), specs, memory)
    assert plan_kv_cache(ask("auto"), specs, memory).max_model_len == length


def test_auto_is_the_models_limit_where_that_fits():
    plan = plan_kv_cache(ask("auto", model_max_len=500), [layers(2)], [GIB])
    assert plan.max_model_len == 500


def test_a_length_beyond_the_model_is_refused():
    assert plan_kv_cache(ask(500, model_max_len=500), [layers(2)], [GIB]).max_model_len == 500
    with pytest.raises(ConfigError, match=r"max_model_len is 501.*at most 500"):
        plan_kv_cache(ask(501, model_max_len=500), [layers(2)], [GIB])


def test_a_refusal_has_the_arithmetic():
    use = MemoryUse(weights_bytes=3 * GIB, activation_bytes=GIB // 2)
    budget = cpu_budget(HostMemory(8 * GIB, 5 * GIB), 0.5, use)
    specs = [layers(32, full(num_kv_heads=8))]
    with pytest.raises(CapacityError) as refusal:
        plan_kv_cache(ask(4200, budgets=(budget,)), specs, [budget.kv_bytes])
    message = str(refusal.value)
    for fact in (
        "max_model_len 4200",
        "needs 264 blocks of KV (263 blocks and block 0",  # of 2 MiB
        "worker 0 has 256 of 2.00 MiB each, from 512.00 MiB for KV",
        "- weights: 3.00 GiB",
        "- peak activation: 512.00 MiB",
        "the largest length that fits is 4081",
    ):
        assert fact in message


@pytest.mark.parametrize("available", [0, -GIB])
def test_no_memory_is_refused_with_the_arithmetic(available):
    use = MemoryUse(weights_bytes=3 * GIB, activation_bytes=-available)
    budget = cpu_budget(HostMemory(6 * GIB, 4 * GIB), 0.5, use)
    assert budget.kv_bytes == available
    with pytest.raises(CapacityError, match=r"worker 1 has no memory.*- weights: 3\.00 GiB"):
        plan_kv_cache(ask(budgets=(budget, budget)), [layers(2)] * 2, [GIB, available])


@pytest.mark.parametrize(
    ("request_", "memory"),
    [(ask(), 0), (ask(1 << 20), GIB), (ask(num_blocks=1 << 20), GIB)],
    ids=["no memory", "too long", "too many"],
)
def test_the_remedy_is_that_of_whoever_asks(request_, memory):
    for asked, remedy in (
        (request_, "memory_share"),
        (replace(request_, remedy="buy a bigger one"), "buy a bigger one"),
    ):
        with pytest.raises(CapacityError, match=remedy):
            plan_kv_cache(asked, [layers(2)], [memory])


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_without_usable_blocks_holds_no_length(num_blocks):
    for length in (2, "auto"):
        with pytest.raises(CapacityError, match="no length fits"):
            plan_kv_cache(ask(length), [layers(2)], [num_blocks * 2 * PAGE + 7])


def test_the_smallest_pool_holds_the_shortest_request():
    plan = plan_kv_cache(ask(2), [layers(1, full(block_size=1))], [2 * PAGE // 16])
    assert (plan.num_blocks, plan.max_concurrency) == (2, 1.0)


def test_num_blocks_replaces_what_memory_allows_but_cannot_exceed_it():
    memory = [100 * 2 * PAGE]
    assert plan_kv_cache(ask(100, num_blocks=100), [layers(2)], memory).num_blocks == 100
    assert plan_kv_cache(ask(100, num_blocks=10), [layers(2)], memory).num_blocks == 10
    with pytest.raises(CapacityError, match="at most 100"):
        plan_kv_cache(ask(100, num_blocks=101), [layers(2)], memory)


def test_a_layer_that_differs_between_workers_is_refused():
    other = {**layers(2), "layers.1.self_attn": full(num_kv_heads=2)}
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn is .* but .* on worker 1"):
        plan_kv_cache(ask(), [layers(2), other], [GIB, GIB])


@pytest.mark.parametrize("specs", [[{}], [layers(2), {}]])
def test_a_worker_without_layers_is_refused(specs):
    with pytest.raises(ModelError, match="no attention layers"):
        plan_kv_cache(ask(), specs, [GIB] * len(specs))


def test_a_kind_without_policy_is_refused():
    class UnknownSpec(FullAttentionSpec):
        """Of a kind that has no policy."""

    unknown = UnknownSpec(block_size=16, num_kv_heads=4, head_size=128, dtype=DType.BFLOAT16)
    with pytest.raises(UnsupportedModelError, match=r"layer b needs UnknownSpec"):
        plan_kv_cache(ask(), [{"a": full(), "b": unknown}], [GIB])
