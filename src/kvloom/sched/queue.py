"""Requests in line, the one that arrived first in front."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from kvloom.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class RequestQueue:
    """Requests sorted by arrival, whenever they join: a preempted one gets its old place back."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self, num_requests: int) -> list[Request]:
        """The `num_requests` requests in front, as a new list."""
        return list(islice(self._requests, num_requests))

    def add(self, request: Request) -> None:
        """Let `request` join at the place of its arrival."""
        insort(self._requests, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Take `request`, which is in line, out of it."""
        index = bisect_left(self._requests, request.arrival, key=_arrival)
        assert self._requests[index] is request, f"{request.req_id} is not in line"
        del self._requests[index]

    def pop_newest(self) -> Request:
        """Take out the request that arrived last."""
        return self._requests.pop()
