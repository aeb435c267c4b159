"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvloom.sampling.logits import FloatArray, top_indices
from kvloom.step import TokenLogprobs


def prompt_logprobs(
    logits: FloatArray, next_token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Score each prompt token by the logits [num_tokens, vocab_size] of the position before it."""
    return [
        score_token(row, token_id, num_top)
        for row, token_id in zip(logits, next_token_ids, strict=True)
    ]


def score_token(logits: FloatArray, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of raw `logits` [vocab_size] at `token_id` and at the `num_top` best.

    Equal logits rank by token id within `top`; `rank` counts strictly more likely tokens only.
    NaN logits give NaN.
    """
    peak = float(logits.max())
    with np.errstate(invalid="ignore"):  # a row of NaN or -inf has no distribution: NaN says so
        log_sum = math.log(np.exp(logits - peak).sum(dtype=np.float64))

    def logprob(i: int) -> float:
        return float(logits[i]) - peak - log_sum

    best = top_indices(logits, num_top).tolist() if num_top else ()
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob(token_id),
        rank=1 + int(np.count_nonzero(logits > logits[token_id])),
        top=tuple((i, logprob(i)) for i in best),
    )
