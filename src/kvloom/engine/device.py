"""Runs steps on the device, in order: at once, or on a thread while the next one is scheduled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvloom.runner.executor import InProcessExecutor
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


class Device:
    """Steps in, results out. A step that fails takes along those that were begun after it."""

    def __init__(
        self, executor: InProcessExecutor, make_token_mask: MakeTokenMask, has_thread: bool
    ) -> None:
        """`make_token_mask` is called for each step once its forward pass has started."""
        self._executor = executor
        self._make_token_mask = make_token_mask
        self._thread = ThreadPoolExecutor(1, "kvloom-device") if has_thread else None
        self._era = object()  # another one after each failure

    def begin(self, output: SchedulerOutput) -> Callable[[], DeviceResult]:
        """Start a step, or get it ready to start; call what is returned once for its result."""
        run = partial(self._run, output, self._era)
        return run if self._thread is None else self._thread.submit(run).result

    def cancel(self) -> None:
        """Run none of the steps that were begun and did not start yet."""
        self._era = object()

    def shutdown(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, output: SchedulerOutput, era: object) -> DeviceResult:
        if era is not self._era:
            raise CancelledError  # nobody waits for it: who heard of the failure gave it up, too
        start = time.perf_counter()
        try:
            handle = self._executor.execute_model(output)
            result = self._executor.sample_tokens(handle, self._make_token_mask(output))
        except BaseException:
            if era is self._era:
                self.cancel()
            raise
        return DeviceResult(result, time.perf_counter() - start, handle.num_padded_tokens)
