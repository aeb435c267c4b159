"""Collectives between the tensor-parallel ranks of one process: one thread per rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvloom.errors import KvloomError

Array = npt.NDArray[np.float32]


class CollectiveAbortedError(KvloomError):
    """Another rank failed, so this one cannot go on; the other rank's error is the cause."""


class SingleRankCommunicator:
    """The only rank: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: Array) -> Array:
        """`x` itself."""
        return x

    def all_gather(self, x: Array) -> Array:
        """`x` itself."""
        return x


class _Exchange:
    """What the ranks share: one slot each, and the barrier they meet at."""

    def __init__(self, world_size: int) -> None:
        self.slots: list[Array | None] = [None] * world_size
        self.barrier = threading.Barrier(world_size)


class ThreadCommunicator:
    """One rank of several; all ranks call the same collectives in the same order.

    A rank that fails must call `abort`, else the others wait for it forever.
    """

    def __init__(self, rank: int, exchange: _Exchange) -> None:
        self.rank = rank
        self.world_size = len(exchange.slots)
        self._exchange = exchange

    def all_reduce(self, x: Array) -> Array:
        """Sum over ranks, in rank order on every rank, so that all hold the same bits.

        Raises:
            CollectiveAbortedError: another rank aborted.
        """
        parts = self._gather_parts(x)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def all_gather(self, x: Array) -> Array:
        """Ranks' values side by side along the last axis, in rank order.

        Raises:
            CollectiveAbortedError: another rank aborted.
        """
        return np.concatenate(self._gather_parts(x), axis=-1)

    def abort(self) -> None:
        """Make every rank's current and later collectives raise, until `reset`."""
        self._exchange.barrier.abort()

    def reset(self) -> None:
        """Make collectives usable again after `abort`; call when no rank is inside one."""
        self._exchange.barrier.reset()

    def _gather_parts(self, x: Array) -> Sequence[Array]:
        exchange = self._exchange
        try:
            exchange.slots[self.rank] = x
            exchange.barrier.wait()
            parts = [part for part in exchange.slots if part is not None]
            # Nobody may put the next value down before everybody has picked this one up.
            exchange.barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveAbortedError(
                f"rank {self.rank} stopped because another tensor-parallel rank failed; "
                "see that rank's error"
            ) from None
        return parts


def make_thread_communicators(
    world_size: int,
) -> list[SingleRankCommunicator] | list[ThreadCommunicator]:
    """One communicator per rank, each for its own thread."""
    if world_size == 1:
        return [SingleRankCommunicator()]
    exchange = _Exchange(world_size)
    return [ThreadCommunicator(rank, exchange) for rank in range(world_size)]
