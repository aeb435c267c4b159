"""How much memory a device's values take, measured while operations run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvloom.ops.backend import DeviceMemory, MemoryMeter


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """What a CUDA device says of itself; other devices do not tell."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes, free_bytes)


@contextmanager
def measure(device: torch.device) -> Iterator[MemoryMeter]:
    """A meter of what is allocated on the device from here on."""
    if device.type == "cuda":
        yield CudaMeter(device)
        return
    with StorageMeter(device) as meter:
        yield meter


class _Meter:
    """What both meters have in common."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor on the device."""
        return torch.zeros(shape, device=self._device)

    def is_view(self, value: Tensor, argument: Any) -> bool:
        """Whether `argument` is a tensor in the same memory."""
        if not isinstance(argument, Tensor):
            return False
        return bool(value.untyped_storage()._cdata == argument.untyped_storage()._cdata)


class CudaMeter(_Meter):
    """What torch's allocator says: workspaces of libraries are counted, too."""

    @property
    def held_bytes(self) -> int:
        """Allocated now."""
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at once."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        """Begin again with what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)


class StorageMeter(_Meter, TorchDispatchMode):  # type: ignore[misc] # torch is untyped here
    """Counts the memory of results while something holds them.

    It works on any device. What an operation takes and frees by itself is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.held_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()  # ids of storages that live, ours or older

    def reset_peak(self) -> None:
        """Begin again with what is held now."""
        self.peak_bytes = self.held_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; storages that come out of it and did not go in are new."""
        del types
        kwargs = kwargs or {}
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, Tensor):
                self._note(argument, is_new=False)
        results = func(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._note(result, is_new=True)
        return results

    def _note(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        num_bytes = storage.nbytes() if is_new else 0
        self._known.add(id(storage))
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._forget, id(storage), num_bytes)

    def _forget(self, storage_id: int, num_bytes: int) -> None:
        self._known.discard(storage_id)
        self.held_bytes -= num_bytes
