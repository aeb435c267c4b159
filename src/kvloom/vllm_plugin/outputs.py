"""What a step computed, in vLLM's words."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.outputs import ModelRunnerOutput as VllmOutput

from kvloom.runner.input_batch import RequestState
from kvloom.runner.step_handle import StepHandle
from kvloom.step import ModelRunnerOutput, TokenLogprobs, TokenMask
from kvloom.vllm_plugin.steps import KnownRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step between its two calls.

    Attributes:
        num_asked_drafts: by request that has any, as vLLM counts them: not all may be computed.
    """

    req_ids: list[str]
    num_asked_drafts: dict[str, int]
    handle: StepHandle


@dataclass(frozen=True, slots=True)
class _Table:
    """Log-probabilities as vLLM has them: the token itself first, then the most likely ones.

    Attributes:
        token_ids: int32 [num_rows, num_top + 1].
        logprobs: float32 [num_rows, num_top + 1].
        ranks: int32 [num_rows], of the token itself.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]


def substitute_failed(
    result: ModelRunnerOutput, sampled: Iterable[RequestState]
) -> dict[str, list[int]]:
    """A token for every request that could not be sampled: one that ends it, if one can.

    vLLM has no way to fail a single request, and one without its token would run forever. Where it
    runs on, the token is the one that the worker goes on with.
    """
    tokens = {}
    for state in sampled:
        req_id, params = state.req_id, state.sampling_params
        if req_id not in result.errors:
            continue
        logger.error("request %s: %s", req_id, result.errors[req_id])
        if params.stop_token_ids and len(state.output_token_ids) >= params.min_tokens:
            tokens[req_id] = [min(params.stop_token_ids)]
        else:
            tokens[req_id] = result.appended_token_ids[req_id]
    return tokens


def to_vllm(
    req_ids: Sequence[str],
    result: ModelRunnerOutput,
    known: Mapping[str, KnownRequest],
) -> VllmOutput:
    """The output of one of vLLM's steps, whose requests are `req_ids`."""
    sampled = result.sampled_token_ids
    return VllmOutput(
        req_ids=list(req_ids),
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[sampled.get(req_id, []) for req_id in req_ids],
        logprobs=_sampled_logprobs(req_ids, result) if result.logprobs else None,
        prompt_logprobs_dict=_take_prompt_logprobs(sampled, known),
    )


def collect_prompt_logprobs(result: ModelRunnerOutput, known: Mapping[str, KnownRequest]) -> None:
    """Keep what a step added until the prompt has all: vLLM takes them at once."""
    for req_id, scores in result.prompt_logprobs.items():
        collected = known[req_id].prompt_logprobs
        if collected is not None:
            collected += scores


def token_mask(
    grammar: Any | None, step: StartedStep, known: Mapping[str, KnownRequest]
) -> TokenMask | None:
    """Which tokens the requests of a step may sample: by their grammar, and by `allowed`.

    `grammar` is vLLM's GrammarOutput; its int32 bitmask has a row for each of its requests and one
    behind it for each draft that vLLM asked for.
    """
    rows: dict[str, int] = {}
    masks: list[NDArray[np.uint32]] = []
    if grammar is not None:
        masks = list(grammar.grammar_bitmask.view(np.uint32))
        first = 0
        for req_id in grammar.structured_output_request_ids:
            rows[req_id] = first
            first += 1 + step.num_asked_drafts.get(req_id, 0)
    for req_id in step.req_ids:
        allowed = known[req_id].allowed
        if allowed is None:
            continue
        num_rows = 1 + step.num_asked_drafts.get(req_id, 0)
        if req_id in rows:
            for row in range(rows[req_id], rows[req_id] + num_rows):
                masks[row] = masks[row] & allowed
        else:
            rows[req_id] = len(masks)
            masks += [allowed] * num_rows
    return TokenMask(rows, np.stack(masks)) if rows else None


def _sampled_logprobs(req_ids: Sequence[str], result: ModelRunnerOutput) -> LogprobsLists:
    """A row per sampled token; zeros, which nobody reads, for requests that ask for none."""
    entries: list[TokenLogprobs | None] = []
    first_rows = []
    for req_id in req_ids:
        first_rows.append(len(entries))
        num_tokens = len(result.sampled_token_ids.get(req_id, ()))
        entries += result.logprobs.get(req_id, [None] * num_tokens)
    num_top = max(len(entry.top) for entry in entries if entry is not None)
    table = _table(entries, num_top)
    return LogprobsLists(table.token_ids, table.logprobs, table.ranks, first_rows)


def _take_prompt_logprobs(
    sampled: Mapping[str, list[int]], known: Mapping[str, KnownRequest]
) -> dict[str, Any]:
    """Of the requests whose prompt is complete, which is when they sample their first token."""
    taken = {}
    for req_id in sampled:
        request = known[req_id]
        if request.prompt_logprobs is None:
            continue
        num_top = request.params.prompt_logprobs or 0
        table = _table(request.prompt_logprobs, num_top)
        taken[req_id] = LogprobsTensors(
            torch.from_numpy(table.token_ids),
            torch.from_numpy(table.logprobs),
            torch.from_numpy(table.ranks),
        )
        request.prompt_logprobs = None
    return taken


def _table(entries: Sequence[TokenLogprobs | None], num_top: int) -> _Table:
    token_ids = np.zeros((len(entries), num_top + 1), np.int32)
    logprobs = np.zeros((len(entries), num_top + 1), np.float32)
    ranks = np.zeros(len(entries), np.int32)
    for i, entry in enumerate(entries):
        if entry is None:
            continue
        width = len(entry.top) + 1
        token_ids[i, :width] = [entry.token_id, *(token_id for token_id, _ in entry.top)]
        logprobs[i, :width] = [entry.logprob, *(logprob for _, logprob in entry.top)]
        ranks[i] = entry.rank
    return _Table(token_ids, logprobs, ranks)
