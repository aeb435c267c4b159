"""A worker without numbers: a slot remembers what its K/V are a function of; reads are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.request import ResolvedSamplingParams
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


def undisturbed(prompt: list[int], params: ResolvedSamplingParams, max_model_len: int) -> list[int]:
    """The output of a request that runs alone, from the definitions of the stop rules."""
    output: list[int] = []
    cells: list[Cell] = []
    extend_cells(cells, prompt)
    while True:
        output.append(next_token(cells))
        extend_cells(cells, output[-1:])
        is_stop = len(output) > params.min_tokens and output[-1] in params.all_stop_token_ids
        if is_stop or len(output) == params.max_tokens or len(cells) == max_model_len:
            return output


@dataclass
class Row:
    """What a worker knows of one request; `cells` has one entry per known token.

    Rejected drafts may leave it a block more than its tokens need.
    """

    num_prompt_tokens: int
    tables: list[list[int]]
    num_computed: int
    cells: list[Cell]
    has_drafts: bool = False


class ShadowRunner:
    """Keeps its rows by diffs alone and verifies every read against what was written."""

    def __init__(self, num_blocks: int, kinds: Sequence[Kind]) -> None:
        self._num_blocks = num_blocks
        self._kinds = kinds
        # By block id and offset: groups share the ids.
        self._slots: dict[tuple[int, int], Cell] = {}
        self._rows: dict[str, Row] = {}
        self.num_reused_tokens = 0
        self.num_copies = 0
        self.has_lost_steps = False  # then it is told of the end of requests it never saw

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        for source, destination in output.block_copies:
            self._copy(source, destination)
        # All K/V of a step are written before any of it is read.
        drafts = output.scheduled_spec_decode_tokens
        known = {}  # by request, the number of tokens; drafts stand behind them until the end
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            row = self._rows[req_id]
            known[req_id] = len(row.cells)
            if req_id in drafts:
                row.has_drafts = True
                extend_cells(row.cells, drafts[req_id])
            self._write(row, num_tokens)
        sampled = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            row = self._rows[req_id]
            num_read = row.num_computed + num_tokens
            assert row.num_computed < num_read <= len(row.cells)
            self._verify(row, num_read)
            if num_read == len(row.cells):
                sampled[req_id] = self._sample(row, known[req_id], drafts.get(req_id, []))
            del row.cells[known[req_id] :]
            extend_cells(row.cells, sampled.get(req_id, []))
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def _sample(self, row: Row, num_known: int, drafts: Sequence[int]) -> list[int]:
        """The next token, and those behind drafts as long as these are right."""
        tokens: list[int] = []
        while tokens == list(drafts[: len(tokens)]) and len(tokens) <= len(drafts):
            tokens.append(next_token(row.cells[: num_known + len(tokens)]))
        return tokens

    def _apply(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            assert req_id in self._rows or self.has_lost_steps
            self._rows.pop(req_id, None)
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
            num_too_many = len(table) - -(-num_read // kind.block_size)
            assert num_too_many == 0 or (row.has_drafts and num_too_many > 0)
            for position in range(num_read):
                if any(kind.sees(query, position) for query in queries):
                    assert self._slots[self._slot(kind, table, position)] == row.cells[position]
