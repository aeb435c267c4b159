"""Attention of a fused tape as instructions of the native library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from kvloom.kv.spec import MLAAttentionSpec
from kvloom.ops.backend import StepSizes
from kvloom.ops.base import Attention, KVLayer
from kvloom.ops.native_tables import Array, PositionTables, weight_or_ones
from kvloom.ops.rewrites_attention import HeadForms, HeadNorm
from kvloom.ops.tape import Tape, TapeValue

_LOG2_E = math.log2(math.e)  # kernels exponentiate to base 2: scores are multiplied by it


class AttentionLowering:
    """Adds the attention operations of a tape to a program.

    Layers of one KV cache group with equal heads and masks share what is planned per step.
    """

    def __init__(
        self, library: ModuleType, program: Any, tape: Tape, tables: PositionTables
    ) -> None:
        """Name the groups to the program, in their order."""
        self._library = library
        self._program = program
        self._tables = tables
        self._groups: dict[tuple[Any, ...], int] = {}
        layers = [(kv, q.shape[0]) for kv, q, *_ in _stores(tape)]
        for kv, num_heads in sorted(layers, key=lambda layer: layer[0].group):
            self._group(kv, num_heads)

    def store(
        self,
        layer: tuple[KVLayer, int],
        heads: tuple[TapeValue, TapeValue | None, TapeValue | None],
        forms: HeadForms,
        columns: Callable[[TapeValue], Any],
    ) -> None:
        """Queries, keys and values into the form and place that attention reads.

        Args:
            layer: and the slot of its queries.
            heads: queries, keys and values.
            forms: what is done to them.
            columns: where a value lies.
        """
        kv, q_slot = layer
        q, k, v = (None if value is None else columns(value) for value in heads)
        group, memory = self._group(kv, heads[0].shape[0]), self._memory(kv)
        self._program.store_qkv(group, memory, self._arrays(heads, forms), q, k, v, q_slot)

    def attend(
        self, kv: KVLayer, q: TapeValue, scoring: Attention, places: tuple[int, Any]
    ) -> None:
        """Attention of queries over the stored blocks; `places` has their slot, and the result."""
        q_slot, out = places
        group, memory = self._group(kv, q.shape[0]), self._memory(kv)
        soft_cap = (scoring.soft_cap or 0.0) * _LOG2_E
        sinks = None if scoring.sinks is None else scoring.sinks.value * np.float32(_LOG2_E)
        self._program.attend(group, memory, q_slot, out, soft_cap, sinks)

    def _arrays(
        self, heads: tuple[TapeValue, TapeValue | None, TapeValue | None], forms: HeadForms
    ) -> Any:
        norms = (forms.q_norm, forms.k_norm, forms.v_norm)
        q_norm, k_norm, v_norm = map(_norm_weight, norms, heads)
        rope, position_scale = forms.rope, forms.position_scale
        scales = None if position_scale is None else self._tables.scales(position_scale)
        return self._library.QueryKeyArrays(
            rotations=None if rope is None else self._tables.rotations(rope),
            is_interleaved=rope is not None and rope.is_interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            norm_eps=next((norm.eps for norm in norms if norm is not None), 0.0),
            norms_follow_rope=forms.norms_follow_rope,
            q_scale=forms.scale * _LOG2_E,
            position_scales=scales,
        )

    def _memory(self, kv: KVLayer) -> Any:
        storage = kv.storage
        return self._library.LayerMemory(storage.raw, storage.num_blocks, storage.offset_bytes)

    def _group(self, kv: KVLayer, num_heads: int) -> int:
        spec: Any = kv.spec
        window = getattr(spec, "sliding_window", None) or 0
        chunk = getattr(spec, "attention_chunk_size", None) or 0
        sizes = (spec.num_kv_heads, spec.head_size, spec.value_head_size)
        key = (kv.group, *sizes, window, chunk, num_heads)
        if key not in self._groups:
            shape = self._library.GroupShape(
                kv_format=spec.dtype.value,
                block_size=spec.block_size,
                num_heads=num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                head_size_v=spec.value_head_size,
                window=window,
                chunk=chunk,
                is_latent=isinstance(spec, MLAAttentionSpec),
            )
            self._groups[key] = self._program.attention_group(
                kv.group, shape, kv.storage.num_blocks
            )
        return self._groups[key]


def attention_bytes(library: ModuleType, tape: Tape, sizes: StepSizes, num_threads: int) -> int:
    """What attention needs for a step beside queries and results, whatever KV is stored as."""
    shapes = {
        (q.shape, k.shape, k.shape if v is None else v.shape, v is None)
        for _, q, k, v in _stores(tape)
        if k is not None  # who shares KV shares this as well
    }
    total = 0
    for (num_heads, head_size), (num_kv_heads, _), (_, head_size_v), is_latent in shapes:
        shape = library.GroupShape(
            kv_format="float32",
            block_size=sizes.block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            window=0,
            chunk=0,
            is_latent=is_latent,
        )
        total += library.attention_bytes(shape, sizes.max_model_len, num_threads)
    return total


def _stores(
    tape: Tape,
) -> Iterator[tuple[KVLayer, TapeValue, TapeValue | None, TapeValue | None]]:
    """The layer, queries, keys and values of each store."""
    for operation in tape.operations:
        if operation.name == "store_qkv":
            kv, q, k, v, _positions, _forms = operation.arguments
            yield kv, q, k, v


def _norm_weight(norm: HeadNorm | None, value: TapeValue | None) -> Array | None:
    if norm is None or value is None:
        return None
    return weight_or_ones(norm.weight, value.shape[-1])
