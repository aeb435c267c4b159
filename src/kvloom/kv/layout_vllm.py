"""vLLM's own layout of the same layers, for comparison: `kvloom plan --layout vllm`.

As vllm 0.32 has it (v1/core/kv_cache_utils.py): every group has equally many layers where it can,
a block weighs as much as the largest group, and a request is charged all it may hold in each group
with the largest chunk in flight. It counts the last token as stored and block 0 as usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVLimits,
    MLAAttentionSpec,
    SlidingWindowSpec,
    cdiv,
)

_BALANCED = 1.5  # largest / smallest number of layers up to which groups take the largest


@dataclass(frozen=True, slots=True)
class VLLMLayout:
    """Groups as vLLM makes them.

    Attributes:
        block_bytes: of the whole model.
        min_page_bytes: what every layer's page is padded to.
    """

    groups: list[KVCacheGroupSpec]
    block_bytes: int
    min_page_bytes: int = 0

    def requests_held(self, memory_bytes: int, limits: KVLimits) -> Fraction:
        """Requests of `limits.max_model_len` that it holds, block 0 not counted."""
        num_usable = memory_bytes // self.block_bytes - 1
        specs = [group.kv_cache_spec for group in self.groups]
        return Fraction(num_usable, sum(num_blocks_as_vllm(spec, limits) for spec in specs))


def group_as_vllm(layers: Mapping[str, KVCacheSpec]) -> VLLMLayout | None:
    """Groups of layers as vLLM makes them, of those that store KV; None for those it refuses."""
    specs = list(layers.values())
    if len({_uniform_key(spec) for spec in specs}) == 1:
        group = KVCacheGroupSpec(list(layers), specs[0])
        return VLLMLayout([group], sum(spec.page_size_bytes for spec in specs))
    page_bytes = max(spec.page_size_bytes for spec in specs)
    buckets: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        ratio, rest = divmod(page_bytes, spec.page_size_bytes)
        if rest and type(spec) is MLAAttentionSpec:
            return None
        # A block takes more tokens if they fill the page; else the page is padded.
        unified = spec if rest else replace(spec, block_size=spec.block_size * ratio)
        buckets.setdefault(unified, []).append(name)
    group_size = _group_size([len(names) for names in buckets.values()])
    groups = []
    for spec, names in buckets.items():
        num_groups = cdiv(len(names), group_size)
        groups += [KVCacheGroupSpec(names[i::num_groups], spec) for i in range(num_groups)]
    block_bytes = page_bytes * max(len(group.layer_names) for group in groups)
    return VLLMLayout(groups, block_bytes, page_bytes)


def num_blocks_as_vllm(spec: KVCacheSpec, limits: KVLimits) -> int:
    """Blocks that vLLM charges one request of `limits.max_model_len` in a group."""
    return _CHARGES[type(spec)](spec, limits)


def _uniform_key(spec: KVCacheSpec) -> tuple[object, ...]:
    """Layers of one key are one group, whatever their heads."""
    window = (getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None))
    kind = FullAttentionSpec if type(spec) is MLAAttentionSpec else type(spec)
    return (kind, spec.block_size, *window)


def _group_size(num_layers: Sequence[int]) -> int:
    """Layers of a group: the fewest of any kind, or the most if they are nearly as few."""
    fewest, most = min(num_layers), max(num_layers)
    return most if most < _BALANCED * fewest else fewest


def _charge_full(spec: Any, limits: KVLimits) -> int:
    return cdiv(limits.max_model_len, spec.block_size)


def _charge_window(spec: Any, limits: KVLimits) -> int:
    held = spec.sliding_window - 1 + limits.max_num_batched_tokens
    return cdiv(min(held, limits.max_model_len), spec.block_size) + 1


def _charge_chunk(spec: Any, limits: KVLimits) -> int:
    held = spec.attention_chunk_size + limits.max_num_batched_tokens
    return cdiv(min(held, limits.max_model_len), spec.block_size)


_CHARGES: dict[type[KVCacheSpec], Callable[[Any, KVLimits], int]] = {
    FullAttentionSpec: _charge_full,
    MLAAttentionSpec: _charge_full,
    SlidingWindowSpec: _charge_window,
    ChunkedLocalAttentionSpec: _charge_chunk,
}
