"""What an attention kind asks of the cache. One class per spec; nothing else tells kinds apart.

A kind is told by what a query sees. Which blocks a request needs, when one is needed no more, and
which cached blocks make a prefix usable all follow from that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvloom.errors import ConfigError
from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

NEVER = sys.maxsize  # a position that no request reaches


class Policy:
    """What a query at a position sees: its own token, and all from the first visible one on.

    The first visible token never lies further back for a later query.
    """

    def __init__(self, spec: KVCacheSpec) -> None:
        self._block_size = spec.block_size

    def first_visible_token(self, position: int) -> int:
        """The first token that the query at `position` sees."""
        raise NotImplementedError  # abstract: every kind below answers it

    def first_blind_position(self, token: int) -> int:
        """The first query after `token` that does not see it; `NEVER` if there is none."""
        raise NotImplementedError  # abstract: every kind below answers it

    def first_visible_column(self, position: int) -> int:
        """The block table's first column that the query at `position` needs."""
        return self.first_visible_token(position) // self._block_size

    def longest_hit(self, is_cached: Callable[[int], bool], num_tokens: int, step: int) -> int:
        """The longest usable prefix of at most `num_tokens` tokens, in multiples of `step`.

        A prefix is usable if every column that the query behind it sees is cached.
        ```
        a query sees 3 columns back, x is not cached      0 1 2 x 4 x 6 7
        prefix of all 8                                             x       lacks column 5
        prefix of 5: every one that is longer needs x         2 x           lacks column 3
        prefix of 3                                       0 1 2             usable
        ```
        No column is asked for twice.

        Args:
            is_cached: whether a column of the block table is cached.
            num_tokens: where the longest prefix ends.
            step: a multiple of the block size.
        """
        num_tokens -= num_tokens % step
        first_known = num_tokens // self._block_size  # cached from here to the prefix's end
        while True:
            first = self.first_visible_column(num_tokens)
            unknown = range(first, min(first_known, num_tokens // self._block_size))
            missing = next((column for column in unknown if not is_cached(column)), None)
            if missing is None:
                return num_tokens
            # Every longer prefix needs the missing column, too.
            num_tokens = missing * self._block_size
            num_tokens -= num_tokens % step
            first_known = first


class FullAttentionPolicy(Policy):
    """A query sees every token before it."""

    def first_visible_token(self, position: int) -> int:
        """The first of all."""
        return 0

    def first_blind_position(self, token: int) -> int:
        """A token stays visible."""
        return NEVER


class SlidingWindowPolicy(Policy):
    """A query sees the last `sliding_window` tokens, its own included."""

    def __init__(self, spec: SlidingWindowSpec) -> None:
        super().__init__(spec)
        self._window = spec.sliding_window

    def first_visible_token(self, position: int) -> int:
        """The window's first."""
        return max(position - self._window + 1, 0)

    def first_blind_position(self, token: int) -> int:
        """Behind the last window that holds it."""
        return token + self._window


class ChunkedLocalPolicy(Policy):
    """A query sees its own aligned chunk of `attention_chunk_size` tokens."""

    def __init__(self, spec: ChunkedLocalAttentionSpec) -> None:
        super().__init__(spec)
        self._chunk = spec.attention_chunk_size

    def first_visible_token(self, position: int) -> int:
        """The chunk's first."""
        return position - position % self._chunk

    def first_blind_position(self, token: int) -> int:
        """The next chunk's first."""
        return token - token % self._chunk + self._chunk


POLICIES: dict[type[KVCacheSpec], Callable[[Any], Policy]] = {
    FullAttentionSpec: FullAttentionPolicy,
    MLAAttentionSpec: FullAttentionPolicy,
    SlidingWindowSpec: SlidingWindowPolicy,
    ChunkedLocalAttentionSpec: ChunkedLocalPolicy,
}


def make_policy(spec: KVCacheSpec) -> Policy:
    """The policy of `spec`'s attention kind.

    Raises:
        ConfigError: there is none, as for a layer that stores nothing.
    """
    policy = POLICIES.get(type(spec))
    if policy is None:
        known = ", ".join(kind.__name__ for kind in POLICIES)
        raise ConfigError(
            f"layers of kind {type(spec).__name__} have no blocks of their own; "
            f"make groups of {known}"
        )
    return policy(spec)
