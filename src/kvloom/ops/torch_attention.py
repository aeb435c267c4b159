"""Attention on torch: blocks gathered through the table, for many requests at once.

A step's queries are cut into pieces of one request each. Pieces with equally many queries make one
tile, so that all requests that compute a single token take one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvloom.dtypes import DType
from kvloom.kv.spec import KVCacheSpec
from kvloom.ops.base import Attention, AttentionMetadata, KVLayer

STORED_TYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT8: torch.int8,
}

# What a tile may hold, padding included: keys of all its pieces, and scores of one head. A single
# piece may have more keys.
_MAX_KEYS = 1 << 16
_MAX_SCORES = 1 << 21
_MAX_QUERIES = 256  # of a piece; fewer where the context is long, but at least:
_MIN_QUERIES = 16

INT8_GROUP = 32  # values that share a scale
_INT8_MAX = 127
_INT8_TINY = 1e-30  # a group below it is stored as zeros


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The keys or the values of one layer's blocks: views whose first stride is the whole block's.

    Attributes:
        codes: [num_blocks, block_size, num_kv_heads, size] numbers, or int8 codes.
        scales: bfloat16 [num_blocks, block_size, num_kv_heads, size / 32] of codes, else None.
    """

    codes: Tensor
    scales: Tensor | None = None

    def write(self, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """Store float32 rows [num_tokens, num_kv_heads, size] at [num_tokens] places."""
        if self.scales is None:
            self.codes[blocks, offsets] = rows.to(self.codes.dtype)
        else:
            self.codes[blocks, offsets], self.scales[blocks, offsets] = _quantise(rows)

    def read(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows at those places, as `dtype`: [*places, num_kv_heads, size]."""
        codes = self.codes[blocks, offsets]
        if self.scales is None:
            return codes.to(dtype)
        scales = self.scales[blocks, offsets].float()[..., None]
        return (codes.unflatten(-1, (-1, INT8_GROUP)) * scales).flatten(-2).to(dtype)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over another."""
        self.codes[destination] = self.codes[source]
        if self.scales is not None:
            self.scales[destination] = self.scales[source]


def _quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups; a NaN or an infinity makes its group's scale NaN."""
    groups = rows.unflatten(-1, (-1, INT8_GROUP))
    largest = groups.abs().amax(dim=-1)
    scales = torch.where(largest > _INT8_TINY, largest / _INT8_MAX, 0.0).to(torch.bfloat16)
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)[..., None]
    # bfloat16 may have rounded the scale down.
    codes = (groups * inverse).nan_to_num().round().clamp(-_INT8_MAX, _INT8_MAX)
    scales = torch.where(largest.isfinite(), scales, math.nan)
    return codes.to(torch.int8).flatten(-2), scales


@dataclass(frozen=True, slots=True)
class TorchStorage:
    """The blocks of one layer.

    Attributes:
        keys: rows of keys.
        values: rows of values; None in multi-head latent attention, whose values are the first
            `head_size_v` columns of its keys.
        head_size_v: values per value head.
    """

    keys: BlockRows
    values: BlockRows | None
    head_size_v: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one request that follow one another, and the keys that they see.

    Attributes:
        row: of its first query in the flat batch.
        position: of its first query.
        first_key: position of the first key that a query sees; the last is that of the last query.
    """

    request: int
    row: int
    position: int
    first_key: int
    num_queries: int

    @property
    def num_keys(self) -> int:
        return self.position + self.num_queries - self.first_key


@dataclass(frozen=True, slots=True)
class _Tile:
    """Pieces with equally many queries, on the device.

    Attributes:
        rows: [num_pieces, num_queries] the queries in the flat batch.
        blocks, offsets: [num_pieces, num_keys] where the keys are stored.
        is_visible: bool [num_pieces, num_queries, num_keys].
    """

    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    is_visible: Tensor


class StepAttention:
    """Where the tokens of one KV cache group live in one step, on the device."""

    def __init__(self, metadata: AttentionMetadata, device: torch.device) -> None:
        """`metadata` holds numpy arrays."""
        self._metadata = metadata
        self._device = device
        self._table = torch.as_tensor(metadata.block_table, device=device).long()
        slots = torch.as_tensor(metadata.slot_mapping)
        # Padding is dropped here, on the host: a device would have to be waited for.
        self._stored = None if bool((slots >= 0).all()) else (slots >= 0).nonzero()[:, 0].to(device)
        slots = slots[slots >= 0].to(device)
        self._places = slots // metadata.block_size, slots % metadata.block_size
        self._batches: dict[Any, list[list[_Piece]]] = {}  # by mask
        self._kept: dict[Any, _Tile] = {}  # by mask and index of the batch

    def store(self, blocks: BlockRows, rows: Tensor) -> None:
        """Write rows [num_tokens, num_kv_heads, size] to their slots; slot -1 writes nothing."""
        blocks.write(*self._places, rows if self._stored is None else rows[self._stored])

    def attend(self, kv: KVLayer, q: Tensor, attention: Attention, dtype: torch.dtype) -> Tensor:
        """Attention of q [num_tokens, num_heads, head_size], computed in `dtype`.

        Returns:
            float32 [num_tokens, num_heads, head_size_v]; zeros for padding.
        """
        storage: TorchStorage = kv.storage
        assert kv.spec is not None  # set when the storage is
        out = q.new_zeros(*q.shape[:2], storage.head_size_v)
        for tile in self._tiles(kv.spec):
            keys = storage.keys.read(tile.blocks, tile.offsets, dtype)
            if storage.values is None:
                values = keys[..., : storage.head_size_v]
            else:
                values = storage.values.read(tile.blocks, tile.offsets, dtype)
            out[tile.rows] = _attend_tile(q[tile.rows], keys, values, tile.is_visible, attention)
        return out

    def _tiles(self, spec: KVCacheSpec) -> Iterator[_Tile]:
        """All queries of the step, in tiles.

        Those of single tokens are kept for all layers with this mask; of others the masks would
        take too much memory together.
        """
        mask = _Mask.of(spec)
        if mask not in self._batches:
            self._batches[mask] = list(_batch(_cut(self._metadata, mask)))
        for index, batch in enumerate(self._batches[mask]):
            tile = self._kept.get((mask, index)) or self._make_tile(batch, mask)
            if batch[0].num_queries == 1:
                self._kept[mask, index] = tile
            yield tile

    def _make_tile(self, batch: list[_Piece], mask: _Mask) -> _Tile:
        """The tile of a batch, whose last piece has the most keys.

        Keys beyond a piece's last one are read at that one's place: what is there is finite
        wherever the piece's own keys are.
        """
        firsts = self._metadata.first_columns
        numbers = [
            (p.request, p.row, p.position, p.first_key, 0 if firsts is None else firsts[p.request])
            for p in batch
        ]
        columns = torch.tensor(numbers, device=self._device).T[..., None]
        request, row, position, first_key, first_column = columns  # [num_pieces, 1] each
        queries = torch.arange(batch[0].num_queries, device=self._device)
        keys = first_key + torch.arange(batch[-1].num_keys, device=self._device)
        positions = position + queries
        stored = torch.minimum(keys, positions[:, -1:])
        block_size = self._metadata.block_size
        keys, positions = keys[:, None], positions[..., None]
        return _Tile(
            rows=row + queries,
            blocks=self._table[request, stored // block_size - first_column],
            offsets=stored % block_size,
            is_visible=(keys <= positions) & (keys >= mask.first_visible(positions)),
        )


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a query sees of the keys up to its own: all, a window, or an aligned chunk."""

    window: int | None
    chunk: int | None

    @classmethod
    def of(cls, spec: KVCacheSpec) -> _Mask:
        return cls(
            getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
        )

    def first_visible(self, position: Any) -> Any:
        """The first key that queries see, of a position or of a tensor of positions."""
        if self.window is not None:
            first = position - self.window + 1
            return first * (first > 0)
        return position * 0 if self.chunk is None else position // self.chunk * self.chunk


def _cut(metadata: AttentionMetadata, mask: _Mask) -> Iterator[_Piece]:
    """The step's queries in pieces, of which each has few enough scores."""
    starts = metadata.query_start.tolist()
    for request, position in enumerate(metadata.num_computed_tokens.tolist()):
        row, end = starts[request], starts[request + 1]
        while row < end:
            first_key = mask.first_visible(position)
            most = _MAX_SCORES // (position - first_key + _MAX_QUERIES)
            num_queries = min(end - row, max(_MIN_QUERIES, min(_MAX_QUERIES, most)))
            yield _Piece(request, row, position, first_key, num_queries)
            row, position = row + num_queries, position + num_queries


def _batch(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces with equally many queries, as many as a tile may hold; the longest are last."""
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.num_queries, piece.num_keys)):
        num_keys = (len(batch) + 1) * piece.num_keys
        is_full = num_keys > _MAX_KEYS or num_keys * piece.num_queries > _MAX_SCORES
        if batch and (is_full or piece.num_queries != batch[0].num_queries):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, is_visible: Tensor, attention: Attention
) -> Tensor:
    """Softmax attention of a tile; the heads that read one KV head lie one below another.

    Args:
        q: [num_pieces, num_queries, num_heads, head_size]; head h reads KV head
            h // (num_heads / num_kv_heads).
        keys: [num_pieces, num_keys, num_kv_heads, head_size].
        values: [num_pieces, num_keys, num_kv_heads, head_size_v].
        is_visible: [num_pieces, num_queries, num_keys].
        attention: how keys are scored.

    Returns:
        float32 [num_pieces, num_queries, num_heads, head_size_v].
    """
    num_queries, num_kv_heads = q.shape[1], keys.shape[2]
    by_kv_head = q.to(keys.dtype).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    rows = by_kv_head.flatten(2, 3)  # [num_pieces, num_kv_heads, heads x num_queries, head_size]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    seen = is_visible[:, None].repeat(1, 1, by_kv_head.shape[2], 1)
    if attention.soft_cap is None and attention.sinks is None:
        out = functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=seen, scale=attention.scale
        )
    else:
        out = _attend_scored(rows, (keys, values), seen, attention)
    return out.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3).float()


def _attend_scored(
    rows: Tensor, cache: tuple[Tensor, Tensor], seen: Tensor, attention: Attention
) -> Tensor:
    """The same in float32, with soft caps and sinks, which torch's own attention has not.

    A head's sink adds to its sum. Shapes as above: rows [num_pieces, num_kv_heads, heads x
    num_queries, head_size], keys and values [num_pieces, num_kv_heads, num_keys, ...], seen
    [num_pieces, 1, heads x num_queries, num_keys].
    """
    keys, values = (x.float() for x in cache)
    scores = rows.float() @ keys.transpose(2, 3) * attention.scale
    if attention.soft_cap is not None:
        scores = attention.soft_cap * torch.tanh(scores / attention.soft_cap)
    scores = scores.masked_fill_(~seen, -math.inf)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if attention.sinks is not None:  # one that overflows leaves the keys no weight, as it should
        per_head = attention.sinks.value.view(keys.shape[1], -1)
        sinks = per_head.repeat_interleave(rows.shape[2] // per_head.shape[1], dim=1)
        total += torch.exp(sinks[..., None] - largest)
    return weights.div_(total) @ values
