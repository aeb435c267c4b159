"""The sizes that a step's arrays may have on a device that compiles for fixed shapes.

Such a device runs one program per shape. It declares a few sizes of each kind, buckets, and a step
is padded to the smallest of each that hold it.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from kvloom.errors import CapacityError, ConfigError
from kvloom.option_types import AUTO, Auto, check_types

Buckets = tuple[int, ...]  # ascending

# Lengths of a prompt's piece that Trainium's attention is compiled for, by its vLLM plugin's list.
_TRAINIUM_SEGMENTS = (512, 1024, 2048, 4096, 8192)
_OPTIONS = ("num_batched_tokens_buckets", "num_seqs_buckets", "context_len_buckets")


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The most a step may hold.

    Attributes:
        num_tokens: over all requests.
        num_reqs: requests.
        context_len: stored tokens of one request, those of the step included.
    """

    num_tokens: int
    num_reqs: int
    context_len: int


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    """Sizes of each kind.

    Attributes:
        num_tokens: of a step, over all requests.
        num_reqs: of a step.
        context_lens: stored tokens of a step's longest request: they set the width of block tables.
        prefill_segment: most tokens of one request in a step.
    """

    num_tokens: Buckets
    num_reqs: Buckets
    context_lens: Buckets
    prefill_segment: int


@dataclass(frozen=True, slots=True)
class ShapeConfig:
    """What steps are padded to. The largest bucket of each kind bounds what a step may hold.

    Attributes:
        has_static_shapes: whether steps are padded; "auto": if buckets are given, or the device
            compiles a program per shape.
        num_batched_tokens_buckets: tokens of a step, over all requests.
        num_seqs_buckets: requests of a step.
        context_len_buckets: stored tokens of a step's longest request. All three ascend; "auto" is
            the device's own list.
    """

    has_static_shapes: bool | Auto = AUTO
    num_batched_tokens_buckets: Buckets | Auto = AUTO
    num_seqs_buckets: Buckets | Auto = AUTO
    context_len_buckets: Buckets | Auto = AUTO

    def __post_init__(self) -> None:
        for name in _OPTIONS:
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        check_types(self)
        for name in _OPTIONS:
            if (given := getattr(self, name)) != AUTO:
                self._check_buckets(name, given)

    def is_static(self, device: str) -> bool:
        """Whether steps on the device are padded."""
        if self.has_static_shapes != AUTO:
            return self.has_static_shapes
        return compiles_shapes(device) or any(getattr(self, name) != AUTO for name in _OPTIONS)

    def resolve(self, device: str, bounds: StepBounds) -> ShapeBuckets:
        """The buckets that steps within the bounds need, or that bound them further."""
        own = declare_buckets(device, bounds)
        return ShapeBuckets(
            _choose(self.num_batched_tokens_buckets, own.num_tokens, bounds.num_tokens),
            _choose(self.num_seqs_buckets, own.num_reqs, bounds.num_reqs),
            _choose(self.context_len_buckets, own.context_lens, bounds.context_len),
            own.prefill_segment,
        )

    def check_length(self, max_model_len: int) -> None:
        """Refuse requests that are longer than the largest context.

        Raises:
            ConfigError: they may be.
        """
        contexts = self.context_len_buckets
        if contexts != AUTO and max_model_len > contexts[-1]:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the largest of context_len_buckets is "
                f"{contexts[-1]}; add {max_model_len} to them, or lower max_model_len"
            )

    def _check_buckets(self, name: str, given: Buckets) -> None:
        if not given or given[0] < 1 or any(a >= b for a, b in itertools.pairwise(given)):
            raise ConfigError(f"{name} is {given}; give positive numbers that ascend")
        if self.has_static_shapes is False:
            raise ConfigError(f"{name} is for static shapes, which are off; leave out one of both")


def find_bucket(buckets: Buckets, size: int, what: str) -> int:
    """The smallest bucket that holds `size`.

    Raises:
        CapacityError: none does; `what` names what the sizes count.
    """
    index = bisect.bisect_left(buckets, size)
    if index == len(buckets):
        raise CapacityError(
            f"a step of {size} {what} is larger than the largest bucket, {buckets[-1]}; "
            "declare a larger one, or lower what the scheduler may put into a step"
        )
    return buckets[index]


def declare_buckets(device: str, bounds: StepBounds) -> ShapeBuckets:
    """The device's own buckets for steps within the bounds, which are the largest buckets.

    Nearly every combination is a shape, which is compiled, or at least run once, at start: so a
    bucket is several times as large as the one before. On Trainium a step of single tokens has as
    many tokens as requests, and others have 128 or more.
    """
    if compiles_shapes(device):
        num_reqs = _ladder(1, bounds.num_reqs, 2)
        single = [n for n in num_reqs if n < min(128, bounds.num_tokens)]
        segments = [n for n in _TRAINIUM_SEGMENTS if n <= bounds.num_tokens]
        return ShapeBuckets(
            num_tokens=(*single, *_ladder(128, bounds.num_tokens, 2)),
            num_reqs=num_reqs,
            context_lens=_ladder(2048, bounds.context_len, 8),
            prefill_segment=max(segments, default=bounds.num_tokens),
        )
    return ShapeBuckets(
        num_tokens=_ladder(8, bounds.num_tokens, 4),
        num_reqs=_ladder(8, bounds.num_reqs, 8),
        context_lens=_ladder(1024, bounds.context_len, 8),
        prefill_segment=bounds.num_tokens,
    )


def compiles_shapes(device: str) -> bool:
    """Whether a device runs one program per shape: Trainium, by the name of a chip or of torch."""
    return device == "neuron" or device.startswith("trn")


def _choose(given: Buckets | Auto, declared: Buckets, most: int) -> Buckets:
    """What is given, or else declared, without what no size up to `most` needs."""
    buckets = declared if given == AUTO else given
    return buckets[: bisect.bisect_left(buckets, most) + 1]


def _ladder(first: int, last: int, factor: int) -> Buckets:
    """`first`, its multiples by powers of `factor` as far as they are below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
