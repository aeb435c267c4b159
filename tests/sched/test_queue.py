from __future__ import annotations

import random

import pytest

from kvloom.request import Request, ResolvedSamplingParams
from kvloom.sched.queue import RequestQueue


def make_request(arrival: int) -> Request:
    request = Request(str(arrival), [1], ResolvedSamplingParams(seed=0, max_tokens=1))
    request.arrival = arrival
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
            inside[request.arrival] = request
        elif inside and rng.random() < 0.8:
            request = inside.pop(rng.choice(list(inside)))
            queue.remove(request)
            outside[request.arrival] = request
        elif inside:
            request = queue.pop_newest()
            assert request is inside.pop(max(inside))
            outside[request.arrival] = request
        assert [r.arrival for r in queue] == sorted(inside)
        assert len(queue) == len(inside)


def test_the_front_is_a_copy():
    queue = RequestQueue()
    for i in range(4):
        queue.add(make_request(i))
    front = queue.first(2)
    queue.remove(front[0])
    assert [r.arrival for r in front] == [0, 1]
    assert next(iter(queue)).arrival == 1
    assert len(queue.first(99)) == 3


def test_a_request_out_of_line_cannot_leave_it():
    queue = RequestQueue()
    queue.add(make_request(1))
    with pytest.raises(AssertionError, match="not in line"):
        queue.remove(make_request(1))
