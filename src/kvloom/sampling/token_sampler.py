"""What a runner asks of a sampler: the reference's `Sampler`, or the native library's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.logits import FloatArray, SamplingRow
from kvloom.sampling.sampler import SampleResult
from kvloom.step import TokenLogprobs


class Sampling(Protocol):
    """A `sample` that was started.

    Attributes:
        token_ids: int32 [num_rows], once it is done.
    """

    token_ids: NDArray[np.int32]

    def finish(self) -> SampleResult:
        """Wait for it."""


class TokenSampler(Protocol):
    """Chooses tokens; `kvloom.sampling.sampler.Sampler` says how."""

    @property
    def scratch_bytes(self) -> int:
        """Memory it takes while it samples, whatever the rows ask for."""

    def asks_best_only(self, params: Iterable[ResolvedSamplingParams]) -> bool:
        """Whether logits may be kept as `Batch.wants_best_only` says, if requests want no more.

        `are_best_only` tells it below that they were.
        """

    def sample(
        self,
        logits: FloatArray,
        rows: Sequence[SamplingRow],
        grammar: NDArray[np.uint32] | None = None,
        grammar_rows: Sequence[int] = (),
        are_best_only: bool = False,
    ) -> SampleResult:
        """Choose one token per row of `logits` [num_rows, vocab_size], of those allowed."""

    def start(
        self,
        logits: FloatArray,
        rows: Sequence[SamplingRow],
        grammar: NDArray[np.uint32] | None = None,
        grammar_rows: Sequence[int] = (),
        are_best_only: bool = False,
    ) -> Sampling | None:
        """`sample` of logits that are not there yet; None if it cannot."""

    def prompt_logprobs(
        self, logits: FloatArray, next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score each prompt token by the row of `logits` of the position before it."""
