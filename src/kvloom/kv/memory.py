"""How many bytes one rank may use for KV: the budget of each kind of device.

Numbers in, numbers out. A budget may be zero or less; the planner refuses it and prints the lines
that led there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvloom.errors import CapacityError, ConfigError

MIB = 1 << 20
GIB = 1 << 30

# What the driver reports as the whole of a device, which is less than the name on the box.
CUDA_TOTAL_BYTES = {"h100": 81_559 * MIB, "h200": 143_771 * MIB}

# One stack of high-bandwidth memory: 96 GiB (Trainium2) or 144 GiB (Trainium3) in four stacks.
NEURON_STACK_BYTES = {"trn2": 24 * GIB, "trn3": 36 * GIB}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes a rank needs besides KV: its weights, and what a step takes at its peak."""

    weights_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One line of the arithmetic: what is taken, and the bytes it stands for."""

    label: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What one rank may use for KV, and the lines of arithmetic that say why."""

    kv_bytes: int
    use: MemoryUse
    lines: tuple[BudgetLine, ...]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that `num_ranks` ranks share: before weights were loaded, and now."""

    available_at_start_bytes: int
    available_now_bytes: int
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of a CUDA device, and the part of it that other processes hold."""

    total_bytes: int
    foreign_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NeuronMemory:
    """Memory of a Trainium stack, and how many physical cores make a logical one (LNC)."""

    stack_bytes: int
    cores_per_logical_core: Literal[1, 2] = 2

    @property
    def logical_core_bytes(self) -> int:
        """A logical core of two physical ones owns its stack; single cores share it by two."""
        return self.stack_bytes * self.cores_per_logical_core // 2


@dataclass(frozen=True, slots=True)
class NeuronCap:
    """Neuron's default policy: KV takes at most a fixed part of the budget.

    The compiler must fit weights, KV, intermediates and outputs in one stack; the cap leaves it the
    room it cannot ask for later, as the KV shape is part of the compiled program.
    """

    share: float
    cap_fraction: float = 0.30
    min_bytes: int = GIB

    def __post_init__(self) -> None:
        if not 0.0 < self.cap_fraction <= 1.0:
            raise ConfigError(f"cap_fraction is {self.cap_fraction}; give a part within (0, 1]")


def format_bytes(num_bytes: int) -> str:
    """The number in the largest binary unit that it fills, with two decimals."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def explicit_budget(kv_bytes: int, use: MemoryUse) -> MemoryBudget:
    """The bytes the user named for KV, whatever else is on the device."""
    lines = (
        BudgetLine("weights, apart from KV", use.weights_bytes),
        BudgetLine("peak activation, apart from KV", use.activation_bytes),
        BudgetLine("given for KV", kv_bytes),
    )
    return MemoryBudget(kv_bytes, use, lines)


def cpu_budget(host: HostMemory, share: float, use: MemoryUse) -> MemoryBudget:
    """A share of the memory available at start, less weights and peak activation.

    Raises:
        CapacityError: what is left to be allocated is not available now.
    """
    at_start = BudgetLine("available at start", host.available_at_start_bytes)
    budget = _share_budget(at_start, share, host.num_ranks, use)
    there_bytes = host.available_now_bytes + use.weights_bytes * host.num_ranks
    free_share = there_bytes / max(host.available_at_start_bytes, 1)
    check_available_now(budget, host, f"set memory_share to at most {_floor_percent(free_share)}")
    return budget


def check_available_now(budget: MemoryBudget, host: HostMemory, remedy: str) -> None:
    """Refuse a budget whose KV and peak activation, over all ranks, are not available now.

    A budget that leaves nothing for KV passes: the planner refuses it, with its arithmetic.

    Raises:
        CapacityError: with both numbers and `remedy`.
    """
    per_rank = budget.kv_bytes + budget.use.activation_bytes
    if budget.kv_bytes > 0 and per_rank * host.num_ranks > host.available_now_bytes:
        raise CapacityError(
            f"KV ({format_bytes(budget.kv_bytes)}) and peak activation "
            f"({format_bytes(budget.use.activation_bytes)}) of {host.num_ranks} rank(s) are still "
            f"to be allocated, but only {format_bytes(host.available_now_bytes)} of memory are "
            f"available now; close other programs, or {remedy}"
        )


def cuda_budget(device: CudaMemory, share: float, use: MemoryUse) -> MemoryBudget:
    """A share of the whole device, less our own weights and peak activation.

    What other processes hold is not subtracted: it only limits how large the share may be.

    Raises:
        CapacityError: the share reaches into memory that other processes hold.
    """
    budget = _share_budget(BudgetLine("device memory", device.total_bytes), share, 1, use)
    free_bytes = device.total_bytes - device.foreign_bytes
    if int(device.total_bytes * share) > free_bytes:
        raise CapacityError(
            f"memory_share {share} of {format_bytes(device.total_bytes)} is "
            f"{format_bytes(int(device.total_bytes * share))}, but other processes hold "
            f"{format_bytes(device.foreign_bytes)} of the device; free it, or set memory_share to "
            f"at most {_floor_percent(free_bytes / device.total_bytes)}"
        )
    return budget


def neuron_capped_budget(device: NeuronMemory, use: MemoryUse, policy: NeuronCap) -> MemoryBudget:
    """Neuron's default: min(budget - weights, cap_fraction x budget) of a logical core.

    Activations are not subtracted: the part above the cap is theirs.

    Raises:
        CapacityError: less than the policy's minimum is left.
    """
    total = int(device.logical_core_bytes * policy.share)
    left = max(total - use.weights_bytes, 0)
    cap = int(total * policy.cap_fraction)
    kv_bytes = min(left, cap)
    if kv_bytes < policy.min_bytes:
        raise CapacityError(
            f"{kv_bytes:,} B are left for KV on a logical core of "
            f"{format_bytes(device.logical_core_bytes)} x share {policy.share} with "
            f"{format_bytes(use.weights_bytes)} of weights and a cap of {policy.cap_fraction}, the "
            f"minimum is {format_bytes(policy.min_bytes)} ({policy.min_bytes:,} B); use more "
            "tensor-parallel ranks, or reserve a headroom in place of the cap"
        )
    lines = (
        BudgetLine("memory of a logical core", device.logical_core_bytes),
        BudgetLine(f"x share {policy.share}", total),
        BudgetLine("- weights", use.weights_bytes),
        BudgetLine(f"at most {policy.cap_fraction} of the share", cap),
        BudgetLine("= for KV", kv_bytes),
    )
    return MemoryBudget(kv_bytes, use, lines)


def neuron_headroom_budget(
    device: NeuronMemory, use: MemoryUse, headroom_bytes: int
) -> MemoryBudget:
    """All of a logical core but weights and a headroom.

    The headroom covers intermediates, scratchpad, DMA rings, the runtime, code and a margin.
    """
    kv_bytes = max(device.logical_core_bytes - use.weights_bytes - headroom_bytes, 0)
    lines = (
        BudgetLine("memory of a logical core", device.logical_core_bytes),
        BudgetLine("- weights", use.weights_bytes),
        BudgetLine("- headroom", headroom_bytes),
        BudgetLine("= for KV", kv_bytes),
    )
    return MemoryBudget(kv_bytes, use, lines)


def _share_budget(total: BudgetLine, share: float, num_ranks: int, use: MemoryUse) -> MemoryBudget:
    shared = int(total.num_bytes * share) // num_ranks
    kv_bytes = shared - use.weights_bytes - use.activation_bytes
    over_ranks = f" over {num_ranks} ranks" if num_ranks > 1 else ""
    lines = (
        total,
        BudgetLine(f"x share {share}{over_ranks}", shared),
        BudgetLine("- weights", use.weights_bytes),
        BudgetLine("- peak activation", use.activation_bytes),
        BudgetLine("= for KV", kv_bytes),
    )
    return MemoryBudget(kv_bytes, use, lines)


def _floor_percent(share: float) -> str:
    """Rounded down, so that the advice works."""
    return f"{math.floor(max(share, 0.0) * 100) / 100:.2f}"
