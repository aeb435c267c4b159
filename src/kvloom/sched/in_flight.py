"""The steps that were scheduled and are not updated yet, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvloom.request import Request
from kvloom.step import SchedulerOutput


@dataclass(slots=True)
class StepInFlight:
    """A step that workers run, or will run.

    Attributes:
        requests: those it computes tokens of, in the order of `output.num_scheduled_tokens`.
        ended: requests that ended meanwhile and keep their blocks until this step is over.
    """

    output: SchedulerOutput
    requests: Sequence[Request]
    ended: list[Request] = field(default_factory=list)


class StepsInFlight:
    """Knows which requests workers may still read and write the blocks of."""

    def __init__(self, max_model_len: int, runs_ahead: bool) -> None:
        """`runs_ahead`: a request may be in a step before the one before it is updated."""
        self._max_model_len = max_model_len
        self._runs_ahead = runs_ahead
        self._steps: deque[StepInFlight] = deque()

    def begin(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Add the step that was just scheduled."""
        self._steps.append(StepInFlight(output, requests))

    def end(self, output: SchedulerOutput) -> StepInFlight:
        """Take out the oldest step, which must be that of `output`."""
        step = self._steps.popleft()
        assert step.output is output, "steps are updated in the order they were scheduled in"
        return step

    def keep_blocks(self, request: Request) -> bool:
        """Whether a step names `request`, which has ended: then the last such step frees it."""
        for step in reversed(self._steps):
            if request in step.requests:
                step.ended.append(request)
                return True
        return False

    def names_ended(self, req_id: str) -> bool:
        """Whether a request of that id has ended and still keeps its blocks."""
        return any(r.req_id == req_id for step in self._steps for r in step.ended)

    def may_run_ahead(self, request: Request) -> bool:
        """Whether the token that the step in flight samples may be computed: others will follow."""
        num_tokens = request.num_tokens + 1
        return (
            self._runs_ahead
            and request.runs_ahead
            and num_tokens < self._max_model_len
            and num_tokens - request.num_prompt_tokens < request.sampling_params.max_tokens
        )

    def may_follow(self, running: Iterable[Request]) -> bool:
        """Whether another step may follow: one that runs, and one that is made ready meanwhile.

        Not if one of those that run could not be in it: that would get less than its turn. Nor if
        none of them would be: those that wait can enter once the last one is updated.
        """
        if len(self._steps) != 1 or not self._runs_ahead:
            return not self._steps
        return all(r.runs_ahead for r in running) and any(
            r.num_computed_tokens < r.num_tokens or self.may_run_ahead(r) for r in running
        )
