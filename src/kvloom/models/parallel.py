"""How a model is cut over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.errors import ParallelSizeError


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """One rank of `world_size`, counted from 0."""

    rank: int = 0
    world_size: int = 1

    def share(self, size: int) -> tuple[int, int]:
        """The run [start, stop) of `size` rows or columns that this rank keeps.

        Shares differ by at most one where `size` does not divide.
        """
        return size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank: runs of the model's query and KV heads."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int


def valid_parallel_sizes(num_heads: int, num_kv_heads: int) -> list[int]:
    """Sizes that cut query heads evenly and either cut or evenly copy KV heads."""
    return [
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]


def share_heads(num_heads: int, num_kv_heads: int, rank: TensorParallelRank) -> HeadShare:
    """The heads of `rank`; a KV head is copied to several ranks when there are more ranks.

    Raises:
        ParallelSizeError: the heads cannot be cut so; the message lists the sizes that work.
    """
    size = rank.world_size
    valid = valid_parallel_sizes(num_heads, num_kv_heads)
    if size not in valid:
        raise ParallelSizeError(
            f"tensor-parallel size {size} does not fit {num_heads} query heads and {num_kv_heads} "
            f"KV heads; valid sizes are {', '.join(map(str, valid))}"
        )
    heads_per_rank = num_heads // size
    return HeadShare(
        first_head=rank.rank * heads_per_rank,
        num_heads=heads_per_rank,
        first_kv_head=rank.rank * num_kv_heads // size,
        num_kv_heads=max(num_kv_heads // size, 1),
    )
