"""KV cache specs become vLLM's, and what vLLM plans becomes ours; numbers are worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface

from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.kv import spec as ours
from kvloom.kv.spec import KVCacheTensor
from kvloom.vllm_plugin.specs import from_vllm, to_vllm

NUM_BLOCKS = 10


def full(head_size: int = 64, **given: Any) -> ours.FullAttentionSpec:
    return ours.FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": head_size, "dtype": DType.BFLOAT16}
        | given
    )


def window(size: int = 512, head_size: int = 64) -> ours.SlidingWindowSpec:
    return ours.SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=head_size, dtype=DType.BFLOAT16,
        sliding_window=size,
    )  # fmt: skip


def config(block_bytes: int, *groups: tuple[list[str], Any]) -> Any:
    """A KVCacheConfig of vLLM's."""
    tensor = interface.KVCacheTensor(NUM_BLOCKS * block_bytes, [], 0, block_bytes)
    return interface.KVCacheConfig(
        NUM_BLOCKS, [tensor], [interface.KVCacheGroupSpec(names, spec) for names, spec in groups]
    )


LATENT = ours.MLAAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=576, head_size_v=512, dtype=DType.BFLOAT16
)
CHUNKED = ours.ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=128, dtype=DType.FLOAT32, attention_chunk_size=8192
)


@pytest.mark.parametrize(
    ("spec", "kind", "page_bytes"),
    [
        (full(), "FullAttentionSpec", 32 * 2 * (64 + 64) * 2),
        (full(head_size_v=32), "FullAttentionSpec", 32 * 2 * (64 + 32) * 2),
        (window(), "SlidingWindowSpec", 32 * 2 * (64 + 64) * 2),
        (CHUNKED, "ChunkedLocalAttentionSpec", 32 * 1 * (128 + 128) * 4),
        (LATENT, "MLAAttentionSpec", 32 * 576 * 2),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_spec_keeps_its_kind_and_bytes(spec: Any, kind: str, page_bytes: int) -> None:
    found = to_vllm(spec, 32)
    assert type(found).__name__ == kind
    assert found.block_size == 32
    assert found.page_size_bytes == page_bytes
    assert found.dtype == getattr(torch, spec.dtype.value)
    for bound in ("sliding_window", "attention_chunk_size"):
        assert getattr(found, bound, None) == getattr(spec, bound, None)


def test_a_kind_without_a_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="word"):
        to_vllm(ours.SharedKVSpec(block_size=16, target="a"), 16)


def test_one_group_has_a_tensor_per_layer() -> None:
    layers = {"a": full(), "b": full(), "c": ours.SharedKVSpec(block_size=16, target="b")}
    page = 16 * 2 * 128 * 2
    found, groups = from_vllm(config(2 * page, (["a", "b"], to_vllm(full(), 16))), layers)
    assert found.num_blocks == NUM_BLOCKS
    sizes = [KVCacheTensor(NUM_BLOCKS * page, [name]) for name in "ab"]
    assert found.kv_cache_tensors == sizes
    assert found.kv_cache_groups == [ours.KVCacheGroupSpec(["a", "b", "c"], full())]
    assert groups.block_ids([[1, 2]]) == ([1, 2],)
    assert groups.block_ids(None) == ([],)


def test_groups_overlay_each_other_in_one_tensor() -> None:
    layers = {"f": full(), "w1": window(), "w2": window(), "w3": window()}
    page = 16 * 2 * 128 * 2
    planned = config(
        2 * page,
        (["f"], to_vllm(full(), 32)),  # as many bytes as two layers of 16 tokens
        (["w1", "w2"], to_vllm(window(), 16)),
        (["w3"], to_vllm(window(), 32)),
    )
    found, groups = from_vllm(planned, layers)
    assert found.kv_cache_tensors == [KVCacheTensor(NUM_BLOCKS * 2 * page, ["f", "w1", "w2", "w3"])]
    sizes = [group.kv_cache_spec.block_size for group in found.kv_cache_groups]
    assert sizes == [32, 16, 32]
    assert groups.block_ids([[1], [2, 3], [4]]) == ([1], [2, 3], [4])


def test_layers_that_differ_share_a_table_but_no_bytes() -> None:
    """vLLM keeps all blocks of a window's layer in a full group; it still computes its window."""
    layers = {"f": full(), "w": window(512), "g": full(head_size=128)}
    page = 16 * 2 * 128 * 2
    specs = {"f": to_vllm(full(), 16), "g": to_vllm(full(head_size=128), 16)}
    specs["w"] = to_vllm(full(sliding_window=512), 16)
    uniform = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    found, groups = from_vllm(config(4 * page, (["f", "w", "g"], uniform)), layers)
    assert [group.layer_names for group in found.kv_cache_groups] == [["g"], ["f"], ["w"]]
    assert found.kv_cache_groups[2].kv_cache_spec == full(sliding_window=512)
    assert [(t.size // page // NUM_BLOCKS, t.shared_by) for t in found.kv_cache_tensors] == [
        (2, ["g"]),
        (1, ["f"]),
        (1, ["w"]),
    ]
    ids = [7, 8]
    assert groups.block_ids([ids]) == (ids, ids, ids)


def test_what_does_not_fit_the_planned_bytes_is_refused() -> None:
    layers = {"f": full(), "w": window()}
    page = 16 * 2 * 128 * 2
    planned = config(page, (["f", "w"], to_vllm(full(), 16)))
    with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager"):
        from_vllm(planned, layers)


def test_every_spec_of_ours_is_registered_with_vllm() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    register_all_kvcache_specs(SimpleNamespace())
    for spec in (full(), window(), CHUNKED, LATENT):
        assert KVCacheSpecRegistry.get_uniform_type_base_spec(to_vllm(spec, 16)) is not None
