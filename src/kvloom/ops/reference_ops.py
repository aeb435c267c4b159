"""The vocabulary in numpy and float32: the specification that every kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvloom.ops.base import (
    Activation,
    Attention,
    Batch,
    Communicator,
    Experts,
    KVLayer,
    Parameter,
    PositionScale,
    Rope,
    Routing,
)
from kvloom.ops.reference_attention import ReferenceStorage, attend, store
from kvloom.ops.reference_experts import activate, activate_gated, route, run_experts

Array = npt.NDArray[np.float32]

# NaN and infinity pass through: whoever samples the request they end in reports them.
_passes_non_finite = np.errstate(over="ignore", invalid="ignore", divide="ignore")


class ReferenceOps:
    """One step's operations, computed as they are called."""

    def __init__(self, batch: Batch, communicator: Communicator) -> None:
        self._batch = batch
        self._communicator = communicator
        # Layers rotate by the same angles: rope -> cos, sin [num_tokens, 1, num_pairs].
        self._rotations: dict[Rope, tuple[Array, Array]] = {}

    # --- linear maps ------------------------------------------------------------------------

    def embedding(
        self, token_ids: npt.NDArray[np.int64], table: Parameter, first_row: int = 0
    ) -> Array:
        """[num_tokens, hidden_size]; ids outside this rank's rows [first_row, ...) give zeros."""
        rows = token_ids - first_row
        is_here = (rows >= 0) & (rows < table.shape[0])
        x: Array = table.value[np.where(is_here, rows, 0)]
        x[~is_here] = 0.0
        return x

    @_passes_non_finite
    def linear(self, x: Array, weight: Parameter, bias: Parameter | None = None) -> Array:
        """X @ weight.T + bias: [num_tokens, in] and [out, in] -> [num_tokens, out]."""
        y: Array = x @ weight.value.T
        return y if bias is None else y + bias.value

    @_passes_non_finite
    def head_linear(self, x: Array, weight: Parameter) -> Array:
        """A matrix per head: [num_tokens, num_heads, in] and [num_heads, out, in] -> [..., out]."""
        y: Array = x.transpose(1, 0, 2) @ weight.value.transpose(0, 2, 1)
        return y.transpose(1, 0, 2)

    # --- norms and element-wise -------------------------------------------------------------

    @_passes_non_finite
    def rms_norm(self, x: Array, weight: Parameter | None, eps: float) -> Array:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis; None weighs by 1."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        y: Array = x / np.sqrt(mean_square + np.float32(eps))
        return y if weight is None else y * weight.value

    @_passes_non_finite
    def layer_norm(self, x: Array, weight: Parameter, eps: float) -> Array:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight over the last axis."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        y: Array = centred / np.sqrt(variance + np.float32(eps)) * weight.value
        return y

    @_passes_non_finite
    def add(self, a: Array, b: Array) -> Array:
        """Element-wise sum."""
        return a + b

    @_passes_non_finite
    def multiply(self, a: Array, b: Array) -> Array:
        """Element-wise product of equal shapes, or b has one value per row of a: [..., 1]."""
        return a * b

    @_passes_non_finite
    def multiply_columns(self, x: Array, weight: Parameter) -> Array:
        """X * weight: [num_tokens, size] and [size], or [1] for all columns."""
        y: Array = x * weight.value
        return y

    @_passes_non_finite
    def scale(self, x: Array, factor: float) -> Array:
        """X * factor."""
        return x * np.float32(factor)

    @_passes_non_finite
    def soft_cap(self, x: Array, cap: float) -> Array:
        """Cap * tanh(x / cap)."""
        y: Array = np.float32(cap) * np.tanh(x / np.float32(cap))
        return y

    @_passes_non_finite
    def activation(self, x: Array, activation: Activation | Literal["tanh"]) -> Array:
        """The activation of every value of x."""
        return activate(x, activation)

    @_passes_non_finite
    def gated_activation(self, x: Array, activation: Activation) -> Array:
        """activation(gate) * up, where x is [num_tokens, 2 x size] = gate and up side by side."""
        return activate_gated(x, activation)

    @_passes_non_finite
    def gaussian_top(self, x: Array, num_deviations: float) -> Array:
        """max(x - (mean(x) + num_deviations * deviation(x)), 0) over the last axis."""
        mean, deviation = x.mean(axis=-1, keepdims=True), x.std(axis=-1, keepdims=True)
        y: Array = np.maximum(x - (mean + np.float32(num_deviations) * deviation), 0)
        return y

    @_passes_non_finite
    def match_rms(self, x: Array, target: Array, floor: float) -> Array:
        """X * rms(target) / max(rms(x), floor), rms(x) = sqrt(mean(x^2)) over the last axis."""
        own = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
        wanted = np.sqrt(np.mean(target * target, axis=-1, keepdims=True))
        y: Array = x * wanted / np.maximum(own, np.float32(floor))
        return y

    # --- shapes -----------------------------------------------------------------------------

    def split(self, x: Array, sizes: tuple[int, ...]) -> tuple[Array, ...]:
        """Columns of [..., sum(sizes)], one value [..., size] per size."""
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))

    def concat(self, values: Sequence[Array]) -> Array:
        """Values side by side along the last axis."""
        return np.concatenate(values, axis=-1)

    def split_heads(
        self, x: Array, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[Array, Array, Array]:
        """[num_tokens, (num_heads + 2 x num_kv_heads) x head_size] -> q, k, v."""
        heads = x.reshape(len(x), num_heads + 2 * num_kv_heads, head_size)
        first_v = num_heads + num_kv_heads
        return heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:]

    def heads(self, x: Array, num_heads: int) -> Array:
        """[num_tokens, num_heads x size] -> [num_tokens, num_heads, size]."""
        return x.reshape(len(x), num_heads, x.shape[1] // num_heads)

    def merge_heads(self, x: Array) -> Array:
        """[num_tokens, num_heads, size] -> [num_tokens, num_heads x size]."""
        return x.reshape(len(x), x.shape[1] * x.shape[2])

    def select_rows(self, x: Array, rows: npt.NDArray[np.int64]) -> Array:
        """[len(rows), ...]: the named rows of x."""
        selected: Array = x[rows]
        return selected

    # --- positions and attention ------------------------------------------------------------

    def rope(
        self, q: Array, k: Array, positions: npt.NDArray[np.int64], rope: Rope
    ) -> tuple[Array, Array]:
        """Rotate q and k by their positions."""
        return self.rotate(q, positions, rope), self.rotate(k, positions, rope)

    @_passes_non_finite
    def rotate(self, x: Array, positions: npt.NDArray[np.int64], rope: Rope) -> Array:
        """Rotate the heads of x [num_tokens, num_heads, head_size] by their positions."""
        if rope not in self._rotations:
            angles = np.outer(positions, np.asarray(rope.inv_freq))[:, None, :]
            self._rotations[rope] = (
                (np.cos(angles) * rope.attention_factor).astype(np.float32),
                (np.sin(angles) * rope.attention_factor).astype(np.float32),
            )
        cos, sin = self._rotations[rope]
        num_pairs = len(rope.inv_freq)
        firsts, seconds = slice(num_pairs), slice(num_pairs, 2 * num_pairs)
        if rope.is_interleaved:
            firsts, seconds = slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
        a, b = x[..., firsts], x[..., seconds]
        rotated = x.copy()
        rotated[..., firsts] = a * cos - b * sin
        rotated[..., seconds] = b * cos + a * sin
        return rotated

    @_passes_non_finite
    def scale_by_position(
        self, x: Array, positions: npt.NDArray[np.int64], scale: PositionScale
    ) -> Array:
        """X [num_tokens, ...] times the factor of each token's position."""
        steps = np.floor((positions + 1) / scale.floor_scale)
        factors = (1 + scale.scale * np.log1p(steps)).astype(np.float32)
        scaled: Array = x * factors.reshape(-1, *[1] * (x.ndim - 1))
        return scaled

    @_passes_non_finite
    def attention(self, kv: KVLayer, q: Array, k: Array, v: Array, attention: Attention) -> Array:
        """Store k and v in this step's slots, then read the blocks."""
        metadata = self._batch.attention[kv.group]
        storage: ReferenceStorage = kv.storage
        store(storage.keys, metadata, k, storage.dtype)
        store(storage.values, metadata, v, storage.dtype)
        return self.merge_heads(attend(kv, metadata, q, attention))

    @_passes_non_finite
    def shared_attention(self, kv: KVLayer, q: Array, attention: Attention) -> Array:
        """Read the blocks that the layer whose KV this one shares has stored in this step."""
        return self.merge_heads(attend(kv, self._batch.attention[kv.group], q, attention))

    @_passes_non_finite
    def latent_attention(
        self, kv: KVLayer, q: Array, row: Array, attention: Attention, head_size_v: int
    ) -> Array:
        """Store one row per token, then read it as key and, its first values, as value."""
        metadata = self._batch.attention[kv.group]
        storage: ReferenceStorage = kv.storage
        assert storage.values.shape[-1] == head_size_v
        store(storage.keys, metadata, row, storage.dtype)
        return attend(kv, metadata, q, attention)

    # --- experts ----------------------------------------------------------------------------

    @_passes_non_finite
    def route(self, logits: Array, routing: Routing, bias: Parameter | None = None) -> Array:
        """[num_tokens, 2 x num_experts_per_token]: expert ids, then their weights."""
        return route(logits, routing, bias)

    @_passes_non_finite
    def experts(self, x: Array, routes: Array, experts: Experts) -> Array:
        """Sum over each token's experts of weight x expert(x): [num_tokens, hidden_size]."""
        return run_experts(x, routes, experts)

    # --- ranks ------------------------------------------------------------------------------

    def all_reduce(self, x: Array) -> Array:
        """Sum over tensor-parallel ranks."""
        total: Array = self._communicator.all_reduce(x)
        return total

    def all_gather(self, x: Array) -> Array:
        """Concatenate over tensor-parallel ranks along the last axis."""
        gathered: Array = self._communicator.all_gather(x)
        return gathered
