"""Requests that go on from what another one computed: choices of one prompt, beams of a search.

```
leader      prompt, one step or several  |  its own tokens
follower    held back                    |  its last token: whole blocks shared, the tail copied
```
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloom.kv.hit import PrefixHit
from kvloom.kv.manager import KVCacheManager
from kvloom.request import Request, RequestStatus


@dataclass(slots=True)
class _Group:
    """The requests that wait to fork one leader.

    Attributes:
        num_tokens: leading tokens they share with it: all of theirs but the last.
        is_held_back: they are not in line, because the leader is still to compute these tokens.
    """

    leader: Request
    num_tokens: int
    is_held_back: bool = True
    followers: list[Request] = field(default_factory=list)

    @property
    def is_leader_on_its_way(self) -> bool:
        """Whether the leader will compute the shared tokens in its first run."""
        status = self.leader.status
        has_left = status.is_finished or status is RequestStatus.PREEMPTED
        return not has_left and self.leader.num_computed_tokens < self.num_tokens


class Forks:
    """Holds followers back while their leader computes; then their hit is all that they share.

    Nobody waits for what may never come. Followers of a leader that ended or was preempted before
    it had their tokens join the line as others do. So do those that found no room while the leader
    could be forked: if it has ended by then, or a window of it has moved on, they look for a hit.

    A fork point is open within one `schedule`, or from the end of its leader until the end of the
    next one; blocks that it alone holds are given up before any request gives way.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv = kv_cache_manager
        self._groups: dict[Request, _Group] = {}  # by leader

    @property
    def num_held_back(self) -> int:
        """Followers that are not in line."""
        return sum(len(g.followers) for g in self._groups.values() if g.is_held_back)

    def add(self, request: Request) -> bool:
        """Take a new request under watch; whether it is held back and does not join the line."""
        leader, num_tokens = request.leader, request.num_tokens - 1
        if leader is None or num_tokens == 0 or leader.status.is_finished:
            return False
        group = self._groups.setdefault(leader, _Group(leader, num_tokens))
        if group.num_tokens != num_tokens or not group.is_held_back:
            return False
        group.followers.append(request)
        return True

    def forget(self, request: Request) -> bool:
        """Drop a request that entered or ended; whether it was held back until now."""
        leader, request.leader = request.leader, None
        group = None if leader is None else self._groups.get(leader)
        if group is None or request not in group.followers:
            return False
        group.followers.remove(request)
        if not group.followers:
            self._kv.close_fork_point(group.leader)
            del self._groups[group.leader]
        return group.is_held_back

    def leader_ends(self, leader: Request) -> None:
        """Keep for its followers what a request has that is about to end."""
        group = self._groups.get(leader)
        if group is not None and leader.num_computed_tokens >= group.num_tokens:
            self._kv.open_fork_point(leader, group.num_tokens)

    def start_step(self) -> list[Request]:
        """Open the fork points of the step; the followers that join the line now."""
        joining: list[Request] = []
        for group in self._groups.values():
            if group.is_leader_on_its_way:
                continue
            if group.leader.status is RequestStatus.RUNNING:
                self._kv.open_fork_point(group.leader, group.num_tokens)
            if group.is_held_back:
                group.is_held_back = False
                joining += group.followers
        return joining

    def end_step(self) -> bool:
        """Close the fork points; who has not entered can fork a leader only while that runs.

        Returns:
            Whether there were any.
        """
        had_points = self.close_points()
        for group in list(self._groups.values()):
            if group.leader.status.is_finished and not group.is_held_back:
                del self._groups[group.leader]
        return had_points

    def get_hit(self, request: Request) -> PrefixHit | None:
        """What a follower shares with its leader, if that can be forked in this step."""
        leader = request.leader
        fork = None if leader is None else self._kv.get_fork(request, leader)
        if leader is not None and fork is not None:
            # Equal tokens have equal hashes.
            num_hashes = fork.num_tokens // self._kv.block_size
            request.block_hashes = leader.block_hashes[:num_hashes]
        return fork

    def close_points(self) -> bool:
        """Close the open fork points; whether there were any."""
        return sum(self._kv.close_fork_point(leader) for leader in self._groups) > 0
