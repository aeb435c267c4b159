"""Opening a model's files, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.errors import ModelNotFoundError
from kvloom.weights.gguf import GGUFCheckpoint
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


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors files, or a GGUF file. No weight is read yet.

    Raises:
        ModelNotFoundError: neither of them.
        UnsupportedModelError, WeightsError: as the formats say.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    _require_file(path)
    return GGUFCheckpoint(path)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration alone, of a folder, a GGUF file or a config.json: weights may be absent.

    Raises:
        ModelNotFoundError: none of them.
    """
    if path.is_dir():
        return read_json(path / "config.json")
    _require_file(path)
    return read_json(path) if path.suffix == ".json" else GGUFCheckpoint(path).config


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ModelNotFoundError(f"{path} does not exist; name a model folder or a .gguf file")
