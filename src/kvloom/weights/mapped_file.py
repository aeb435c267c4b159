"""Files that are read from disk as their bytes are used, and need not stay in memory afterwards."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvloom.errors import ModelNotFoundError, WeightsError


class MappedFile:
    """The bytes of a file.

    Attributes:
        data: uint8 [num_bytes], read-only.
    """

    def __init__(self, path: Path) -> None:
        """Map the file; nothing is read yet.

        Raises:
            ModelNotFoundError: it is no regular file.
            WeightsError: the file is empty.
        """
        require_regular_file(path)
        if path.stat().st_size == 0:
            raise WeightsError(f"{path} is empty; fetch it again")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, num_bytes: int) -> None:
        """Take whole pages within [start, start + num_bytes) out of memory.

        They are read again if they are used again. Without this a loaded model would be in memory
        twice: as packed weights, and as the file.
        """
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


def require_regular_file(path: Path) -> None:
    """Refuse devices and FIFOs: reading one may never end.

    Raises:
        ModelNotFoundError: it is there, but no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ModelNotFoundError(
            f"{path} is not a regular file; name a model folder or a .gguf file"
        )
