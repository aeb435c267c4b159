"""Where a parameter's values lie in a checkpoint, and how they are arranged on their way in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """Keeps [start, stop) along one axis, every `step`-th: a rank's share, or one of many."""

    axis: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same values in the same order, in another shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapAxes:
    """Exchanges two axes, as for a matrix that is stored [in, out]."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a constant to every value, as for norms that weigh by 1 + w."""

    constant: float


Step = Slice | Reshape | SwapAxes | Add


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor that makes up (a part of) a parameter.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: its shape there.
        steps: what is done to it, in order.
    """

    name: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()
