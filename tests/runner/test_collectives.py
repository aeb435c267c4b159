"""Collectives of in-process ranks: values, order of the sum, and failure of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvloom.models.parallel import TensorParallelRank
from kvloom.runner.collectives import (
    CollectiveAbortedError,
    SingleRankCommunicator,
    make_thread_communicators,
)
from tiny_models import run_ranks


def test_one_rank_needs_no_threads() -> None:
    (communicator,) = make_thread_communicators(1)
    assert isinstance(communicator, SingleRankCommunicator)
    x = np.ones((2, 3), np.float32)
    assert communicator.all_reduce(x) is x
    assert communicator.all_gather(x) is x


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_values_over_many_rounds(world_size: int) -> None:
    def work(rank: TensorParallelRank, communicator: Any) -> list[np.ndarray]:
        results = []
        for round_number in range(50):
            x = np.full((2, rank.rank + 1), 10.0 * round_number + rank.rank, np.float32)
            results.append(communicator.all_gather(x))
            results.append(communicator.all_reduce(x[:, :1]))
        return results

    for results in run_ranks(world_size, work):
        for round_number in range(50):
            values = [10.0 * round_number + rank for rank in range(world_size)]
            row = [value for rank, value in enumerate(values) for _ in range(rank + 1)]
            np.testing.assert_array_equal(results[2 * round_number], [row, row])
            np.testing.assert_array_equal(results[2 * round_number + 1], [[sum(values)]] * 2)


def test_the_sum_has_the_same_bits_on_every_rank_and_leaves_inputs_alone() -> None:
    values = np.array([1e8, 1.0, -1e8, 0.5], np.float32)  # the order of the sum shows

    def work(rank: TensorParallelRank, communicator: Any) -> tuple[np.ndarray, np.ndarray]:
        x = values[rank.rank : rank.rank + 1].copy()
        return communicator.all_reduce(x), x

    in_rank_order = ((values[0] + values[1]) + values[2]) + values[3]
    for rank, (total, x) in enumerate(run_ranks(4, work)):
        assert total.tobytes() == in_rank_order.tobytes()
        assert x[0] == values[rank]


def test_a_failing_rank_stops_the_others() -> None:
    def work(rank: TensorParallelRank, communicator: Any) -> None:
        communicator.all_reduce(np.zeros(1, np.float32))
        if rank.rank == 1:
            raise ValueError("out of luck")
        communicator.all_reduce(np.zeros(1, np.float32))

    errors = run_ranks(3, work)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], CollectiveAbortedError)
    assert isinstance(errors[2], CollectiveAbortedError)


def test_reset_makes_collectives_usable_again() -> None:
    communicators = make_thread_communicators(2)
    communicators[0].abort()
    with pytest.raises(CollectiveAbortedError, match="another tensor-parallel rank failed"):
        communicators[1].all_reduce(np.zeros(1, np.float32))
    communicators[0].reset()

    def work(rank: TensorParallelRank, _: Any) -> np.ndarray:
        return communicators[rank.rank].all_reduce(np.ones(1, np.float32))

    assert run_ranks(2, work) == [2.0, 2.0]
