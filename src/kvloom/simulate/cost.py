"""How long a step takes: computed from a device's numbers, or read off a measured profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloom.simulate.devices import Device
from kvloom.simulate.work import Chunk, ModelWork, StepShape


class CostModel(Protocol):
    """What stands in for the model runner."""

    def step_seconds(self, step: StepShape) -> float:
        """How long a step of this shape takes; one without tokens does not run."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of a device's peak numbers a good implementation reaches. Assumed, not measured.

    Attributes:
        compute, memory, link: shares of the peak.
        step_seconds: of a step's fixed part: scheduling, launches, sampling.
        collective_seconds: until a sum over ranks begins to move bytes.
    """

    compute: float = 0.6
    memory: float = 0.8
    link: float = 0.7
    step_seconds: float = 1e-3
    collective_seconds: float = 1e-5


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Each part of a step takes as long as its arithmetic or its bytes, whichever is longer.

    ```
    step = fixed + max(matrix flops / compute, weight bytes / memory)
                 + max(attention flops / compute, KV bytes / memory)
                 + collectives x (latency + 2 (p - 1) / p x bytes / link)
    ```
    The roofline model of Williams et al. (2009), and the bandwidth term of a ring all-reduce over
    p ranks.
    """

    work: ModelWork
    device: Device
    num_ranks: int = 1
    efficiency: Efficiency = Efficiency()

    def step_seconds(self, step: StepShape) -> float:
        """See the class."""
        num_tokens, num_rows = step.num_tokens, step.num_rows
        if not num_tokens:
            return 0.0
        return (
            self.efficiency.step_seconds
            + self._matrix_seconds(num_tokens, num_rows)
            + self._attention_seconds(step.chunks)
            + self._collective_seconds(num_tokens, num_rows)
        )

    def _matrix_seconds(self, num_tokens: int, num_rows: int) -> float:
        work = self.work
        flops = work.flops_per_token * num_tokens + work.flops_per_row * num_rows
        num_bytes: float = work.weight_bytes
        for experts in work.experts:
            num_bytes += experts.expected_bytes(num_tokens)
        return self._longer(flops, num_bytes)

    def _attention_seconds(self, chunks: Sequence[Chunk]) -> float:
        flops = num_bytes = 0.0
        for layers in self.work.attention:
            sees = layers.visibility
            flops += layers.flops_per_pair * sum(map(sees.num_pairs, chunks))
            num_bytes += layers.bytes_per_key * sum(map(sees.num_keys, chunks))
        return self._longer(flops, num_bytes)

    def _longer(self, flops: float, num_bytes: float) -> float:
        device, reached = self.device, self.efficiency
        return max(
            flops / (device.flops * reached.compute),
            num_bytes / (device.bytes_per_second * reached.memory),
        )

    def _collective_seconds(self, num_tokens: int, num_rows: int) -> float:
        work = self.work
        if not work.num_collectives:
            return 0.0
        per_token, per_row = work.collective_bytes_per_token, work.collective_bytes_per_row
        moved = 2 * (self.num_ranks - 1) / self.num_ranks * (per_token * num_tokens)
        moved += (self.num_ranks - 1) / self.num_ranks * (per_row * num_rows)
        link = self.device.link_bytes_per_second * self.efficiency.link
        return work.num_collectives * self.efficiency.collective_seconds + moved / link
