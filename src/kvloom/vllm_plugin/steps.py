"""vLLM's steps in kvloom's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.kv.spec import cdiv
from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.sampler import derive_seed
from kvloom.step import (
    MAX_EXTRA_LOGITS_ROWS,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)
from kvloom.vllm_plugin.requests import resolve_sampling_params
from kvloom.vllm_plugin.specs import BlockIds, GroupMap

_WORD_BITS = 32
_PADDING = -1  # vLLM gives a request that is new beside running ones as many drafts as they have


@dataclass(slots=True)
class KnownRequest:
    """What the plugin itself remembers of a request.

    Attributes:
        token_ids: prompt and output; kept up to date where drafts are proposed.
        prompt_logprobs: those computed so far; None if none are asked for, and once the whole
            prompt has them and they were handed out.
        allowed: uint32 [cdiv(vocab_size, 32)], a bit for each token that it may sample; None if it
            may sample any.
        has_grammar: whether vLLM may restrict it further.
    """

    num_prompt_tokens: int
    token_ids: list[int]
    params: ResolvedSamplingParams
    prompt_logprobs: list[TokenLogprobs] | None
    allowed: NDArray[np.uint32] | None
    has_grammar: bool = False


@dataclass(slots=True)
class _Diffs:
    """What one step of vLLM's tells of the requests in it."""

    new: list[NewRequestData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)


class StepTranslator:
    """Turns each SchedulerOutput of vLLM into steps of kvloom: one, unless prompts are scored.

    Attributes:
        known: the requests that have not finished.
    """

    def __init__(self, groups: GroupMap, vocab_size: int, seed: int) -> None:
        """`seed` is what requests without one draw theirs from."""
        self.known: dict[str, KnownRequest] = {}
        self._groups = groups
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_requests = 0

    def translate(self, output: Any) -> list[SchedulerOutput]:
        """The steps that compute `output`, in order; the last one has all of its requests.

        vLLM does not bound how many prompt tokens a step scores, and kvloom does. Prompts that are
        too long are cut, and their beginnings come first: a request that scores its prompt reads no
        block that another one writes. Nor does it bound the drafts: some may be left out.
        """
        finished = set(output.finished_req_ids)
        for req_id in finished:
            self.known.pop(req_id, None)
        diffs = self._diffs(output, finished)
        scored = self._scored_req_ids()
        asked = output.scheduled_spec_decode_tokens
        parts = _cut(_known_tokens(output.num_scheduled_tokens, asked), scored)
        drafts = _cut_drafts(asked, MAX_EXTRA_LOGITS_ROWS - _num_extra_rows(parts[-1], scored))
        for req_id, token_ids in drafts.items():
            parts[-1][req_id] += len(token_ids)
        copies = [tuple(copy) for copy in output.kv_cache_block_copies or ()]
        steps = [_step(parts[0], diffs.new, diffs.cached, finished, copies)]
        if len(parts) > 1:
            computed = _computed_tokens(diffs)
            for before, part in pairwise(parts):
                for req_id, num_tokens in before.items():
                    computed[req_id] += num_tokens
                steps.append(_step(part, [], self._continued(part, computed), set(), []))
        steps[-1].scheduled_spec_decode_tokens.update(drafts)
        masked = [req_id for req_id in parts[-1] if self._is_masked(req_id)]
        steps[-1].structured_output_request_ids.update(dict.fromkeys(masked, -1))
        return steps

    def _diffs(self, output: Any, finished: set[str]) -> _Diffs:
        diffs = _Diffs(cached=self._cached(output.scheduled_cached_reqs))
        for new in output.scheduled_new_reqs:
            self._add_new(new, diffs, finished)
        return diffs

    def _cached(self, cached: Any) -> CachedRequestData:
        resumed = cached.resumed_req_ids
        return CachedRequestData(
            req_ids=list(cached.req_ids),
            resumed_from_preemption=[req_id in resumed for req_id in cached.req_ids],
            new_token_ids=[
                self._outputs(req_id, cached.all_token_ids[req_id]) if req_id in resumed else []
                for req_id in cached.req_ids
            ],
            new_block_ids=[self._groups.block_ids(ids) for ids in cached.new_block_ids],
            num_computed_tokens=list(cached.num_computed_tokens),
        )

    def _add_new(self, new: Any, diffs: _Diffs, finished: set[str]) -> None:
        """A request that is new, or one that vLLM sends anew after a preemption."""
        if new.req_id in self.known and new.prefill_token_ids is not None:
            self._resume(new, diffs.cached)
            return
        if new.req_id in self.known:  # its conversation goes on with a longer prompt
            finished.add(new.req_id)
        params = resolve_sampling_params(
            new.sampling_params, derive_seed(self._seed, self._num_requests)
        )
        self._num_requests += 1
        allowed = new.sampling_params.allowed_token_ids
        self.known[new.req_id] = KnownRequest(
            num_prompt_tokens=len(new.prompt_token_ids),
            token_ids=list(new.prompt_token_ids),
            params=params,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            allowed=None if allowed is None else _bits(allowed, self._vocab_size),
            has_grammar=new.sampling_params.structured_outputs is not None,
        )
        diffs.new.append(
            NewRequestData(
                req_id=new.req_id,
                prompt_token_ids=new.prompt_token_ids,
                mm_features=[],
                sampling_params=params,
                block_ids=self._groups.block_ids(new.block_ids),
                num_computed_tokens=new.num_computed_tokens,
            )
        )

    def _resume(self, new: Any, cached: CachedRequestData) -> None:
        cached.req_ids.append(new.req_id)
        cached.resumed_from_preemption.append(True)
        cached.new_token_ids.append(self._outputs(new.req_id, new.prefill_token_ids))
        cached.new_block_ids.append(self._groups.block_ids(new.block_ids))
        cached.num_computed_tokens.append(new.num_computed_tokens)

    def _outputs(self, req_id: str, all_token_ids: list[int]) -> list[int]:
        """The output of a preempted request: of its text, vLLM's word is the last."""
        known = self.known[req_id]
        known.token_ids[:] = all_token_ids
        return all_token_ids[known.num_prompt_tokens :]

    def _is_masked(self, req_id: str) -> bool:
        known = self.known[req_id]
        return known.has_grammar or known.allowed is not None

    def _scored_req_ids(self) -> list[str]:
        return [req_id for req_id, one in self.known.items() if one.prompt_logprobs is not None]

    def _continued(self, req_ids: Iterable[str], computed: Mapping[str, int]) -> CachedRequestData:
        """Requests without news but what was computed since."""
        ids = list(req_ids)
        no_blocks: BlockIds = self._groups.block_ids(None)
        return CachedRequestData(
            req_ids=ids,
            resumed_from_preemption=[False] * len(ids),
            new_token_ids=[[] for _ in ids],
            new_block_ids=[no_blocks] * len(ids),
            num_computed_tokens=[computed[req_id] for req_id in ids],
        )


def _cut(num_scheduled_tokens: Mapping[str, int], scored: Iterable[str]) -> list[dict[str, int]]:
    """Tokens per request and step, so that no step scores more prompt tokens than it may."""
    rest = dict(num_scheduled_tokens)
    parts = []
    room = MAX_EXTRA_LOGITS_ROWS
    for req_id in scored:
        if req_id not in rest:
            continue
        while rest[req_id] - 1 > room:
            num_tokens = min(rest[req_id] - 1, MAX_EXTRA_LOGITS_ROWS)
            parts.append({req_id: num_tokens})
            rest[req_id] -= num_tokens
        room -= rest[req_id] - 1
    return [*parts, rest]


def _cut_drafts(drafts: Mapping[str, Sequence[int]], num_rows: int) -> dict[str, list[int]]:
    """The drafts that are computed: `num_rows` at most, and no padding.

    To vLLM, a draft that is left out is one that was rejected.
    """
    kept = {}
    for req_id, token_ids in drafts.items():
        stop = token_ids.index(_PADDING) if _PADDING in token_ids else len(token_ids)
        if valid := list(token_ids[: min(stop, num_rows)]):
            kept[req_id] = valid
            num_rows -= len(valid)
    return kept


def _known_tokens(
    num_scheduled_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Scheduled tokens without the drafts among them."""
    return {
        req_id: num_tokens - len(drafts.get(req_id, ()))
        for req_id, num_tokens in num_scheduled_tokens.items()
    }


def _num_extra_rows(part: Mapping[str, int], scored: Iterable[str]) -> int:
    """Rows of logits that score prompts, beyond one per request."""
    return sum(part[req_id] - 1 for req_id in scored if req_id in part)


def _computed_tokens(diffs: _Diffs) -> dict[str, int]:
    cached = diffs.cached
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {new.req_id: new.num_computed_tokens for new in diffs.new}


def _step(
    num_scheduled_tokens: dict[str, int],
    new: list[NewRequestData],
    cached: CachedRequestData,
    finished: set[str],
    copies: list[Any],
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=finished,
        free_encoder_mm_hashes=[],
        structured_output_request_ids={},
        grammar_bitmask=None,
        kv_connector_metadata=None,
        block_copies=copies,
    )


def _bits(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """uint32 [cdiv(vocab_size, 32)]: bit i % 32 of word i // 32 is set for each id i."""
    is_set = np.zeros(cdiv(vocab_size, _WORD_BITS) * _WORD_BITS, np.uint8)
    is_set[list(token_ids)] = 1
    return np.packbits(is_set, bitorder="little").view(np.uint32)
