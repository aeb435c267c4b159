"""Pads a step to one of the shapes that a device is compiled for.

Padding is added to a finished batch, so nobody who makes or schedules one knows of it. Its tokens
belong to no request, lie in no slot and are not sampled; its requests have no tokens. A table keeps
the columns that queries of the step may see, wherever they begin, and `first_columns` says where.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvloom.errors import CapacityError
from kvloom.kv.policy import make_policy
from kvloom.kv.spec import KVCacheSpec, KVLimits
from kvloom.ops.base import AttentionMetadata, Batch
from kvloom.shapes import ShapeBuckets, find_bucket

_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a padded batch.

    Attributes:
        num_tokens: of the flat batch.
        num_reqs: rows of the block tables.
        num_rows: of logits.
        num_columns: of the block table of each KV cache group.
    """

    num_tokens: int
    num_reqs: int
    num_rows: int
    num_columns: tuple[int, ...]


class StaticShapes:
    """The shapes of a runner, and how a batch is brought to the smallest that holds it."""

    def __init__(
        self, buckets: ShapeBuckets, max_num_rows: int, specs: Sequence[KVCacheSpec]
    ) -> None:
        """`specs` has one entry per KV cache group; `max_num_rows` bounds a step's logits."""
        self._buckets = buckets
        self._max_num_rows = max_num_rows
        self._specs = list(specs)
        self._policies = [make_policy(spec) for spec in specs]

    def all(self) -> list[StepShape]:
        """Every shape that a step may have, each once.

        A request of a step has a token at least, and a segment at most. Rows of logits beyond one
        per request are rare: a step with more of them has room for the most.
        """
        buckets = self._buckets
        found: dict[StepShape, None] = {}  # lengths beyond all windows may come to one width
        for (fewer_tokens, num_tokens), (fewer_reqs, num_reqs), context_len in itertools.product(
            _steps(buckets.num_tokens), _steps(buckets.num_reqs), buckets.context_lens
        ):
            most_tokens = num_reqs * min(buckets.prefill_segment, context_len)
            if fewer_reqs < num_tokens and fewer_tokens < most_tokens:
                rows = {
                    self._num_rows(num_reqs, num_tokens, n)
                    for n in (0, min(most_tokens, num_tokens))
                }
                columns = self._num_columns(num_tokens, context_len)
                found |= {StepShape(num_tokens, num_reqs, n, columns): None for n in sorted(rows)}
        return list(found)

    def find(self, batch: Batch) -> StepShape:
        """The smallest shape that holds a batch.

        Raises:
            CapacityError: none does.
        """
        buckets, first = self._buckets, batch.attention[0]
        largest = int(np.diff(first.query_start).max(initial=0))
        if largest > buckets.prefill_segment:
            raise CapacityError(
                f"a step of {largest} tokens of one request is larger than the prefill segment, "
                f"{buckets.prefill_segment}; raise prefill_segment"
            )
        num_tokens = find_bucket(buckets.num_tokens, len(batch.token_ids), "tokens")
        num_reqs = find_bucket(buckets.num_reqs, len(first.seq_lens), "requests")
        longest = int(first.seq_lens.max(initial=0))
        context_len = find_bucket(buckets.context_lens, longest, "tokens of one request")
        return StepShape(
            num_tokens,
            num_reqs,
            self._num_rows(num_reqs, num_tokens, len(batch.logits_rows)),
            self._num_columns(num_tokens, context_len),
        )

    def pad(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch in a shape that holds it."""
        return replace(
            batch,
            token_ids=_extend(batch.token_ids, shape.num_tokens, 0),
            positions=_extend(batch.positions, shape.num_tokens, 0),
            logits_rows=_extend(batch.logits_rows, shape.num_rows, 0),
            attention=[
                self._pad_group(metadata, group, shape)
                for group, metadata in enumerate(batch.attention)
            ],
        )

    def make_padding(self, shape: StepShape) -> Batch:
        """A batch of this shape that is padding alone: it stores and reads nothing."""
        none = np.zeros(0, np.int64)
        group = AttentionMetadata(
            block_table=np.zeros((0, 1), np.int32),
            slot_mapping=none,
            query_start=np.zeros(1, np.int32),
            seq_lens=np.zeros(0, np.int32),
            num_computed_tokens=np.zeros(0, np.int32),
            block_size=1,
        )
        groups = [replace(group, block_size=spec.block_size) for spec in self._specs]
        return self.pad(Batch(none, none, none, groups), shape)

    def _num_rows(self, num_reqs: int, num_tokens: int, num_wanted: int) -> int:
        """One row per request, or the most."""
        one_each = min(num_reqs, num_tokens)
        return one_each if num_wanted <= one_each else min(self._max_num_rows, num_tokens)

    def _pad_group(
        self, metadata: AttentionMetadata, group: int, shape: StepShape
    ) -> AttentionMetadata:
        policy = self._policies[group]
        computed = _extend(metadata.num_computed_tokens, shape.num_reqs, 0)
        firsts = np.array([policy.first_visible_column(int(n)) for n in computed], np.int32)
        return AttentionMetadata(
            block_table=_cut(metadata.block_table, firsts, shape.num_columns[group]),
            slot_mapping=_extend(metadata.slot_mapping, shape.num_tokens, _NO_SLOT),
            query_start=_extend(
                metadata.query_start, shape.num_reqs + 1, int(metadata.query_start[-1])
            ),
            seq_lens=_extend(metadata.seq_lens, shape.num_reqs, 0),
            num_computed_tokens=computed,
            block_size=metadata.block_size,
            first_columns=firsts,
        )

    def _num_columns(self, num_tokens: int, context_len: int) -> tuple[int, ...]:
        """What queries of a step may see, in blocks: as much as a request may hold during it."""
        limits = KVLimits(context_len, min(self._buckets.prefill_segment, num_tokens))
        return tuple(spec.max_num_blocks(context_len, limits) for spec in self._specs)


def _steps(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each bucket behind the one before it: (0, first), (first, second), ..."""
    return itertools.pairwise((0, *sizes))


def _extend(array: Any, size: int, value: int) -> Any:
    """The array, filled up to `size` entries."""
    extended = np.full(size, value, array.dtype)
    extended[: len(array)] = array
    return extended


def _cut(table: Any, firsts: Any, num_columns: int) -> Any:
    """Rows that begin at the column of `firsts` [num_rows]: [num_rows, num_columns].

    Columns and rows that the table has not are 0, the null block.
    """
    num_rows, width = table.shape
    columns = firsts[:num_rows, None] + np.arange(num_columns)
    cut = np.zeros((len(firsts), num_columns), np.int32)
    kept = np.take_along_axis(table, np.minimum(columns, width - 1), axis=1)
    cut[:num_rows] = np.where(columns < width, kept, 0)
    return cut
