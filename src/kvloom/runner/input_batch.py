"""What a worker knows of its requests; a step changes it only by diffs.

A request's state is the truth; a row of the block tables mirrors its blocks. A request that did not
run lately (preempted, or left out by the token budget) may lose its row and gets one again, filled
from its state, when it next runs. Rows are never moved: a step gathers the rows it needs, in its
own order.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.kv.spec import cdiv
from kvloom.request import ResolvedSamplingParams
from kvloom.shapes import ShapeBuckets
from kvloom.step import (
    MAX_EXTRA_LOGITS_ROWS,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

IntArray = NDArray[np.signedinteger[Any]]

_NO_ROW = -1
_UNKNOWN = 0  # stands for a token until that is known


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The sizes a runner is built for.

    Attributes:
        block_size: token positions per block that layers ask for; a group may choose a multiple.
        max_model_len: an upper bound of prompt plus output of one request.
        max_num_seqs: most requests of one step; more may run, but take turns.
        max_num_batched_tokens: most tokens of one step, over all requests.
        buckets: what steps are padded to, no less than the sizes above; None: they are not.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: ShapeBuckets | None = None

    @property
    def max_num_logits_rows(self) -> int:
        """Most rows of logits of one step: one per request, one per draft, those of prompts."""
        return min(self.max_num_seqs + MAX_EXTRA_LOGITS_ROWS, self.max_num_batched_tokens)

    def batch_bytes(self, num_groups: int) -> int:
        """The most bytes of `InputBatch`'s block tables with so many KV cache groups."""
        num_columns = num_groups * cdiv(self.max_model_len, self.block_size)
        return self.max_num_seqs * num_columns * np.dtype(np.int32).itemsize


@dataclass(slots=True)
class RequestState:
    """One request as its worker knows it.

    Attributes:
        block_ids: its block table per KV cache group.
        num_computed_tokens: tokens whose KV is stored before the coming step.
        num_prompt_logprobs: prompt tokens whose log-probabilities were already handed out; a
            preempted request computes them again but must not report them twice.
        row: of the batch's block tables.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: ResolvedSamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    row: int = _NO_ROW


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The flat token batch of one step; requests lie in the order of `states`.

    Attributes:
        states: [num_reqs].
        rows: [num_reqs] row of each request in the batch's block tables.
        token_rows: [num_tokens] that of the request a token belongs to.
        token_ids: int64 [num_tokens], 0 where `late_tokens` tells.
        positions: int64 [num_tokens].
        query_start: int32 [num_reqs + 1] first token of each request.
        num_computed_tokens: int32 [num_reqs] stored tokens before this step.
        seq_lens: int32 [num_reqs] stored tokens after it; `max_seq_len` is the largest.
        is_complete: bool [num_reqs] whether this step reaches the last known token, so that the
            next one can be sampled, as can those behind its drafts.
        late_tokens: places of tokens that nobody knows yet, with the request whose last output
            each will be, once the step before has been sampled.
    """

    states: list[RequestState]
    rows: IntArray
    token_rows: IntArray
    token_ids: IntArray
    positions: IntArray
    query_start: IntArray
    num_computed_tokens: IntArray
    seq_lens: IntArray
    max_seq_len: int
    is_complete: NDArray[np.bool_]
    late_tokens: list[tuple[int, RequestState]]


class InputBatch:
    """The worker's requests, and their block tables as persistent arrays.

    Attributes:
        block_tables: per group, int32 [max_num_seqs, cdiv(max_model_len, block_size)]; column i is
            logical block i, 0 where there is none. Columns that left a window keep their ids, which
            may be another's by now: nothing may read before the first token that a query sees.
    """

    def __init__(self, limits: RunnerLimits, block_sizes: Sequence[int]) -> None:
        """`block_sizes` has one entry per KV cache group."""
        max_num_seqs, max_model_len = limits.max_num_seqs, limits.max_model_len
        self.block_sizes = list(block_sizes)
        self.block_tables: list[IntArray] = [
            np.zeros((max_num_seqs, cdiv(max_model_len, size)), np.int32) for size in block_sizes
        ]
        self._states: dict[str, RequestState] = {}
        self._owners: dict[int, RequestState] = {}  # by row
        self._free_rows = list(reversed(range(max_num_seqs)))

    def update(self, output: SchedulerOutput) -> None:
        """Apply one step's diffs; afterwards every scheduled request has an up-to-date row."""
        for req_id in output.finished_req_ids:
            # A request may end before this worker ever saw it.
            state = self._states.pop(req_id, None)
            if state is not None:
                self._leave_row(state)
        for new in output.scheduled_new_reqs:
            state = self._states[new.req_id] = _state_of(new)
            self._enter_row(state, output.num_scheduled_tokens)
        self._update_cached(output.scheduled_cached_reqs, output.num_scheduled_tokens)

    def append_tokens(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Take the tokens that a step sampled; the scheduler does not send them again."""
        for req_id, token_ids in sampled_token_ids.items():
            if req_id in self._states:  # or it has ended meanwhile
                self._states[req_id].output_token_ids += token_ids

    def prepare(
        self, num_scheduled_tokens: Mapping[str, int], drafts: Mapping[str, list[int]]
    ) -> StepInputs:
        """Gather the flat batch of the scheduled requests, in their order, `drafts` included."""
        num_reqs = len(num_scheduled_tokens)
        states = [self._states[req_id] for req_id in num_scheduled_tokens]
        token_ids: list[int] = []
        late_tokens: list[tuple[int, RequestState]] = []
        num_seen = 0
        for state, num_tokens in zip(states, num_scheduled_tokens.values(), strict=True):
            drafted = drafts.get(state.req_id, [])
            token_ids += _next_tokens(state, num_tokens - len(drafted))
            token_ids += drafted
            num_seen += num_tokens
            if len(token_ids) < num_seen:
                late_tokens.append((len(token_ids), state))
                token_ids.append(_UNKNOWN)
        counts = np.array(list(num_scheduled_tokens.values()), np.int32)
        rows = np.array([state.row for state in states])
        computed = np.array([state.num_computed_tokens for state in states], np.int32)
        known = [len(state.prompt_token_ids) + len(state.output_token_ids) for state in states]
        query_start = np.zeros(num_reqs + 1, np.int32)
        np.add.accumulate(counts, out=query_start[1:])
        seq_lens = computed + counts
        if len(token_ids) == num_reqs:  # one each: the same, in fewer calls
            token_rows, positions = rows, computed.astype(np.int64)
        else:
            token_rows = rows.repeat(counts)
            positions = (computed - query_start[:-1]).repeat(counts) + np.arange(len(token_ids))
        return StepInputs(
            states=states,
            rows=rows,
            token_rows=token_rows,
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            query_start=query_start,
            num_computed_tokens=computed,
            seq_lens=seq_lens,
            max_seq_len=int(seq_lens.max()),
            is_complete=seq_lens >= known,
            late_tokens=late_tokens,
        )

    def block_table(self, group: int, inputs: StepInputs) -> IntArray:
        """int32 [num_reqs, max_num_blocks]: tables as wide as this step's longest request."""
        num_blocks = cdiv(inputs.max_seq_len, self.block_sizes[group])
        return self.block_tables[group][inputs.rows, :num_blocks]

    def slot_mapping(self, group: int, inputs: StepInputs) -> IntArray:
        """int64 [num_tokens]: block_table[pos // block_size] x block_size + pos % block_size."""
        size = self.block_sizes[group]
        columns = inputs.positions // size
        blocks = self.block_tables[group][inputs.token_rows, columns]
        assert np.count_nonzero(blocks) == len(blocks), "a scheduled token has no block"
        return (blocks - columns) * size + inputs.positions

    def _update_cached(self, cached: CachedRequestData, scheduled: Container[str]) -> None:
        diffs = zip(
            cached.req_ids,
            cached.resumed_from_preemption,
            cached.new_token_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            strict=True,
        )
        for req_id, is_resumed, new_token_ids, new_block_ids, num_computed_tokens in diffs:
            state = self._states[req_id]
            state.num_computed_tokens = num_computed_tokens
            if is_resumed:
                self._leave_row(state)
                state.block_ids = tuple(map(list, new_block_ids))
                state.output_token_ids.clear()
            elif any(new_block_ids):
                self._append_blocks(state, new_block_ids)
            if new_token_ids:
                state.output_token_ids += new_token_ids
            if state.row == _NO_ROW:
                self._enter_row(state, scheduled)

    def _append_blocks(self, state: RequestState, new_block_ids: tuple[list[int], ...]) -> None:
        for table, block_ids, new in zip(
            self.block_tables, state.block_ids, new_block_ids, strict=True
        ):
            if state.row != _NO_ROW:
                table[state.row, len(block_ids) : len(block_ids) + len(new)] = new
            block_ids += new

    def _enter_row(self, state: RequestState, scheduled: Container[str]) -> None:
        """Fill a free row for `state`, or that of a request that does not run now."""
        if not self._free_rows:
            self._leave_row(next(s for s in self._owners.values() if s.req_id not in scheduled))
        state.row = self._free_rows.pop()
        self._owners[state.row] = state
        for table, block_ids in zip(self.block_tables, state.block_ids, strict=True):
            table[state.row] = 0  # what the row's last request left behind
            table[state.row, : len(block_ids)] = block_ids

    def _leave_row(self, state: RequestState) -> None:
        if state.row != _NO_ROW:
            del self._owners[state.row]
            self._free_rows.append(state.row)
            state.row = _NO_ROW


def _next_tokens(state: RequestState, num_tokens: int) -> list[int]:
    """Up to `num_tokens` known tokens of `state` behind those computed."""
    first_output = state.num_computed_tokens - len(state.prompt_token_ids)
    if first_output >= 0:
        return state.output_token_ids[first_output : first_output + num_tokens]
    return (state.prompt_token_ids[first_output:] + state.output_token_ids)[:num_tokens]


def _state_of(new: NewRequestData) -> RequestState:
    return RequestState(
        req_id=new.req_id,
        prompt_token_ids=list(new.prompt_token_ids),
        sampling_params=new.sampling_params,
        block_ids=tuple(list(ids) for ids in new.block_ids),
        num_computed_tokens=new.num_computed_tokens,
    )
