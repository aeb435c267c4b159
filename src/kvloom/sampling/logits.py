"""What a request's parameters do to its logits: masks, biases, penalties, and which tokens stay.

The order is: min_tokens, logit_bias, bad_words, repetition penalty, frequency and presence
penalty, temperature, then top_k, min_p and top_p. top_p measures what top_k and min_p left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvloom.request import ResolvedSamplingParams

FloatArray = NDArray[np.floating]
IdArray = NDArray[np.intp]

# top_p sorts only the heaviest tokens, and more of them while they do not suffice.
_FIRST_HEAD = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The request behind one row of logits: its parameters and the tokens before the new one.

    Attributes:
        allowed: bool [vocab_size], the only tokens that may come next; None allows all.
    """

    params: ResolvedSamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    allowed: NDArray[np.bool_] | None = None

    @property
    def has_adjustments(self) -> bool:
        """Whether anything but temperature and truncation changes this row's logits."""
        params = self.params
        return bool(
            self.allowed is not None
            or params.logit_bias
            or params.bad_words_token_ids
            or len(self.output_token_ids) < params.min_tokens
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )


def adjust_logits(logits: FloatArray, row: SamplingRow) -> FloatArray:
    """A float64 copy of `logits` [vocab_size] with masks, bias and penalties; banned is -inf."""
    params = row.params
    logits = logits.astype(np.float64)
    if row.allowed is not None:
        logits[~row.allowed] = -np.inf
    if len(row.output_token_ids) < params.min_tokens:
        logits[list(params.eos_token_ids | frozenset(params.stop_token_ids))] = -np.inf
    if params.logit_bias:
        logits[list(params.logit_bias)] += list(params.logit_bias.values())
    banned = banned_token_ids(params.bad_words_token_ids, row.output_token_ids)
    logits[banned] = -np.inf
    _penalise(logits, row)
    return logits


def banned_token_ids(
    bad_words: Sequence[Sequence[int]], output_token_ids: Sequence[int]
) -> list[int]:
    """The last id of every bad word whose other ids the output ends with.

    Only generated tokens count: a word that begins in the prompt was begun by the user.
    """
    banned = []
    for *beginning, last in bad_words:
        start = len(output_token_ids) - len(beginning)
        if start >= 0 and list(output_token_ids[start:]) == beginning:
            banned.append(last)
    return banned


def _penalise(logits: FloatArray, row: SamplingRow) -> None:
    params = row.params
    output = np.asarray(row.output_token_ids, dtype=np.intp)
    if params.repetition_penalty != 1.0:
        prompt = np.asarray(row.prompt_token_ids, dtype=np.intp)
        seen = np.unique(np.concatenate((prompt, output)))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = np.where(values > 0.0, values / penalty, values * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        generated, counts = np.unique(output, return_counts=True)
        logits[generated] -= params.frequency_penalty * counts + params.presence_penalty


def keep_tokens(logits: FloatArray, params: ResolvedSamplingParams) -> tuple[IdArray, FloatArray]:
    """The tokens that may be drawn from `logits` [vocab_size], and how much each weighs.

    Needs a temperature above 0 and at least one finite logit. Token ids ascend; the most likely
    token weighs 1. Among equal logits top_k keeps all that reach the last place, top_p the lower
    ids.

    Returns:
        Token ids and weights, both [num_kept].
    """
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    token_ids = np.flatnonzero(scaled >= _smallest_of_top(scaled, params.top_k))
    weights = np.exp(scaled[token_ids])
    if params.min_p > 0.0:
        is_kept = weights >= params.min_p
        token_ids, weights = token_ids[is_kept], weights[is_kept]
    if params.top_p < 1.0:
        kept = _top_p_indices(weights, params.top_p)
        token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights


def top_indices(values: FloatArray, count: int) -> IdArray:
    """Indices of the `count` largest of `values` [n], best first; the lower index wins a tie."""
    candidates = np.flatnonzero(values >= _smallest_of_top(values, count))
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def _smallest_of_top(values: FloatArray, count: int) -> float:
    """The `count`-th largest value, or -inf when that keeps all (0 asks for all)."""
    if not 0 < count < len(values):
        return -np.inf
    return float(np.partition(values, -count)[-count])


def _top_p_indices(weights: FloatArray, top_p: float) -> IdArray:
    """Ascending indices of the fewest, heaviest `weights` that reach `top_p` of their sum."""
    needed = top_p * weights.sum()
    size = _FIRST_HEAD
    while True:
        head = top_indices(weights, size)
        mass = np.cumsum(weights[head])
        if mass[-1] >= needed or size >= len(weights):
            return np.sort(head[: np.searchsorted(mass, needed) + 1])
        size *= 16
