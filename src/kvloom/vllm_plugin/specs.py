"""KV cache specs in vLLM's words, and the configuration it plans from them in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as interface

from kvloom.errors import ConfigError
from kvloom.kv import spec as ours

# Blocks lie one after another, each with the pages of all layers of a group: then pages of
# different sizes need no padding.
LAYOUT = "BLHNC"

BlockIds = tuple[list[int], ...]  # one list per group


def to_vllm(spec: ours.KVCacheSpec, block_size: int) -> Any:
    """The spec of a layer that stores KV, with vLLM's size of a block.

    Raises:
        ConfigError: a kind that vLLM has no word for.
    """
    if type(spec) not in _TO_VLLM:
        raise ConfigError(f"kvloom's plugin has no word of vLLM's for {spec}; choose another model")
    return _TO_VLLM[type(spec)](spec, block_size)


def _dense(spec: ours.AttentionSpec, block_size: int) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.value_head_size,
        "dtype": getattr(torch, spec.dtype.value),
    }


def _full(spec: ours.FullAttentionSpec, block_size: int) -> Any:
    return interface.FullAttentionSpec(
        **_dense(spec, block_size),
        sliding_window=spec.sliding_window,
        attention_chunk_size=spec.attention_chunk_size,
    )


def _window(spec: ours.SlidingWindowSpec, block_size: int) -> Any:
    return interface.SlidingWindowSpec(
        **_dense(spec, block_size), sliding_window=spec.sliding_window
    )


def _chunked(spec: ours.ChunkedLocalAttentionSpec, block_size: int) -> Any:
    return interface.ChunkedLocalAttentionSpec(
        **_dense(spec, block_size), attention_chunk_size=spec.attention_chunk_size
    )


def _latent(spec: ours.MLAAttentionSpec, block_size: int) -> Any:
    return interface.MLAAttentionSpec(**(_dense(spec, block_size) | {"head_size_v": 0}))


_TO_VLLM: dict[type[ours.KVCacheSpec], Callable[[Any, int], Any]] = {
    ours.FullAttentionSpec: _full,
    ours.SlidingWindowSpec: _window,
    ours.ChunkedLocalAttentionSpec: _chunked,
    ours.MLAAttentionSpec: _latent,
}


@dataclass(frozen=True, slots=True)
class GroupMap:
    """Where the block table of each of our groups comes from.

    Attributes:
        sources: vLLM's group behind each of ours.
        is_identity: whether the two are the same.
    """

    sources: tuple[int, ...]
    is_identity: bool

    def block_ids(self, of_vllm: Sequence[list[int]] | None) -> BlockIds:
        """Block ids per group of ours; None is no news for any group."""
        if of_vllm is None:
            return tuple([] for _ in self.sources)
        if self.is_identity:
            return tuple(of_vllm)
        return tuple(of_vllm[source] for source in self.sources)


@dataclass(slots=True)
class _Group:
    """Layers of one of vLLM's groups that store alike: a group of ours."""

    source: int
    spec: ours.KVCacheSpec
    layers: list[str] = field(default_factory=list)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all its layers."""
        return len(self.layers) * self.spec.page_size_bytes


def from_vllm(
    config: Any, layers: Mapping[str, ours.KVCacheSpec]
) -> tuple[ours.KVCacheConfig, GroupMap]:
    """A KVCacheConfig of vLLM's in our words, and how to read its block ids.

    `layers` are the runner's own specs by name, those of sharing layers included.

    A group of vLLM's may hold layers that differ; each sort becomes a group of ours with the same
    block table. Groups of vLLM's overlay each other, so ours may only if they come from different
    ones: the n-th sorts of all groups lie in the n-th tensor.

    Raises:
        ConfigError: layers so different that they need more memory than vLLM planned.
    """
    sorts = [_sorts(i, group, layers) for i, group in enumerate(config.kv_cache_groups)]
    groups = [one for sorted_layers in sorts for one in sorted_layers]
    tensors = _tensors(sorts, config.num_blocks)
    planned_bytes = max((tensor.size for tensor in config.kv_cache_tensors), default=0)
    if sum(tensor.size for tensor in tensors) > planned_bytes:
        raise ConfigError(
            "the layers of this model differ too much to share vLLM's blocks; "
            "set disable_hybrid_kv_cache_manager"
        )
    translated = ours.KVCacheConfig(
        num_blocks=config.num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            ours.KVCacheGroupSpec(one.layers + _readers(one.layers, layers), one.spec)
            for one in groups
        ],
    )
    sources = tuple(one.source for one in groups)
    return translated, GroupMap(sources, sources == tuple(range(len(sorts))))


def _sorts(source: int, group: Any, layers: Mapping[str, ours.KVCacheSpec]) -> list[_Group]:
    """The layers of one of vLLM's groups by how they store, the largest pages first."""
    found: dict[ours.KVCacheSpec, _Group] = {}
    for name in group.layer_names:
        spec = _bound_spec(layers[name], group.kv_cache_spec)
        found.setdefault(spec, _Group(source, spec)).layers.append(name)
    return sorted(found.values(), key=lambda one: -one.block_bytes)


def _bound_spec(spec: ours.KVCacheSpec, planned: Any) -> ours.KVCacheSpec:
    """A layer's spec in the group it was planned into: with the group's block size and blocks.

    Where vLLM keeps all blocks of a layer that sees less, the layer still computes with its window.
    """
    if isinstance(planned, interface.UniformTypeKVCacheSpecs):
        planned = planned.first_spec
    spec = replace(spec, block_size=planned.block_size)
    if isinstance(planned, interface.FullAttentionSpec) and type(spec) in _KEPT:
        return _KEPT[type(spec)](spec)
    return spec


def _keep_all(spec: ours.AttentionSpec, **seen: int) -> ours.FullAttentionSpec:
    return ours.FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        head_size_v=spec.head_size_v,
        num_global_kv_heads=spec.num_global_kv_heads,
        **seen,
    )


_KEPT: dict[type[ours.KVCacheSpec], Callable[[Any], ours.KVCacheSpec]] = {
    ours.SlidingWindowSpec: lambda s: _keep_all(s, sliding_window=s.sliding_window),
    ours.ChunkedLocalAttentionSpec: lambda s: _keep_all(
        s, attention_chunk_size=s.attention_chunk_size
    ),
}


def _tensors(sorts: Sequence[Sequence[_Group]], num_blocks: int) -> list[ours.KVCacheTensor]:
    """One tensor per layer where there is one group, else one for the n-th sorts of all groups."""
    if len(sorts) == 1:
        return [
            ours.KVCacheTensor(num_blocks * one.spec.page_size_bytes, [name])
            for one in sorts[0]
            for name in one.layers
        ]
    tensors = []
    for n in range(max(map(len, sorts), default=0)):
        overlaid = [of_group[n] for of_group in sorts if n < len(of_group)]
        block_bytes = max(one.block_bytes for one in overlaid)
        names = [name for one in overlaid for name in one.layers]
        tensors.append(ours.KVCacheTensor(num_blocks * block_bytes, names))
    return tensors


def _readers(targets: Sequence[str], layers: Mapping[str, ours.KVCacheSpec]) -> list[str]:
    """The layers that read the KV of `targets`: vLLM does not know of them."""
    return [name for name, spec in layers.items() if spec.shared_target in targets]
