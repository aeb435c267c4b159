"""What a request need not compute when it enters."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.kv.block import KVCacheBlock


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache has of a request: good until the next call that changes the manager.

    Attributes:
        num_tokens: leading tokens that need not be computed; whole blocks of every group, but for
            a fork.
        blocks: per group, the block table of these tokens: null blocks, then those that the next
            query sees. Empty where there is nothing.
        num_queried_tokens: tokens the user's request asked for; 0 where nothing was asked.
        tails: of a fork, per group: the block with the tokens behind `blocks`, which belongs to
            another request and is to be copied; None where the next query sees no such token.
    """

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]
    num_queried_tokens: int
    tails: tuple[KVCacheBlock | None, ...] = ()


NO_HIT = PrefixHit(num_tokens=0, blocks=(), num_queried_tokens=0)
