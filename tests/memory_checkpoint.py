"""A checkpoint that is a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvloom.ops.base import StoredRows
from kvloom.weights.packing import stored_rows

_FORMATS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


class MemoryCheckpoint:
    """What the loader asks of a checkpoint, over float32 and float16 arrays.

    Attributes:
        metadata: None for Hugging Face's names.
    """

    def __init__(
        self, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors = tensors
        self.metadata = metadata
        self.tensor_names = frozenset(tensors)

    def read(self, name: str) -> np.ndarray:
        return np.array(self._tensors[name], np.float32)

    def stored_format(self, name: str) -> str:
        return _FORMATS[self._tensors[name].dtype]

    def read_rows(self, name: str) -> StoredRows:
        array = np.ascontiguousarray(self._tensors[name])
        raw = array.view(np.uint8).reshape(-1)
        return stored_rows(name, self.stored_format(name), array.shape, raw)

    def release(self, name: str) -> None:
        """Nothing to release."""
