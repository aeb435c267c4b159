"""A model of arithmetic, and proposers that know what it says, and err as often as told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

VOCAB_SIZE = 997


def next_token(prefix: Sequence[int]) -> int:
    """A model: what follows is a function of the whole prefix."""
    return sum((i + 1) * t for i, t in enumerate(prefix)) % VOCAB_SIZE


def sampled_tokens(prefix: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """What it adds to a prefix in one step: one token more than drafts are right."""
    token_ids = [next_token(prefix)]
    for draft in drafts:
        if token_ids[-1] != draft:
            break
        token_ids.append(next_token([*prefix, *token_ids]))
    return token_ids


class Guesser:
    """Drafts of a model, of which some are wrong, and sometimes fewer than there is room for."""

    def __init__(
        self,
        error_rate: float = 0.0,
        seed: int = 0,
        next_token: Callable[[Sequence[int]], int] = next_token,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._next_token = next_token
        self._vocab_size = vocab_size
        self._error_rate = error_rate
        self._rng = random.Random(seed)
        self.forgotten: list[str] = []

    def propose(self, req_id: str, token_ids: Sequence[int], max_num_tokens: int) -> list[int]:
        """Some drafts; behind a wrong one, what would follow it."""
        prefix = list(token_ids)
        for _ in range(
            self._rng.randint(0, max_num_tokens) if self._error_rate else max_num_tokens
        ):
            token_id = self._next_token(prefix)
            if self._rng.random() < self._error_rate:
                token_id = (token_id + 1) % self._vocab_size
            prefix.append(token_id)
        return prefix[len(token_ids) :]

    def forget(self, req_id: str) -> None:
        """Note who is told of."""
        self.forgotten.append(req_id)


class Listed:
    """Drafts from a list, one entry per call."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        self._drafts = list(drafts)

    def propose(self, req_id: str, token_ids: Sequence[int], max_num_tokens: int) -> list[int]:
        """The next entry, as far as there is room for it."""
        return list(self._drafts.pop(0))[:max_num_tokens] if self._drafts else []

    def forget(self, req_id: str) -> None:
        """Nothing is kept by request."""
