"""What the engine is told of a request after a step."""

from __future__ import annotations

from kvloom.request import Request
from kvloom.step import ModelRunnerOutput, RequestEvent


def progress_event(request: Request, result: ModelRunnerOutput) -> RequestEvent | None:
    """What a step added to a request that goes on; None if nothing."""
    req_id = request.req_id
    new_token_ids = result.sampled_token_ids.get(req_id, [])
    prompt_logprobs = result.prompt_logprobs.get(req_id, ())
    if not new_token_ids and not prompt_logprobs:
        return None
    return RequestEvent(
        req_id,
        new_token_ids,
        result.logprobs.get(req_id, ()),
        prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens,
    )


def end_event(event: RequestEvent, request: Request, num_tokens: int, error: str | None) -> None:
    """Let `event` be the last one of a request that ended at token `num_tokens` of it."""
    event.new_token_ids = event.new_token_ids[:num_tokens]
    event.logprobs = event.logprobs[:num_tokens]
    event.finish_reason = request.status.value
    event.stop_reason = request.stop_reason
    event.error = error


def last_event(request: Request, error: str | None = None) -> RequestEvent:
    """The end of a request that got no tokens with it."""
    return RequestEvent(
        req_id=request.req_id,
        new_token_ids=[],
        finish_reason=request.status.value,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        error=error,
    )
