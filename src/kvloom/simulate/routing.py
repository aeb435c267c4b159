"""Which replica a request goes to. Ties go to the replica with the lower index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvloom.simulate.replica import LiveRequest, Replica

Route = Callable[[LiveRequest, Sequence[Replica]], Replica]


def round_robin(live: LiveRequest, replicas: Sequence[Replica]) -> Replica:
    """In turn, whatever the replicas do."""
    return replicas[live.record.index % len(replicas)]


def least_loaded(_live: LiveRequest, replicas: Sequence[Replica]) -> Replica:
    """The replica with the fewest tokens yet to compute."""
    return min(replicas, key=lambda replica: replica.num_missing_tokens)


def longest_prefix(live: LiveRequest, replicas: Sequence[Replica]) -> Replica:
    """The replica that would be done first, if tokens take equally long everywhere.

    What its cache has of the prompt it need not compute, but a long line may cost more than that.
    """
    return min(
        replicas,
        key=lambda replica: replica.num_missing_tokens - replica.num_hit_tokens(live),
    )


ROUTES: dict[str, Route] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "longest-prefix": longest_prefix,
}
