"""Step times measured on a machine: the file they are kept in, and the cost model they make."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path

from kvloom.errors import ConfigError
from kvloom.simulate.work import Chunk, ModelWork, StepShape

FORMAT = "kvloom profile 2"
Measured = tuple[tuple[int, float], ...]
"""(how many, seconds), by how many."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured, for one model on one machine.

    Attributes:
        model, machine: for whom reads it.
        tensor_parallel_size: ranks of the engine.
        chunk_seconds: steps of one request with so many tokens, the first of their text.
        decode_seconds: steps of so many requests with one token each.
        decode_num_computed: tokens before each of these, on average.
        decode_seconds_per_byte: more per byte of keys and values that one-token chunks see.
        chunk_seconds_per_flop: more per attention operation of longer chunks.
        idle_seconds: more for the first step after a pause, by its tokens: threads and processors
            sleep, and caches hold other things.
    """

    model: str
    machine: str
    tensor_parallel_size: int
    chunk_seconds: Measured
    decode_seconds: Measured
    decode_num_computed: int
    decode_seconds_per_byte: float
    chunk_seconds_per_flop: float
    idle_seconds: Measured

    def cost(self, work: ModelWork, num_ranks: int) -> MeasuredCost:
        """The cost model of an engine with this work per rank.

        Raises:
            ConfigError: it was measured with other ranks.
        """
        if num_ranks != self.tensor_parallel_size:
            raise ConfigError(
                f"the profile was measured with tp {self.tensor_parallel_size}, not {num_ranks}; "
                "give that, or measure again"
            )
        return MeasuredCost(self, work)

    def save(self, path: Path) -> None:
        """Write the file that `read_profile` reads."""
        data = {"format": FORMAT, **asdict(self)}
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        ConfigError: it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"no {FORMAT!r}")
        for name in ("chunk_seconds", "decode_seconds", "idle_seconds"):
            data[name] = tuple((int(count), float(seconds)) for count, seconds in data[name])
        profile = Profile(**data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no profile ({error}); make one with kvloom bench --save-profile"
        ) from None
    if not (profile.chunk_seconds and profile.decode_seconds and profile.idle_seconds):
        raise ConfigError(f"{path} holds a profile without times; measure again")
    return profile


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Step times between those measured.

    ```
    step = decode(requests)                                        if each has one token, else
           chunk(tokens) + (decode(requests) - chunk(requests))    what many requests add to one
           + attention of the chunks - that of the chunks measured
           + idle                                                  if the engine had nothing to do
    ```
    """

    profile: Profile
    work: ModelWork

    def step_seconds(self, step: StepShape) -> float:
        """See the class."""
        num_tokens, num_requests = step.num_tokens, len(step.chunks)
        if not num_tokens:
            return 0.0
        if num_tokens == num_requests:
            seconds = self._plain_decode(num_requests)
        else:
            seconds = self._plain_chunk(num_tokens)
            if num_requests > 1:
                more = self._plain_decode(num_requests) - self._plain_chunk(num_requests)
                seconds += max(more, 0.0)
        seconds += sum(map(self._attention_seconds, step.chunks))
        return seconds + (self._idle_seconds(num_tokens) if step.is_after_idle else 0.0)

    def _plain_decode(self, num_requests: int) -> float:
        """Of one token for each request, without their attention."""
        measured = interpolate(self.profile.decode_seconds, num_requests)
        each = self._attention_seconds((self.profile.decode_num_computed, 1))
        return measured - num_requests * each

    def _plain_chunk(self, num_tokens: int) -> float:
        """Of one request's first tokens, without its attention."""
        measured = interpolate(self.profile.chunk_seconds, num_tokens)
        return measured - self._attention_seconds((0, num_tokens))

    def _idle_seconds(self, num_tokens: int) -> float:
        """Beyond the longest step measured no more: all is awake by then."""
        measured = self.profile.idle_seconds
        return interpolate(measured, min(num_tokens, measured[-1][0]))

    def _attention_seconds(self, chunk: Chunk) -> float:
        if chunk[1] == 1:
            return self.profile.decode_seconds_per_byte * attention_bytes(self.work, chunk)
        return self.profile.chunk_seconds_per_flop * attention_flops(self.work, chunk)


def attention_bytes(work: ModelWork, chunk: Chunk) -> float:
    """Bytes of keys and values that a chunk reads."""
    return sum(
        layers.bytes_per_key * layers.visibility.num_keys(chunk) for layers in work.attention
    )


def attention_flops(work: ModelWork, chunk: Chunk) -> int:
    """Attention operations of a chunk."""
    return sum(
        layers.flops_per_pair * layers.visibility.num_pairs(chunk) for layers in work.attention
    )


def interpolate(measured: Measured, count: int) -> float:
    """Seconds of `count`, along straight lines; beyond the last, in proportion to it."""
    at = bisect_left(measured, count, key=lambda point: point[0])
    if at == len(measured):
        last, seconds = measured[-1]
        return seconds * count / last
    high, high_seconds = measured[at]
    if high == count or at == 0:
        return high_seconds
    low, low_seconds = measured[at - 1]
    return low_seconds + (high_seconds - low_seconds) * (count - low) / (high - low)
