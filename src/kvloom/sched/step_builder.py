"""Collects what the scheduler decides during one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloom.request import Request
from kvloom.step import CachedRequestData, NewRequestData, SchedulerOutput

BlockIds = tuple[list[int], ...]


@dataclass(slots=True)
class StepBuilder:
    """One step in the making; `num_free_tokens` is what is left of its token budget."""

    num_free_tokens: int
    new: list[NewRequestData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

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
        self._add_cached(request, True, request.output_token_ids, block_ids)
        self._spend(request, num_tokens)

    def add_running(self, request: Request, num_tokens: int, new_block_ids: BlockIds) -> None:
        """Schedule a request that keeps running; workers sampled its tokens themselves."""
        self._add_cached(request, False, [], new_block_ids)
        self._spend(request, num_tokens)

    def build(
        self, num_common_prefix_blocks: list[int], finished_req_ids: set[str]
    ) -> SchedulerOutput:
        """The finished step."""
        return SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=self.cached,
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=num_common_prefix_blocks,
            finished_req_ids=finished_req_ids,
            free_encoder_mm_hashes=[],
            structured_output_request_ids={},
            grammar_bitmask=None,
            kv_connector_metadata=None,
            block_copies=[],
        )

    def _add_cached(
        self, request: Request, is_resumed: bool, new_token_ids: list[int], block_ids: BlockIds
    ) -> None:
        self.cached.req_ids.append(request.req_id)
        self.cached.resumed_from_preemption.append(is_resumed)
        self.cached.new_token_ids.append(new_token_ids)
        self.cached.new_block_ids.append(block_ids)
        self.cached.num_computed_tokens.append(request.num_computed_tokens)

    def _spend(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.req_id] = num_tokens
        self.num_free_tokens -= num_tokens
