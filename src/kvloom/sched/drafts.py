"""Speculation: drafts are guessed tokens, which a step computes behind the known ones.

A draft is never a known token: the step samples a token at each of its positions, and those that
equal the drafts before them are taken. So a proposer decides how fast a text comes, and not what
it says.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvloom.config import SpeculativeConfig
from kvloom.request import Request

_MAX_PLACES = 16  # looked at per proposal, the latest first


class DraftProposer(Protocol):
    """Guesses how texts go on."""

    def propose(self, req_id: str, token_ids: Sequence[int], max_num_tokens: int) -> list[int]:
        """At most `max_num_tokens` tokens that may follow a request's known `token_ids`.

        From one call to the next a request's known tokens only grow. None is an answer.
        """

    def forget(self, req_id: str) -> None:
        """A request ended; also told of those that nothing was proposed for."""


class Speculation:
    """Asks for drafts within the limits of a request, and counts what became of them.

    Attributes:
        num_draft_tokens: drafts that were computed.
        num_accepted_tokens: those that became output tokens, or would have if none ended the text.
    """

    def __init__(self, proposer: DraftProposer, num_draft_tokens: int, max_model_len: int) -> None:
        """At most `num_draft_tokens` drafts per request and step."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._proposer = proposer
        self._most = num_draft_tokens
        self._max_model_len = max_model_len

    def propose(self, request: Request, max_num_tokens: int) -> list[int]:
        """At most `max_num_tokens` drafts, and none that could not be followed by a token."""
        num_left = min(
            request.sampling_params.max_tokens - request.num_output_tokens,
            self._max_model_len - request.num_tokens,
        )
        num_tokens = min(self._most, max_num_tokens, num_left - 1)
        if num_tokens <= 0:
            return []
        return self._proposer.propose(request.req_id, request.token_ids, num_tokens)

    def count(
        self, drafts: Mapping[str, list[int]], sampled_token_ids: Mapping[str, list[int]]
    ) -> None:
        """Compare the drafts of a step with the tokens it sampled."""
        for req_id, draft_token_ids in drafts.items():
            self.num_draft_tokens += len(draft_token_ids)
            token_ids = sampled_token_ids.get(req_id, [])
            # Tokens end with the first one that differs from its draft, or behind the last draft.
            self.num_accepted_tokens += sum(map(operator.eq, draft_token_ids, token_ids))

    def forget(self, req_id: str) -> None:
        """A request ended."""
        self._proposer.forget(req_id)


def make_speculation(config: SpeculativeConfig, max_model_len: int) -> Speculation | None:
    """What `config` asks for; None when it is off."""
    if config.num_draft_tokens == 0:
        return None
    return Speculation(NgramProposer(config), config.num_draft_tokens, max_model_len)


class NgramProposer:
    """Continues a text as it went on where its last tokens stood before: prompt lookup.

    Each place in the text is indexed once, when the token behind it is known.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indices: dict[str, _NgramIndex] = {}

    def propose(self, req_id: str, token_ids: Sequence[int], max_num_tokens: int) -> list[int]:
        """What followed where the most of the last tokens stood before; the latest such place."""
        index = self._indices.get(req_id)
        if index is None:
            index = self._indices[req_id] = _NgramIndex(self._config.min_ngram_tokens)
        index.extend(token_ids)
        end = index.find(token_ids, self._config.max_ngram_tokens)
        if end is None:
            return []
        # A place less than a draft's length back repeats itself: the drafts go on from drafts.
        period = len(token_ids) - end
        drafts = list(token_ids[end : end + max_num_tokens])
        while len(drafts) < max_num_tokens:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def forget(self, req_id: str) -> None:
        """Drop its index."""
        self._indices.pop(req_id, None)


class _NgramIndex:
    """Where each n-gram of one text ended, and a token is known behind it."""

    def __init__(self, num_tokens: int) -> None:
        """N-grams of `num_tokens` tokens."""
        self._num_tokens = num_tokens
        self._latest: dict[tuple[int, ...], int] = {}  # the last end of each n-gram
        self._earlier: list[int | None] = []  # per end, from the first: the one before of its kind

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what was added to the text."""
        size, latest = self._num_tokens, self._latest
        for end in range(size + len(self._earlier), len(token_ids)):
            ngram = tuple(token_ids[end - size : end])
            self._earlier.append(latest.get(ngram))
            latest[ngram] = end

    def find(self, token_ids: Sequence[int], max_num_tokens: int) -> int | None:
        """Where the most last tokens of the text, up to `max_num_tokens`, ended before."""
        best, num_best = None, 0
        end = self._latest.get(tuple(token_ids[-self._num_tokens :]))
        for _ in range(_MAX_PLACES):
            if end is None or num_best == max_num_tokens:
                break
            num_equal = self._num_equal(token_ids, end, max_num_tokens)
            if num_equal > num_best:
                best, num_best = end, num_equal
            end = self._earlier[end - self._num_tokens]
        return best

    def _num_equal(self, token_ids: Sequence[int], end: int, most: int) -> int:
        """How many of the last tokens stand before `end`, too; at least the n-gram's."""
        num_equal, last = self._num_tokens, len(token_ids)
        most = min(most, end)
        while (
            num_equal < most and token_ids[end - 1 - num_equal] == token_ids[last - 1 - num_equal]
        ):
            num_equal += 1
        return num_equal
