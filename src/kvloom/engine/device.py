"""Runs steps on the device, in order: one at once, and one that is made ready meanwhile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial

from kvloom.runner.executor import InProcessExecutor
from kvloom.runner.step_handle import StepHandle
from kvloom.step import ModelRunnerOutput, SchedulerOutput, TokenMask

MakeTokenMask = Callable[[SchedulerOutput], TokenMask | None]


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """What a step computed, how long forward pass and sampling took, and over how many tokens.

    Attributes:
        num_padded_tokens: those of the forward pass, padding included.
    """

    output: ModelRunnerOutput
    seconds: float
    num_padded_tokens: int


@dataclass(slots=True)
class _Step:
    """A step that was begun.

    Attributes:
        handle: once its forward pass has started, or is queued behind the step before.
        start: when it was its turn.
        mask: one entry once the tokens it may sample are known.
        error: what stopped it; whoever waits for it hears of it.
    """

    output: SchedulerOutput
    handle: StepHandle | None = None
    start: float = 0.0
    mask: list[TokenMask | None] = field(default_factory=list)
    error: BaseException | None = None


class Device:
    """Steps in, results out. A step that fails takes along those that were begun after it.

    The forward pass of a step goes on while its caller does something else, where the backend can:
    what a step needs of the host is done while the step before it runs.
    """

    def __init__(self, executor: InProcessExecutor, make_token_mask: MakeTokenMask) -> None:
        """`make_token_mask` is called for each step once its forward pass has started."""
        self._executor = executor
        self._make_token_mask = make_token_mask
        self._steps: deque[_Step] = deque()

    def begin(self, output: SchedulerOutput) -> Callable[[], DeviceResult]:
        """Start a step, or get it ready to start; call what is returned once for its result.

        Results are asked for in the order of the steps.
        """
        step = _Step(output)
        before = self._steps[-1] if self._steps else None
        self._steps.append(step)
        self._attempt(step, self._start if before is None else partial(self._follow, before))
        return partial(self._end, step)

    def cancel(self) -> None:
        """Run none of the steps that were begun and did not start yet."""
        self._steps.clear()

    def _attempt(self, step: _Step, act: Callable[[_Step], None]) -> None:
        try:
            act(step)
        except BaseException as error:  # noqa: BLE001  # raised again for who waits for the step
            step.error = error

    def _start(self, step: _Step) -> None:
        step.start = time.perf_counter()
        step.handle = self._executor.execute_model(step.output)

    def _follow(self, before: _Step, step: _Step) -> None:
        """Get a step ready behind one that runs; start it already, if it need not wait."""
        if before.handle is not None:
            self._executor.start_sampling(before.handle, self._mask_of(before))
        if self._executor.prepare_step(step.output):
            self._start(step)

    def _end(self, step: _Step) -> DeviceResult:
        if not self._steps or self._steps[0] is not step:
            raise CancelledError  # nobody waits for it: who heard of the failure gave it up, too
        if step.error is not None:
            raise step.error
        assert step.handle is not None  # it started when the one before it ended
        output = self._executor.sample_tokens(step.handle, self._mask_of(step))
        now = time.perf_counter()
        result = DeviceResult(output, now - step.start, step.handle.num_padded_tokens)
        self._steps.popleft()
        if self._steps:
            self._turn_to(self._steps[0], now)
        return result

    def _mask_of(self, step: _Step) -> TokenMask | None:
        if not step.mask:
            step.mask.append(self._make_token_mask(step.output))
        return step.mask[0]

    def _turn_to(self, step: _Step, now: float) -> None:
        if step.handle is not None:
            step.start = now
        elif step.error is None:
            self._attempt(step, self._start)
