"""Chooses the next token of every request of a step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.logits import FloatArray, SamplingRow, adjust_logits, keep_tokens
from kvloom.sampling.logprobs import prompt_logprobs, score_token
from kvloom.step import TokenLogprobs

__all__ = ["SampleResult", "Sampler", "SamplingRow", "derive_seed", "draw_uniform"]


@dataclass(slots=True)
class SampleResult:
    """The chosen tokens, parallel to the rows.

    Attributes:
        token_ids: 0, meaning nothing, for rows that are in `errors`.
        logprobs: None where the request asks for none, and for rows in `errors`.
        errors: rows that have no next token, with the reason.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)


# A row with penalties, drawn from all tokens, takes at most nine float64 arrays at a time.
_SCRATCH_BYTES_PER_LOGIT = 9 * 8


class Sampler:
    """Chooses tokens. It holds no state: a row's token depends on that row alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def scratch_bytes(self) -> int:
        """Memory it takes while it samples, whatever the rows ask for."""
        return _SCRATCH_BYTES_PER_LOGIT * self._vocab_size

    def asks_best_only(self, _params: Iterable[ResolvedSamplingParams]) -> bool:
        """Never: it reads all logits."""
        return False

    def sample(
        self,
        logits: FloatArray,
        rows: Sequence[SamplingRow],
        grammar: NDArray[np.uint32] | None = None,
        grammar_rows: Sequence[int] = (),
        are_best_only: bool = False,
    ) -> SampleResult:
        """Choose one token per row of `logits` [num_rows, vocab_size].

        Greedy rows take the lowest token id among equal logits. A row that cannot be sampled
        fails alone: its reason is in the result's `errors`.

        Args:
            logits: the model's own.
            rows: the requests.
            grammar: allowed tokens, [*, cdiv(vocab_size, 32)]: bit i % 32 of word i // 32 is i.
            grammar_rows: the row of `grammar` that each request obeys, -1 for none.
            are_best_only: False, since it never asked for that.
        """
        assert not are_best_only
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {logits.shape}, not {(len(rows), self._vocab_size)}")
        if grammar is not None:
            rows = _constrain(rows, grammar, grammar_rows, self._vocab_size)
        result = SampleResult()
        best = logits.argmax(axis=1)  # [num_rows]; in a row with NaN the first NaN
        for i, (row, row_logits) in enumerate(zip(rows, logits, strict=True)):
            try:
                token_id = _next_token(row_logits, row, int(best[i]))
            except _NoTokenError as error:
                result.errors[i] = str(error)
                result.token_ids.append(0)
                result.logprobs.append(None)
                continue
            num_top = row.params.logprobs
            result.token_ids.append(token_id)
            result.logprobs.append(
                None if num_top is None else score_token(row_logits, token_id, num_top)
            )
        return result

    def start(self, *_: object) -> None:
        """It samples finished logits alone: `sample`."""

    def prompt_logprobs(
        self, logits: FloatArray, next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score each prompt token by the row of `logits` of the position before it."""
        return prompt_logprobs(logits, next_token_ids, num_top)


def derive_seed(base_seed: int, index: int) -> int:
    """A seed below 2**63 for number `index` of a family, such as a choice or a prompt."""
    digest = hashlib.sha256(f"{base_seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def draw_uniform(seed: int, output_index: int) -> float:
    """The random number within [0, 1) of a request's output token.

    It depends on these two alone (Philox counts instead of stepping a state), so neither
    preemption nor batch mates nor chunking can change a seeded text.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=output_index)).random())


def _constrain(
    rows: Sequence[SamplingRow],
    grammar: NDArray[np.uint32],
    grammar_rows: Sequence[int],
    vocab_size: int,
) -> list[SamplingRow]:
    """The rows with the tokens that the grammar allows them."""
    is_set = np.unpackbits(grammar.view(np.uint8), axis=1, bitorder="little")
    is_allowed = is_set[:, :vocab_size].astype(bool)  # [*, vocab_size]
    return [
        row if i < 0 else replace(row, allowed=is_allowed[i])
        for row, i in zip(rows, grammar_rows, strict=True)
    ]


class _NoTokenError(Exception):
    """A row has no next token; the message is for the user."""


def _next_token(logits: FloatArray, row: SamplingRow, best: int) -> int:
    """The next token; `best` is the index of the largest of `logits` [vocab_size]."""
    _check_model(float(logits[best]))
    if row.has_adjustments:
        logits = adjust_logits(logits, row)
        best = int(logits.argmax())
        if logits[best] == -math.inf:
            raise _NoTokenError(
                "logit_bias, bad_words, min_tokens and the grammar leave no token; relax them"
            )
    if row.params.is_greedy:
        return best
    token_ids, weights = keep_tokens(logits, row.params)
    return int(token_ids[_draw(weights, row)])


def _check_model(peak: float) -> None:
    if not math.isfinite(peak):
        what = "NaN" if math.isnan(peak) else "only -inf" if peak < 0 else "+inf"
        raise _NoTokenError(
            f"the model's logits hold {what}; check its weights, or run it with dtype float32"
        )


def _draw(weights: FloatArray, row: SamplingRow) -> int:
    """An index of `weights` [num_kept], each as likely as it is heavy."""
    mass = np.cumsum(weights)
    point = draw_uniform(row.params.seed, len(row.output_token_ids)) * mass[-1]
    # Rounding must not reach the end: beyond it there is nothing, and before it may be zeros.
    return int(np.searchsorted(mass, min(point, np.nextafter(mass[-1], 0.0)), side="right"))
