"""Opening a model's files, whatever their format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.errors import ModelNotFoundError
from kvloom.ops.base import StoredRows
from kvloom.weights.gguf import GGUFCheckpoint
from kvloom.weights.mapped_file import require_regular_file
from kvloom.weights.safetensors import SafetensorsCheckpoint, read_json


class Checkpoint(Protocol):
    """A model's files, opened: configuration at once, tensors one by one as they are asked for.

    Attributes:
        path: the folder or the GGUF file.
        config: fields of Hugging Face's config.json, translated where the file is a GGUF.
        metadata: the GGUF file's key/value pairs; None for a folder.
        eos_token_ids: ids that the files say end a sequence.
        tensor_names: names in the file: Hugging Face's in a folder, GGUF's in a GGUF file.
    """

    path: Path
    config: dict[str, Any]
    metadata: Mapping[str, Any] | None
    eos_token_ids: frozenset[int]
    tensor_names: frozenset[str]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor in float32, [out, in] for a matrix; rows are in the file's order."""

    def stored_format(self, name: str) -> str:
        """The name of the format that a tensor is stored in: F32, BF16, Q4_1, ..."""

    def read_rows(self, name: str) -> StoredRows:
        """A matrix as it is stored, its rows in the file's order."""

    def release(self, name: str) -> None:
        """The rows of a tensor that `read_rows` gave need not stay in memory any longer."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors files, or a GGUF file. No weight is read yet.

    Raises:
        ModelNotFoundError: neither of them.
        UnsupportedModelError, WeightsError: as the formats say.
    """
    with _reading(path):
        if path.is_dir():
            _require_config(path)
            return SafetensorsCheckpoint(path)
        return GGUFCheckpoint(path)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration alone, of a folder, a GGUF file or a config.json: weights may be absent.

    Raises:
        ModelNotFoundError: none of them.
    """
    with _reading(path):
        if path.is_dir():
            _require_config(path)
            return read_json(path / "config.json")
        if path.suffix == ".json":
            require_regular_file(path)
            return read_json(path)
        return GGUFCheckpoint(path).config


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the file system refuses, at whichever of a model's files, is a ModelNotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        missing = error.filename or path
        raise ModelNotFoundError(
            f"{missing} does not exist; name a model folder or a .gguf file"
        ) from None
    except OSError as error:
        raise ModelNotFoundError(
            f"{error.filename or path} cannot be read ({error.strerror or error}); check its "
            "permissions, or name another model folder or .gguf file"
        ) from None


def _require_config(folder: Path) -> None:
    """A folder with GGUF files alone: which of them is meant is for the user to say."""
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if files and not (folder / "config.json").exists():
        raise ModelNotFoundError(
            f"{folder} has no config.json, but {', '.join(files)}; name the file: "
            f"{folder / files[0]}"
        )
