"""When a token ends its request. Stop strings are the detokenizer's matter."""

from __future__ import annotations

from typing import NamedTuple

from kvloom.request import Request, RequestStatus


class Stop(NamedTuple):
    """How a request ended; `token_id` is the stop token the user named, None for EOS and length."""

    status: RequestStatus
    token_id: int | None = None
    error: str | None = None


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """Whether the last token of `request` ends it; None lets it go on.

    Stop tokens among the first `min_tokens` output tokens are passed over. A stop token that also
    reaches the length limit is a stop.
    """
    params = request.sampling_params
    num_tokens = len(request.token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens > params.min_tokens:
        token_id = request.token_ids[-1]
        if token_id in params.eos_token_ids and not params.ignore_eos:
            return Stop(RequestStatus.FINISHED_STOP)
        if token_id in params.stop_token_ids:
            return Stop(RequestStatus.FINISHED_STOP, token_id)
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return Stop(RequestStatus.FINISHED_LENGTH)
    return None
