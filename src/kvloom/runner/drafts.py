"""Rows of logits of requests that may have drafts: which there are, and what comes of them.

A request has one row behind its known tokens and one behind each draft, in order of position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvloom.runner.input_batch import IntArray, RequestState
from kvloom.sampling.sampler import SampleResult, SamplingRow
from kvloom.step import ModelRunnerOutput, TokenMask

Drafts = Mapping[str, list[int]]
"""By request that has any."""


def with_drafts(last_tokens: IntArray, states: Sequence[RequestState], drafts: Drafts) -> IntArray:
    """The tokens of the flat batch whose logits are drawn from: [num_rows].

    `last_tokens` [num_reqs] has the last scheduled token of each request: its last draft.
    """
    if not drafts:
        return last_tokens
    return np.concatenate(
        [
            np.arange(last - len(drafts.get(state.req_id, ())), last + 1)
            for last, state in zip(last_tokens.tolist(), states, strict=True)
        ]
        or [last_tokens]
    )


def sampling_rows(states: Sequence[RequestState], drafts: Drafts) -> list[SamplingRow]:
    """What each row is drawn by: the tokens before it include the drafts before it."""
    rows: list[SamplingRow] = []
    for state in states:
        params, prompt, output = (
            state.sampling_params,
            state.prompt_token_ids,
            state.output_token_ids,
        )
        rows.append(SamplingRow(params, prompt, output))
        if state.req_id in drafts:
            for token_id in drafts[state.req_id]:
                output = [*output, token_id]
                rows.append(SamplingRow(params, prompt, output))
    return rows


def mask_rows(states: Sequence[RequestState], drafts: Drafts, mask: TokenMask) -> list[int]:
    """The row of `mask` that each row of logits obeys, -1 for none."""
    rows: list[int] = []
    for state in states:
        first = mask.rows.get(state.req_id)
        num_rows = 1 + len(drafts.get(state.req_id, ()))
        rows += [-1] * num_rows if first is None else range(first, first + num_rows)
    return rows


def report(
    drawn: SampleResult, states: Sequence[RequestState], drafts: Drafts, result: ModelRunnerOutput
) -> None:
    """Add what was drawn, or why not, to the step's result."""
    first = 0
    for state in states:
        own_drafts = drafts.get(state.req_id, ())
        stop = first + _num_valid(drawn, first, own_drafts)
        if stop - 1 in drawn.errors:
            # Without drafts, the tokens before would come now, and the error in a later step.
            stop -= 1
        if stop == first:
            result.errors[state.req_id] = drawn.errors[first]
        else:
            result.sampled_token_ids[state.req_id] = drawn.token_ids[first:stop]
            if state.sampling_params.logprobs is not None:
                scores = drawn.logprobs[first:stop]
                result.logprobs[state.req_id] = [score for score in scores if score is not None]
        first += 1 + len(own_drafts)


def _num_valid(drawn: SampleResult, first: int, drafts: Sequence[int]) -> int:
    """How many rows from `first` on stand behind tokens that were drawn."""
    for i, token_id in enumerate(drafts):
        if first + i in drawn.errors or drawn.token_ids[first + i] != token_id:
            return i + 1
    return len(drafts) + 1
