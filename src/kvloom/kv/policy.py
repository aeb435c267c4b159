"""What an attention kind asks of the cache. One class per spec; nothing else tells kinds apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvloom.errors import ConfigError
from kvloom.kv.block import KVCacheBlock
from kvloom.kv.pool import BlockPool
from kvloom.kv.spec import FullAttentionSpec, KVCacheSpec, cdiv


class Policy(Protocol):
    """How the blocks of one group follow the tokens of a request."""

    def num_blocks(self, num_tokens: int) -> int:
        """Columns of the block table that `num_tokens` stored tokens reach into."""
        ...

    def longest_hit(
        self, pool: BlockPool, group: int, block_hashes: Sequence[bytes]
    ) -> list[KVCacheBlock]:
        """Cached blocks for the longest usable prefix of `block_hashes`."""
        ...


class FullAttentionPolicy:
    """Every block stays needed; a prefix is usable as far as every block of it is cached."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self._block_size = spec.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """One column per started block."""
        return cdiv(num_tokens, self._block_size)

    def longest_hit(
        self, pool: BlockPool, group: int, block_hashes: Sequence[bytes]
    ) -> list[KVCacheBlock]:
        """The cached blocks before the first one that is missing."""
        hit: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            block = pool.find((group, block_hash))
            if block is None:
                break
            hit.append(block)
        return hit


POLICIES: dict[type[KVCacheSpec], type[FullAttentionPolicy]] = {
    FullAttentionSpec: FullAttentionPolicy,
}


def make_policy(spec: KVCacheSpec) -> Policy:
    """The policy of `spec`'s attention kind.

    Raises:
        ConfigError: the kind cannot be cached yet.
    """
    policy = POLICIES.get(type(spec))
    if policy is None:
        known = ", ".join(kind.__name__ for kind in POLICIES)
        raise ConfigError(
            f"layers of kind {type(spec).__name__} cannot be cached; "
            f"run a model whose layers are all of {known}"
        )
    return policy(spec)
