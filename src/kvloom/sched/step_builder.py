"""Collects what the scheduler decides during one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloom.request import Request
from kvloom.step import (
    MAX_EXTRA_LOGITS_ROWS,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

BlockIds = tuple[list[int], ...]

_Diff = tuple[str, bool, list[int], BlockIds, int]
"""One entry of each list of CachedRequestData."""


@dataclass(slots=True)
class StepBuilder:
    """One step in the making.

    Attributes:
        num_free_tokens: what is left of its token budget.
        max_num_tokens_per_req: most tokens of one request.
        num_free_rows: what is left of the rows of logits that requests may have beyond one each.
        drafts: by request, those of its scheduled tokens that are guessed, the last ones.
        requests: those it computes tokens of.
    """

    num_free_tokens: int
    max_num_tokens_per_req: int
    num_free_rows: int = MAX_EXTRA_LOGITS_ROWS
    new: list[NewRequestData] = field(default_factory=list)
    cached: list[_Diff] = field(default_factory=list)
    masked: list[str] = field(default_factory=list)  # those that sample by a grammar
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    def num_fitting_tokens(self, request: Request, num_missing_tokens: int) -> int:
        """How many of the tokens that a request has yet to compute fit into the step."""
        num_tokens = min(num_missing_tokens, self.num_free_tokens, self.max_num_tokens_per_req)
        if num_tokens > 1 and _scores_prompt(request):
            return min(num_tokens, 1 + self.num_free_rows)
        return num_tokens

    def num_fitting_drafts(self, num_kept_tokens: int) -> int:
        """How many drafts of one request fit beside `num_kept_tokens` known tokens."""
        return min(
            self.num_free_tokens - num_kept_tokens,
            self.max_num_tokens_per_req - 1,  # its last known token comes with them
            self.num_free_rows,
        )

    def add_new(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Schedule a request that workers have not seen; `block_ids` is its whole table."""
        self.new.append(
            NewRequestData(
                req_id=request.req_id,
                prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
                mm_features=[],
                sampling_params=request.sampling_params,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._spend(request, num_tokens)

    def add_resumed(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Schedule a request that was preempted.

        Workers keep the prompt and the sampling parameters of a request until it is finished, and
        may drop the rest when it is preempted: the whole table and all output tokens go along.
        """
        computed = request.num_computed_tokens
        self.cached.append((request.req_id, True, request.output_token_ids, block_ids, computed))
        self._spend(request, num_tokens)

    def add_running(self, request: Request, num_tokens: int, new_block_ids: BlockIds) -> None:
        """Schedule a request that keeps running; workers sample its tokens themselves."""
        computed = request.num_computed_tokens
        self.cached.append((request.req_id, False, [], new_block_ids, computed))
        self._spend(request, num_tokens)

    def add_drafts(self, req_id: str, drafts: list[int]) -> None:
        """Schedule drafts behind all known tokens of a request that is in the step."""
        self.drafts[req_id] = drafts
        self.num_scheduled_tokens[req_id] += len(drafts)
        self.num_free_tokens -= len(drafts)
        self.num_free_rows -= len(drafts)

    def build(
        self, num_common_prefix_blocks: list[int], finished_req_ids: set[str]
    ) -> SchedulerOutput:
        """The finished step."""
        return SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=CachedRequestData(*map(list, zip(*self.cached, strict=True))),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens=self.drafts,
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=num_common_prefix_blocks,
            finished_req_ids=finished_req_ids,
            free_encoder_mm_hashes=[],
            structured_output_request_ids=self._mask_rows(),
            grammar_bitmask=None,
            kv_connector_metadata=None,
            block_copies=self.block_copies,
        )

    def _mask_rows(self) -> dict[str, int]:
        rows, num_rows = {}, 0
        for req_id in self.masked:
            rows[req_id] = num_rows
            num_rows += 1 + len(self.drafts.get(req_id, ()))
        return rows

    def _spend(self, request: Request, num_tokens: int) -> None:
        self.requests.append(request)
        self.num_scheduled_tokens[request.req_id] = num_tokens
        self.num_free_tokens -= num_tokens
        has_grammar = request.sampling_params.structured_outputs is not None
        if has_grammar and request.num_computed_tokens + num_tokens == request.num_tokens:
            self.masked.append(request.req_id)
        if num_tokens > 1 and _scores_prompt(request):
            self.num_free_rows -= num_tokens - 1


def _scores_prompt(request: Request) -> bool:
    return request.sampling_params.prompt_logprobs is not None
