"""What `kvloom plan` may count on for KV: a device's memory, or what the user names."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.config import AUTO, Auto, resolve_memory_share
from kvloom.errors import CapacityError, ConfigError
from kvloom.kv import host_memory, memory
from kvloom.simulate.devices import DEVICES

# Devices of which a rank has the whole memory, but for what the driver keeps.
_WHOLE_BYTES = {
    device.name: device.memory_bytes
    for device in DEVICES.values()
    if device.memory_bytes is not None and device.name not in memory.NEURON_STACK_BYTES
}


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Where a rank's memory comes from, and how much of it is for KV; None where nobody said.

    Attributes:
        kv_bytes: for KV alone.
        share: of the device's memory, for weights, activations and KV together; "auto" is what an
            engine on it would take.
        headroom_bytes: on Trainium, what is kept free instead of a cap on KV.
    """

    device: str = "cpu"
    kv_bytes: int | None = None
    share: float | Auto = AUTO
    headroom_bytes: int | None = None

    def __post_init__(self) -> None:
        given = {
            "--memory": self.kv_bytes,
            "--memory-share": None if self.share == AUTO else self.share,
            "--headroom": self.headroom_bytes,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} each say what KV gets; give one of them")
        if self.headroom_bytes is not None and self.device not in memory.NEURON_STACK_BYTES:
            trainium = " and ".join(memory.NEURON_STACK_BYTES)
            raise ConfigError(f"--headroom is for {trainium}, not {self.device}; leave it out")
        if self.device == "cuda" and self.kv_bytes is None:
            raise ConfigError(
                "--device cuda names no size; give --memory (for KV, of each rank), or choose one "
                f"of {', '.join(_WHOLE_BYTES)}"
            )

    @property
    def remedy(self) -> str:
        """How there can be more memory for KV."""
        if self.kv_bytes is not None:
            return "raise --memory"
        if self.device == "cpu":  # ranks share the host, so more of them do not help
            return "raise --memory-share, or give --memory to plan for another host"
        if self.device in _WHOLE_BYTES:
            return "raise --memory-share, or use more ranks with --tp"
        if self.headroom_bytes is not None:
            return "lower --headroom, or use more ranks with --tp"
        return "reserve a --headroom in place of the cap, or use more ranks with --tp"

    def budget(self, use: memory.MemoryUse, num_ranks: int) -> memory.MemoryBudget:
        """What a rank may use for KV, before anything runs: peak activation is not known yet.

        Raises:
            CapacityError: weights and KV are more than the device has.
        """
        if self.kv_bytes is not None:
            self._check_capacity(self.kv_bytes, use)
            return memory.explicit_budget(self.kv_bytes, use)
        share = resolve_memory_share(self.share, self.device)
        if self.device in _WHOLE_BYTES:
            total = memory.CudaMemory(_WHOLE_BYTES[self.device])
            return memory.cuda_budget(total, share, use)
        if self.device in memory.NEURON_STACK_BYTES:
            return self._neuron_budget(use, share)
        available = host_memory.read_available_host_bytes()
        host = memory.HostMemory(available, available, num_ranks)
        return memory.cpu_budget(host, share, use)

    def _neuron_budget(self, use: memory.MemoryUse, share: float) -> memory.MemoryBudget:
        stack = memory.NeuronMemory(memory.NEURON_STACK_BYTES[self.device])
        if self.headroom_bytes is not None:
            return memory.neuron_headroom_budget(stack, use, self.headroom_bytes)
        return memory.neuron_capped_budget(stack, use, memory.NeuronCap(share))

    def _check_capacity(self, kv_bytes: int, use: memory.MemoryUse) -> None:
        sizes = _WHOLE_BYTES | memory.NEURON_STACK_BYTES
        if self.device not in sizes:
            return
        left = sizes[self.device] - use.weights_bytes
        if kv_bytes > left:
            at_most = f"lower --memory to at most {left}, or " if left > 0 else ""
            raise CapacityError(
                f"{memory.format_bytes(kv_bytes)} for KV and "
                f"{memory.format_bytes(use.weights_bytes)} of weights are more than the "
                f"{memory.format_bytes(sizes[self.device])} of {self.device}; {at_most}use more "
                "ranks with --tp"
            )
