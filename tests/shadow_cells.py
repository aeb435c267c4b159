"""A worker without numbers: a slot remembers what its K/V are a function of; reads are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.step import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from visibility import Kind

VOCAB_SIZE = 50

Cell = tuple[int, int]
"""(position, hash of the tokens up to it): what the K/V of one slot is a function of."""


def extend_cells(cells: list[Cell], token_ids: Sequence[int]) -> None:
    """Append the cells of `token_ids`, which follow those that `cells` stands for."""
    state = cells[-1][1] if cells else 0
    for position, token_id in enumerate(token_ids, len(cells)):
        state = hash((state, token_id))
        cells.append((position, state))


def next_token(cells: list[Cell]) -> int:
    """The model: greedy, a function of the whole prefix."""
    return cells[-1][1] % VOCAB_SIZE


@dataclass
class Row:
    """What a worker knows of one request; `cells` has one entry per known token."""

    num_prompt_tokens: int
    tables: list[list[int]]
    num_computed: int
    cells: list[Cell]


class ShadowRunner:
    """Keeps its rows by diffs alone and verifies every read against what was written."""

    def __init__(self, num_blocks: int, kinds: Sequence[Kind]) -> None:
        self._num_blocks = num_blocks
        self._kinds = kinds
        self._slots: dict[
            tuple[int, int], Cell
        ] = {}  # by block id and offset: groups share the ids
        self._rows: dict[str, Row] = {}
        self.num_reused_tokens = 0
        self.num_copies = 0

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        for source, destination in output.block_copies:
            self._copy(source, destination)
        # All K/V of a step are written before any of it is read.
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            self._write(self._rows[req_id], num_tokens)
        sampled = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            row = self._rows[req_id]
            num_read = row.num_computed + num_tokens
            assert row.num_computed < num_read <= len(row.cells)
            self._verify(row, num_read)
            if num_read == len(row.cells):
                sampled[req_id] = [next_token(row.cells)]
                extend_cells(row.cells, sampled[req_id])
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def _apply(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            del self._rows[req_id]  # it was told of every one of them
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self._rows
            row = Row(
                len(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
                cells=[],
            )
            extend_cells(row.cells, new.prompt_token_ids)
            self._rows[new.req_id] = row
            self.num_reused_tokens += new.num_computed_tokens
        for i, req_id in enumerate(output.scheduled_cached_reqs.req_ids):
            self._apply_diff(self._rows[req_id], output.scheduled_cached_reqs, i)

    def _apply_diff(self, row: Row, cached: CachedRequestData, i: int) -> None:
        row.num_computed = cached.num_computed_tokens[i]
        if cached.resumed_from_preemption[i]:
            row.tables = [list(ids) for ids in cached.new_block_ids[i]]
            del row.cells[row.num_prompt_tokens :]
            extend_cells(row.cells, cached.new_token_ids[i])
        else:
            assert cached.new_token_ids[i] == []
            for table, ids in zip(row.tables, cached.new_block_ids[i], strict=True):
                table += ids

    def _copy(self, source: int, destination: int) -> None:
        self.num_copies += 1
        for offset in range(max(kind.block_size for kind in self._kinds)):
            self._slots.pop((destination, offset), None)
            if (source, offset) in self._slots:
                self._slots[destination, offset] = self._slots[source, offset]

    def _slot(self, kind: Kind, table: list[int], position: int) -> tuple[int, int]:
        block_id = table[position // kind.block_size]
        assert 0 < block_id < self._num_blocks
        return block_id, position % kind.block_size

    def _write(self, row: Row, num_tokens: int) -> None:
        for kind, table in zip(self._kinds, row.tables, strict=True):
            for position in range(row.num_computed, row.num_computed + num_tokens):
                self._slots[self._slot(kind, table, position)] = row.cells[position]

    def _verify(self, row: Row, num_read: int) -> None:
        queries = range(row.num_computed, num_read)
        for kind, table in zip(self._kinds, row.tables, strict=True):
            assert len(table) == -(-num_read // kind.block_size)  # no block too many
            for position in range(num_read):
                if any(kind.sees(query, position) for query in queries):
                    assert self._slots[self._slot(kind, table, position)] == row.cells[position]
