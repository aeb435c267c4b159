"""The vocabulary on torch: what `reference_ops.py` computes, on any device that torch has.

Values are float32, as in the reference; matrices are multiplied in the format they are held in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

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
from kvloom.ops.torch_attention import StepAttention, TorchStorage
from kvloom.ops.torch_experts import (
    activate,
    activate_gated,
    multiply_matrix,
    route,
    run_experts,
)


class TorchOps:
    """One step's operations, computed as they are called."""

    def __init__(
        self, batch: Batch, communicator: Communicator, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`dtype` is what attention computes in; `batch` holds numpy arrays."""
        self._communicator = communicator
        self._device = device
        self._dtype = dtype
        self._groups = [StepAttention(metadata, device) for metadata in batch.attention]
        # Layers rotate by the same angles: rope -> cos, sin [num_tokens, 1, num_pairs].
        self._rotations: dict[Rope, tuple[Tensor, Tensor]] = {}

    # --- linear maps ------------------------------------------------------------------------

    def embedding(self, token_ids: Any, table: Parameter, first_row: int = 0) -> Tensor:
        """[num_tokens, hidden_size]; ids outside this rank's rows [first_row, ...) give zeros."""
        rows = self._on_device(token_ids) - first_row
        is_here = (rows >= 0) & (rows < table.shape[0])
        x = functional.embedding(torch.where(is_here, rows, 0), table.value)
        return torch.where(is_here[:, None], x.float(), 0.0)

    def linear(self, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
        """X @ weight.T + bias: [num_tokens, in] and [out, in] -> [num_tokens, out]."""
        y = multiply_matrix(x, weight.value)
        return y if bias is None else y + bias.value

    def head_linear(self, x: Tensor, weight: Parameter) -> Tensor:
        """A matrix per head: [num_tokens, num_heads, in] and [num_heads, out, in] -> [..., out]."""
        by_head = x.transpose(0, 1).to(weight.value.dtype)
        return (by_head @ weight.value.transpose(1, 2)).transpose(0, 1).float()

    # --- norms and element-wise -------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Parameter | None, eps: float) -> Tensor:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis; None weighs by 1."""
        scale = None if weight is None else weight.value
        return functional.rms_norm(x, x.shape[-1:], scale, eps)

    def layer_norm(self, x: Tensor, weight: Parameter, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight over the last axis."""
        return functional.layer_norm(x, x.shape[-1:], weight.value, eps=eps)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Element-wise sum."""
        return a + b

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Element-wise product of equal shapes, or b has one value per row of a: [..., 1]."""
        return a * b

    def multiply_columns(self, x: Tensor, weight: Parameter) -> Tensor:
        """X * weight: [num_tokens, size] and [size], or [1] for all columns."""
        return x * weight.value

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """X * factor."""
        return x * factor

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Cap * tanh(x / cap)."""
        return cap * torch.tanh(x / cap)

    def activation(self, x: Tensor, activation: Activation | Literal["tanh"]) -> Tensor:
        """The activation of every value of x."""
        return activate(x, activation)

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, where x is [num_tokens, 2 x size] = gate and up side by side."""
        return activate_gated(x, activation)

    def gaussian_top(self, x: Tensor, num_deviations: float) -> Tensor:
        """max(x - (mean(x) + num_deviations * deviation(x)), 0) over the last axis."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - (mean + num_deviations * variance.sqrt())).relu()

    def match_rms(self, x: Tensor, target: Tensor, floor: float) -> Tensor:
        """X * rms(target) / max(rms(x), floor), rms(x) = sqrt(mean(x^2)) over the last axis."""
        own, wanted = ((v * v).mean(dim=-1, keepdim=True).sqrt() for v in (x, target))
        return x * wanted / own.clamp(min=floor)

    # --- shapes -----------------------------------------------------------------------------

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Columns of [..., sum(sizes)], one value [..., size] per size."""
        return tuple(x.split(sizes, dim=-1))

    def concat(self, values: Sequence[Tensor]) -> Tensor:
        """Values side by side along the last axis."""
        return torch.cat(tuple(values), dim=-1)

    def split_heads(
        self, x: Tensor, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, (num_heads + 2 x num_kv_heads) x head_size] -> q, k, v."""
        heads = x.unflatten(1, (num_heads + 2 * num_kv_heads, head_size))
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v

    def heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[num_tokens, num_heads x size] -> [num_tokens, num_heads, size]."""
        return x.unflatten(1, (num_heads, x.shape[1] // num_heads))

    def merge_heads(self, x: Tensor) -> Tensor:
        """[num_tokens, num_heads, size] -> [num_tokens, num_heads x size]."""
        return x.flatten(1)

    def select_rows(self, x: Tensor, rows: Any) -> Tensor:
        """[len(rows), ...]: the named rows of x."""
        return x[self._on_device(rows)]

    # --- positions and attention ------------------------------------------------------------

    def rope(self, q: Tensor, k: Tensor, positions: Any, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotate q and k by their positions."""
        return self.rotate(q, positions, rope), self.rotate(k, positions, rope)

    def rotate(self, x: Tensor, positions: Any, rope: Rope) -> Tensor:
        """Rotate the heads of x [num_tokens, num_heads, head_size] by their positions."""
        if rope not in self._rotations:
            frequencies = torch.tensor(rope.inv_freq, dtype=torch.float64, device=self._device)
            angles = torch.outer(self._on_device(positions).double(), frequencies)[:, None]
            self._rotations[rope] = (
                (angles.cos() * rope.attention_factor).float(),
                (angles.sin() * rope.attention_factor).float(),
            )
        cos, sin = self._rotations[rope]
        num_pairs = len(rope.inv_freq)
        firsts, seconds = slice(num_pairs), slice(num_pairs, 2 * num_pairs)
        if rope.is_interleaved:
            firsts, seconds = slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
        a, b = x[..., firsts], x[..., seconds]
        rotated = x.clone()
        rotated[..., firsts] = a * cos - b * sin
        rotated[..., seconds] = b * cos + a * sin
        return rotated

    def scale_by_position(self, x: Tensor, positions: Any, scale: PositionScale) -> Tensor:
        """X [num_tokens, ...] times the factor of each token's position."""
        steps = torch.floor((self._on_device(positions) + 1).double() / scale.floor_scale)
        factors = (1 + scale.scale * torch.log1p(steps)).float()
        return x * factors.view(-1, *[1] * (x.dim() - 1))

    def attention(
        self, kv: KVLayer, q: Tensor, k: Tensor, v: Tensor, attention: Attention
    ) -> Tensor:
        """Store k and v in this step's slots, then read the blocks."""
        storage: TorchStorage = kv.storage
        assert storage.values is not None  # only latent rows have none
        self._groups[kv.group].store(storage.keys, k)
        self._groups[kv.group].store(storage.values, v)
        return self.shared_attention(kv, q, attention)

    def shared_attention(self, kv: KVLayer, q: Tensor, attention: Attention) -> Tensor:
        """Read the blocks that the layer whose KV this one shares has stored in this step."""
        return self._groups[kv.group].attend(kv, q, attention, self._dtype).flatten(1)

    def latent_attention(
        self, kv: KVLayer, q: Tensor, row: Tensor, attention: Attention, head_size_v: int
    ) -> Tensor:
        """Store one row per token, then read it as key and, its first values, as value."""
        storage: TorchStorage = kv.storage
        assert storage.head_size_v == head_size_v
        self._groups[kv.group].store(storage.keys, row)
        return self._groups[kv.group].attend(kv, q, attention, self._dtype)

    # --- experts ----------------------------------------------------------------------------

    def route(self, logits: Tensor, routing: Routing, bias: Parameter | None = None) -> Tensor:
        """[num_tokens, 2 x num_experts_per_token]: expert ids, then their weights."""
        return route(logits, routing, bias)

    def experts(self, x: Tensor, routes: Tensor, experts: Experts) -> Tensor:
        """Sum over each token's experts of weight x expert(x)."""
        return run_experts(x, routes, experts)

    # --- ranks ------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks."""
        if self._communicator.world_size == 1:
            return x
        return self._on_device(self._communicator.all_reduce(x.cpu().numpy()))

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate over tensor-parallel ranks along the last axis."""
        if self._communicator.world_size == 1:
            return x
        return self._on_device(self._communicator.all_gather(x.cpu().numpy()))

    def _on_device(self, array: Any) -> Tensor:
        """A host array as a tensor; a tensor of the device as it is."""
        return torch.as_tensor(array, device=self._device)
