"""The backends that compute each operation at once, driven with numpy arrays.

A test module marked `usefixtures("each_backend")` runs once on each of them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from kvloom.dtypes import DType
from kvloom.ops.base import Attention, Batch, Experts, Parameter
from kvloom.ops.reference import ReferenceBackend
from kvloom.runner.collectives import SingleRankCommunicator

NAME = "reference"  # the fixture `each_backend` changes it


def make_backend(name: str | None = None, dtype: DType = DType.FLOAT32) -> Any:
    """The backend of that name, or the one that the fixture says."""
    if (name or NAME) == "reference":
        return ReferenceBackend()
    from kvloom.ops.torch_backend import TorchBackend

    return TorchBackend("cpu", dtype)


def make_ops(backend: Any = None, batch: Batch | None = None) -> Any:
    """Operations that take and return numpy arrays, for one rank."""
    none = np.zeros(0, np.int64)
    backend = backend or make_backend()
    ops = backend.ops(batch or Batch(none, none, none), SingleRankCommunicator())
    return ops if backend.name == "reference" else HostOps(backend, ops)


class HostOps:
    """Takes arrays to the device, calls an operation, and brings back what it returns."""

    def __init__(self, backend: Any, ops: Any) -> None:
        self._backend = backend
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            moved = {key: self._to_device(value) for key, value in options.items()}
            returned = getattr(self._ops, name)(*map(self._to_device, arguments), **moved)
            if isinstance(returned, tuple):
                return tuple(map(self._backend.to_host, returned))
            return self._backend.to_host(returned)

        return call

    def _to_device(self, argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            import torch

            return torch.as_tensor(argument, device=self._backend.device)
        if isinstance(argument, Parameter):
            return replace(argument, value=self._backend.pack(argument, argument.value))
        if isinstance(argument, Attention | Experts):
            parts = {part.name: getattr(argument, part.name) for part in fields(argument)}
            return replace(argument, **{k: self._to_device(v) for k, v in parts.items()})
        if isinstance(argument, list):
            return [self._to_device(item) for item in argument]
        return argument
