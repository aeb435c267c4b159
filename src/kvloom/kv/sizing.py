"""Bytes and blocks of a layout: what a worker allocates, and what requests hold of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvloom.kv.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor, cdiv


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What requests of one length hold in a group.

    Attributes:
        num_steady_blocks: of each request.
        num_reserved_blocks: once for the pool, while chunks are in flight.
    """

    num_steady_blocks: int
    num_reserved_blocks: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's part of the groups, and the memory it offers.

    Attributes:
        specs: its layers, in order, at the configured block size.
        min_page_bytes: what the page of every layer that stores KV is padded to.
    """

    index: int
    groups: list[KVCacheGroupSpec]
    specs: Mapping[str, KVCacheSpec]
    available_bytes: int
    min_page_bytes: int = 0

    @property
    def group_bytes(self) -> list[int]:
        """Bytes of a block that the layers of each group fill."""
        return [sum(self._page_bytes(n, g) for n in g.layer_names) for g in self.groups]

    def _page_bytes(self, name: str, group: KVCacheGroupSpec) -> int:
        spec = self.specs[name]
        return replace(spec, block_size=group.kv_cache_spec.block_size).page_size_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: any group may take it, so the largest counts."""
        storing = [name for name, spec in self.specs.items() if spec.shared_target is None]
        most_layers = max(len(set(storing) & set(group.layer_names)) for group in self.groups)
        return max(*self.group_bytes, most_layers * self.min_page_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one stored token over all layers."""
        return sum(cdiv(s.page_size_bytes, s.block_size) for s in self.specs.values())

    def padding_percent(self, costs: Sequence[GroupCost]) -> float:
        """The part of the steady blocks of requests that no layer fills."""
        num_blocks = sum(cost.num_steady_blocks for cost in costs)
        filled = sum(
            cost.num_steady_blocks * num_bytes
            for cost, num_bytes in zip(costs, self.group_bytes, strict=True)
        )
        return 100.0 * (1.0 - filled / (num_blocks * self.block_bytes))

    def config(self, num_blocks: int) -> KVCacheConfig:
        """What it allocates."""
        return KVCacheConfig(num_blocks, self._tensors(num_blocks), self.groups)

    def _tensors(self, num_blocks: int) -> list[KVCacheTensor]:
        """One group: a tensor per layer that stores. Several: they overlay each other in one."""
        if len(self.groups) > 1:
            return [KVCacheTensor(self.block_bytes * num_blocks, list(self.specs))]
        tensors: dict[str, KVCacheTensor] = {}
        for name, spec in self.specs.items():
            if spec.shared_target is None:
                tensors[name] = KVCacheTensor(spec.page_size_bytes * num_blocks, [name])
            else:
                tensors[spec.shared_target].shared_by.append(name)
        return list(tensors.values())


@dataclass(frozen=True, slots=True)
class Pool:
    """The blocks every worker has, and what requests of one length hold of them.

    Attributes:
        counts_null_block: whether requests are said to hold block 0, too, as vLLM has it.
    """

    workers: list[Worker]
    num_blocks: int
    costs: list[GroupCost]
    counts_null_block: bool = False

    @property
    def num_steady_blocks(self) -> int:
        """The most blocks one request holds, chunks aside."""
        return sum(cost.num_steady_blocks for cost in self.costs)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks kept for chunks in flight, of whichever request."""
        return sum(cost.num_reserved_blocks for cost in self.costs)

    @property
    def fits(self) -> bool:
        """Whether one request can run alone."""
        return self.num_steady_blocks + self.num_reserved_blocks < self.num_blocks

    @property
    def requests_held(self) -> Fraction:
        """Requests that the blocks hold together."""
        num_usable = self.num_blocks - (0 if self.counts_null_block else 1)
        return Fraction(num_usable - self.num_reserved_blocks, self.num_steady_blocks)
