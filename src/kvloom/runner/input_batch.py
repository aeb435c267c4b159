"""What a worker knows of its requests, kept in numpy arrays that a step changes only by diffs.

A request's state is the truth; a row of the arrays mirrors it. A request that did not run lately
(preempted, or left out by the token budget) may lose its row and gets one again, filled from its
state, when it next runs. Rows are never moved: a step gathers the rows it needs, in its own order.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.kv.spec import cdiv
from kvloom.request import ResolvedSamplingParams
from kvloom.step import CachedRequestData, NewRequestData, SchedulerOutput

IntArray = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The sizes a runner is built for.

    Attributes:
        block_size: token positions per block that layers ask for; a group may choose a multiple.
        max_model_len: an upper bound of prompt plus output of one request.
        max_num_seqs: most requests of one step; more may run, but take turns.
        max_num_batched_tokens: most tokens of one step, over all requests.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def batch_bytes(self) -> int:
        """Bytes of `InputBatch`'s large arrays, with one KV cache group."""
        per_seq = self.max_model_len + cdiv(self.max_model_len, self.block_size)
        return self.max_num_seqs * per_seq * np.dtype(np.int32).itemsize


@dataclass(slots=True)
class RequestState:
    """One request as its worker knows it.

    Attributes:
        block_ids: its block table per KV cache group.
        num_computed_tokens: tokens whose KV is stored before the coming step.
        num_prompt_logprobs: prompt tokens whose log-probabilities were already handed out; a
            preempted request computes them again but must not report them twice.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: ResolvedSamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The flat token batch of one step; requests lie in the order of `states`.

    Attributes:
        states: [num_reqs].
        rows: [num_reqs] row of each request in the batch's arrays.
        request_index: [num_tokens] which request a token belongs to.
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens].
        query_start: int32 [num_reqs + 1] first token of each request.
        num_computed_tokens: int32 [num_reqs] stored tokens before this step.
        seq_lens: int32 [num_reqs] stored tokens after it.
        is_complete: bool [num_reqs] whether this step reaches the last known token, so that the
            next one can be sampled.
    """

    states: list[RequestState]
    rows: IntArray
    request_index: IntArray
    token_ids: IntArray
    positions: IntArray
    query_start: IntArray
    num_computed_tokens: IntArray
    seq_lens: IntArray
    is_complete: NDArray[np.bool_]


class InputBatch:
    """Persistent arrays with one row per request that ran lately.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len]; pages are touched as requests grow.
        block_tables: per group, int32 [max_num_seqs, cdiv(max_model_len, block_size)]; column i is
            logical block i, 0 where there is none.
    """

    def __init__(self, limits: RunnerLimits, block_sizes: Sequence[int]) -> None:
        """`block_sizes` has one entry per KV cache group."""
        max_num_seqs, max_model_len = limits.max_num_seqs, limits.max_model_len
        self.block_sizes = list(block_sizes)
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_tables: list[IntArray] = [
            np.zeros((max_num_seqs, cdiv(max_model_len, size)), np.int32) for size in block_sizes
        ]
        self._states: dict[str, RequestState] = {}
        self._rows: dict[str, int] = {}  # by request
        self._free_rows = list(reversed(range(max_num_seqs)))

    def update(self, output: SchedulerOutput) -> None:
        """Apply one step's diffs; afterwards every scheduled request has an up-to-date row."""
        for req_id in output.finished_req_ids:
            # A request may end before this worker ever saw it.
            self._states.pop(req_id, None)
            self._leave_row(req_id)
        for new in output.scheduled_new_reqs:
            self._states[new.req_id] = _state_of(new)
        self._update_cached(output.scheduled_cached_reqs)
        for req_id in output.num_scheduled_tokens:
            if req_id not in self._rows:
                row = self._take_row(output.num_scheduled_tokens)
                self._fill_row(row, self._states[req_id])
                self._rows[req_id] = row

    def append_tokens(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Take the tokens that a step sampled; the scheduler does not send them again."""
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        for req_id, token_ids in sampled_token_ids.items():
            state = self._states[req_id]
            row = self._rows.get(req_id)
            if row is not None:
                start = state.num_tokens
                rows += [row] * len(token_ids)
                positions += range(start, start + len(token_ids))
                tokens += token_ids
            state.output_token_ids += token_ids
        # One write for all: writing one by one costs more than all the rest of this.
        self.token_ids[rows, positions] = tokens

    def prepare(self, num_scheduled_tokens: Mapping[str, int]) -> StepInputs:
        """Gather the flat batch of the scheduled requests, in their order."""
        num_reqs = len(num_scheduled_tokens)
        counts = np.fromiter(num_scheduled_tokens.values(), np.int32, num_reqs)
        states = [self._states[req_id] for req_id in num_scheduled_tokens]
        rows = np.array([self._rows[req_id] for req_id in num_scheduled_tokens], np.int64)
        query_start = np.zeros(num_reqs + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        computed = np.array([state.num_computed_tokens for state in states], np.int32)
        known = np.array([state.num_tokens for state in states], np.int32)
        index = np.repeat(np.arange(num_reqs), counts)  # [num_tokens]
        positions = np.arange(len(index)) + (computed - query_start[:-1])[index]
        seq_lens = computed + counts
        return StepInputs(
            states=states,
            rows=rows,
            request_index=index,
            token_ids=self.token_ids[rows[index], positions].astype(np.int64),
            positions=positions,
            query_start=query_start,
            num_computed_tokens=computed,
            seq_lens=seq_lens,
            is_complete=seq_lens >= known,
        )

    def block_table(self, group: int, inputs: StepInputs) -> IntArray:
        """int32 [num_reqs, max_num_blocks]: tables as wide as this step's longest request."""
        num_blocks = cdiv(int(inputs.seq_lens.max()), self.block_sizes[group])
        return self.block_tables[group][inputs.rows, :num_blocks]

    def slot_mapping(self, group: int, inputs: StepInputs) -> IntArray:
        """int64 [num_tokens]: block_table[pos // block_size] x block_size + pos % block_size."""
        size = self.block_sizes[group]
        rows = inputs.rows[inputs.request_index]
        blocks = self.block_tables[group][rows, inputs.positions // size].astype(np.int64)
        assert blocks.all(), "a scheduled token has no block"
        return blocks * size + inputs.positions % size

    def _update_cached(self, cached: CachedRequestData) -> None:
        told: dict[str, list[int]] = {}
        for i, req_id in enumerate(cached.req_ids):
            state = self._states[req_id]
            state.num_computed_tokens = cached.num_computed_tokens[i]
            new_block_ids, new_token_ids = cached.new_block_ids[i], cached.new_token_ids[i]
            if cached.resumed_from_preemption[i]:
                state.block_ids = tuple(list(ids) for ids in new_block_ids)
                state.output_token_ids[:] = new_token_ids
                self._leave_row(req_id)
                continue
            if any(new_block_ids):
                self._append_blocks(state, new_block_ids)
            if new_token_ids:
                told[req_id] = new_token_ids
        if told:
            self.append_tokens(told)

    def _append_blocks(self, state: RequestState, new_block_ids: tuple[list[int], ...]) -> None:
        row = self._rows.get(state.req_id)
        for table, block_ids, new in zip(
            self.block_tables, state.block_ids, new_block_ids, strict=True
        ):
            if row is not None:
                table[row, len(block_ids) : len(block_ids) + len(new)] = new
            block_ids += new

    def _take_row(self, scheduled: Container[str]) -> int:
        """A free row, or that of a request that does not run now."""
        if self._free_rows:
            return self._free_rows.pop()
        idle = next(req_id for req_id in self._rows if req_id not in scheduled)
        return self._rows.pop(idle)

    def _leave_row(self, req_id: str) -> None:
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)

    def _fill_row(self, row: int, state: RequestState) -> None:
        num_prompt = len(state.prompt_token_ids)
        self.token_ids[row, :num_prompt] = state.prompt_token_ids
        self.token_ids[row, num_prompt : state.num_tokens] = state.output_token_ids
        for table, block_ids in zip(self.block_tables, state.block_ids, strict=True):
            table[row] = 0  # what the row's last request left behind
            table[row, : len(block_ids)] = block_ids


def _state_of(new: NewRequestData) -> RequestState:
    return RequestState(
        req_id=new.req_id,
        prompt_token_ids=list(new.prompt_token_ids),
        sampling_params=new.sampling_params,
        block_ids=tuple(list(ids) for ids in new.block_ids),
        num_computed_tokens=new.num_computed_tokens,
    )
