"""vLLM's sampling parameters in kvloom's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvloom.errors import RequestError
from kvloom.request import ResolvedSamplingParams

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A parameter of vLLM's that cannot be honoured when `is_asked`."""

    name: str
    is_asked: Callable[[Any], bool]
    reason: str = "kvloom's plugin does not do it; leave it out"


_REFUSALS = (
    _Refusal("logprob_token_ids", lambda p: p.logprob_token_ids is not None),
    _Refusal("prompt_logprob_token_ids", lambda p: p.prompt_logprob_token_ids is not None),
    _Refusal("prompt_logprob_start", lambda p: p.prompt_logprob_start is not None),
    _Refusal("thinking_token_budget", lambda p: p.thinking_token_budget is not None),
    _Refusal("trace_decode_token_ids", lambda p: p.trace_decode_token_ids is not None),
    _Refusal("watermarking", lambda p: bool(p.watermarking)),
    _Refusal(
        "skip_reading_prefix_cache",
        lambda p: p.prompt_logprobs is not None and not p.skip_reading_prefix_cache,
        "False leaves prompt tokens without log-probabilities; leave it out",
    ),
)


def check_request(params: Any) -> None:
    """Refuse what cannot be honoured, before the request enters the engine.

    Raises:
        RequestError: names the parameter.
    """
    for refusal in _REFUSALS:
        if refusal.is_asked(params):
            raise RequestError(refusal.name, refusal.reason)
    resolve_sampling_params(params, 0)


def resolve_sampling_params(params: Any, seed: int) -> ResolvedSamplingParams:
    """One choice's parameters; `seed` is for a request that brings none.

    What ends a request is vLLM's own business, so here all ids that end it are stop ids: they
    matter only until `min_tokens`.

    Raises:
        RequestError: a value outside of kvloom's ranges.
    """
    return ResolvedSamplingParams(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(params.top_k, 0),  # -1 is off as well
        min_p=float(params.min_p),
        seed=seed if params.seed is None else params.seed & _MAX_SEED,
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        stop_token_ids=tuple(params.all_stop_token_ids),
        max_tokens=max(params.max_tokens or 1, params.min_tokens),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias={} if params.logit_bias is None else dict(params.logit_bias),
        bad_words_token_ids=tuple(map(tuple, params.bad_words_token_ids or ())),
    )
