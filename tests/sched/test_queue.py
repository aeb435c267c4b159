from __future__ import annotations

import random

import pytest

from kvloom.request import Request, ResolvedSamplingParams
from kvloom.sched.queue import PLACES_PER_PRIORITY, RequestQueue, place_of


def make_request(arrival: int) -> Request:
    request = Request(str(arrival), [1], ResolvedSamplingParams(seed=0, max_tokens=1))
    request.place = place_of(0, arrival)
    return request


def test_order_is_arrival_whenever_a_request_joins():
    rng = random.Random(3)
    queue = RequestQueue()
    inside: dict[int, Request] = {}
    outside = {i: make_request(i) for i in range(20)}
    for _ in range(1000):
        if outside and rng.random() < 0.5:
            request = outside.pop(rng.choice(list(outside)))
            queue.add(request)
            inside[request.place[1]] = request
        elif inside and rng.random() < 0.8:
            request = inside.pop(rng.choice(list(inside)))
            queue.remove(request)
            outside[request.place[1]] = request
        elif inside:
            request = queue.pop_last()
            assert request is inside.pop(max(inside))
            outside[request.place[1]] = request
        assert [r.place[1] for r in queue] == sorted(inside)
        assert len(queue) == len(inside)


def test_the_front_is_a_copy():
    queue = RequestQueue()
    for i in range(4):
        queue.add(make_request(i))
    front = queue.first(2)
    queue.remove(front[0])
    assert [r.place[1] for r in front] == [0, 1]
    assert next(iter(queue)).place[1] == 1
    assert len(queue.first(99)) == 3


def test_a_request_out_of_line_cannot_leave_it():
    queue = RequestQueue()
    queue.add(make_request(1))
    with pytest.raises(AssertionError, match="not in line"):
        queue.remove(make_request(1))


def test_a_lower_priority_goes_first_and_equal_ones_by_arrival():
    asked = [(1, 0), (0, 1), (-5, 2), (0, 3), (1, 4), (-5, 5)]
    order = sorted(asked, key=lambda one: place_of(*one))
    assert order == [(-5, 2), (-5, 5), (0, 1), (0, 3), (1, 0), (1, 4)]


@pytest.mark.parametrize("num_levels", [1, 3])
def test_a_bounded_number_of_later_requests_overtakes(num_levels):
    waiting = place_of(num_levels, 7)
    later = [place_of(0, arrival) for arrival in range(8, 5000)]
    # The last of them would have the same number as the request, and came later.
    assert sum(place < waiting for place in later) == num_levels * PLACES_PER_PRIORITY - 1
