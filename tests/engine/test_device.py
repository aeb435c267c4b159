"""The order in which a device is given what a step consists of."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

import pytest

from kvloom.engine.device import Device
from kvloom.runner.step_handle import StepHandle


class RecordingExecutor:
    """Names every call; `may_follow`: a step may start before the one before it is sampled."""

    def __init__(self, may_follow: bool = True) -> None:
        self.may_follow = may_follow
        self.calls: list[str] = []
        self.failing = ""

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.failing:
            raise RuntimeError(call)

    def prepare_step(self, output: Any) -> bool:
        self._note(f"prepare {output}")
        return self.may_follow

    def execute_model(self, output: Any) -> StepHandle:
        self._note(f"execute {output}")
        return StepHandle(logits=output, num_padded_tokens=7)

    def start_sampling(self, handle: StepHandle, mask: Any) -> None:
        self._note(f"start {handle.logits} with {mask}")

    def sample_tokens(self, handle: StepHandle, mask: Any) -> Any:
        self._note(f"sample {handle.logits} with {mask}")
        return f"tokens of {handle.logits}"


def make_device(executor: Any) -> Device:
    return Device(executor, lambda output: f"mask {output}")  # type: ignore[arg-type,return-value]  # plain names stand for steps


def begin(device: Device, name: str) -> Any:
    return device.begin(name)  # type: ignore[arg-type]  # as above


def test_steps_one_by_one() -> None:
    executor = RecordingExecutor()
    device = make_device(executor)
    for name in "ab":
        result = begin(device, name)()
        assert (result.output, result.num_padded_tokens) == (f"tokens of {name}", 7)
        assert result.seconds >= 0.0
    assert executor.calls == [
        "execute a",
        "sample a with mask a",
        "execute b",
        "sample b with mask b",
    ]


def test_a_step_is_queued_behind_the_sampling_of_the_one_before() -> None:
    executor = RecordingExecutor()
    device = make_device(executor)
    first = begin(device, "a")
    second = begin(device, "b")
    assert executor.calls == ["execute a", "start a with mask a", "prepare b", "execute b"]
    assert first().output == "tokens of a"
    assert second().output == "tokens of b"
    assert executor.calls[4:] == ["sample a with mask a", "sample b with mask b"]


def test_a_step_that_must_wait_starts_as_soon_as_the_one_before_is_sampled() -> None:
    executor = RecordingExecutor(may_follow=False)
    device = make_device(executor)
    first, second = begin(device, "a"), begin(device, "b")
    assert executor.calls == ["execute a", "start a with mask a", "prepare b"]
    first()
    assert executor.calls[3:] == ["sample a with mask a", "execute b"]
    assert second().output == "tokens of b"


@pytest.mark.parametrize("may_follow", [True, False])
@pytest.mark.parametrize("call", ["prepare b", "execute b"])
def test_who_waits_for_a_step_hears_why_it_did_not_start(may_follow: bool, call: str) -> None:
    executor = RecordingExecutor(may_follow)
    device = make_device(executor)
    executor.failing = call
    first, second = begin(device, "a"), begin(device, "b")
    assert first().output == "tokens of a"
    with pytest.raises(RuntimeError, match=call):
        second()


def test_a_step_that_fails_takes_along_the_one_behind_it() -> None:
    executor = RecordingExecutor()
    device = make_device(executor)
    first, second = begin(device, "a"), begin(device, "b")
    executor.failing = "sample a with mask a"
    with pytest.raises(RuntimeError):
        first()
    device.cancel()
    with pytest.raises(CancelledError):
        second()
    assert begin(device, "c")().output == "tokens of c"
