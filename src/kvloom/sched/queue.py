"""The order among requests, and requests in line in that order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from kvloom.request import Request

# One level of priority is worth so many places in line, so that nobody waits forever.
PLACES_PER_PRIORITY = 1000


def place_of(priority: int, arrival: int) -> tuple[int, int]:
    """Where the request that came `arrival`-th stands among all others, those to come included.

    Of one priority, the first comes first. With each level that it is lower, a request overtakes
    `PLACES_PER_PRIORITY` that came before it, and no more: so many are the most that ever overtake
    one request from the next level, twice as many from the one after that.
    """
    return arrival + PLACES_PER_PRIORITY * priority, arrival


def _place(request: Request) -> tuple[int, int]:
    return request.place


class RequestQueue:
    """Requests sorted by place, whenever they join: a preempted one gets its old place back."""

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
        """Let `request` join at its place."""
        insort(self._requests, request, key=_place)

    def remove(self, request: Request) -> None:
        """Take `request`, which is in line, out of it."""
        index = bisect_left(self._requests, request.place, key=_place)
        assert self._requests[index] is request, f"{request.req_id} is not in line"
        del self._requests[index]

    def pop_last(self) -> Request:
        """Take out the request at the end."""
        return self._requests.pop()
