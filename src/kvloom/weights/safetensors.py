"""Hugging Face folders: config.json and safetensors files, read one tensor at a time.

The container is parsed here: the safetensors package hands out bfloat16 only through a framework
that has it, and numpy does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from kvloom.ops.base import StoredRows
from kvloom.weights.mapped_file import MappedFile, require_regular_file
from kvloom.weights.packing import stored_rows

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_SIZE_BYTES = 8
# Stored formats that float32 holds exactly, as numpy formats; BF16 is widened by hand.
_FORMATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor's bytes, from `start` of its file on; not read yet."""

    dtype: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]
    file: MappedFile
    start: int


class SafetensorsCheckpoint:
    """A folder as Hugging Face publishes it.

    Attributes:
        metadata: always None; only GGUF files carry metadata.
        config: the fields of config.json.
        eos_token_ids: of generation_config.json, or else of config.json.
        tensor_names: of all shards.
    """

    def __init__(self, folder: Path) -> None:
        """Read the configuration and the headers of all shards.

        Raises:
            ModelNotFoundError: no config.json, or no safetensors file.
            UnsupportedModelError: weights quantised in a way we do not read.
            WeightsError: a shard is missing, cut off or damaged; names the first tensor hit.
        """
        self.path = folder
        self.metadata: Mapping[str, Any] | None = None
        self.config = read_json(folder / "config.json")
        if quantization := self.config.get("quantization_config"):
            named = quantization if isinstance(quantization, dict) else {}
            method = named.get("quant_method", "an unnamed method")
            raise UnsupportedModelError(
                f"{folder}: weights quantised by {method} are not supported; use the unquantised "
                "model or a GGUF file"
            )
        self._tensors = _open_shards(folder)
        self.tensor_names = frozenset(self._tensors)
        self.eos_token_ids = _eos_token_ids(folder, self.config)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor in float32.

        Raises:
            UnsupportedModelError: it is stored in a format we do not read.
        """
        tensor = self._readable(name)
        # A tensor may lie at any byte, so it is copied before it is viewed as wider numbers.
        values = tensor.raw.copy().view(_FORMATS[tensor.dtype]).reshape(tensor.shape)
        self.release(name)
        if tensor.dtype == "BF16":
            bits = values.astype(np.uint32)
            bits <<= np.uint32(16)
            return bits.view(np.float32)
        return values.astype(np.float32, copy=False)

    def stored_format(self, name: str) -> str:
        """The name of a tensor's number format."""
        return self._readable(name).dtype

    def read_rows(self, name: str) -> StoredRows:
        """A matrix as it is stored: a view of the file."""
        tensor = self._readable(name)
        return stored_rows(name, tensor.dtype, tensor.shape, tensor.raw)

    def release(self, name: str) -> None:
        """The bytes of a tensor need not stay in memory."""
        tensor = self._tensors[name]
        tensor.file.release(tensor.start, tensor.raw.nbytes)

    def _readable(self, name: str) -> _Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in _FORMATS:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is stored as {tensor.dtype}; "
                f"formats that can be read: {', '.join(_FORMATS)}"
            )
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        ModelNotFoundError: no such file, or not a JSON object.
    """
    try:
        require_regular_file(path)
        content = json.loads(path.read_text("utf-8-sig"))  # some editors put a BOM first
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} cannot be read ({error.strerror or error}); a model folder holds "
            "config.json and *.safetensors"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"{path} does not hold a JSON object; fetch it again")
    return content


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    generation = folder / "generation_config.json"
    ids = read_json(generation).get("eos_token_id") if generation.exists() else None
    if ids is None:
        ids = config.get("eos_token_id")
    if ids is None:
        return frozenset()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token_id, int) for token_id in listed):
        raise ModelNotFoundError(
            f"{folder}: eos_token_id is {ids!r}, not a token id or a list of them; fetch "
            "config.json and generation_config.json again"
        )
    return frozenset(listed)


def _open_shards(folder: Path) -> dict[str, _Tensor]:
    if not (folder / _INDEX).exists():
        return _open_file(_single_file(folder))
    shard_of = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
        raise WeightsError(
            f"{folder / _INDEX} has no weight_map of tensor names to file names; fetch it again"
        )
    shards = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).exists():
            name = next(name for name, file in shard_of.items() if file == shard)
            raise WeightsError(f"{folder}: {shard} is missing, tensor {name} is in it; fetch it")
        shards[shard] = _open_file(folder / shard)
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise WeightsError(
                f"{folder}: tensor {name} is not in {shard}, where {_INDEX} says it is; "
                "fetch both again"
            )
    return _merge(folder, shards)


def _merge(folder: Path, shards: Mapping[str, Mapping[str, _Tensor]]) -> dict[str, _Tensor]:
    """The tensors of all shards.

    What a shard holds beyond its index is kept, so that the loader reports it as left over.
    """
    tensors: dict[str, _Tensor] = {}
    for shard, held in shards.items():
        if twice := sorted(tensors.keys() & held.keys()):
            first = next(file for file in shards if twice[0] in shards[file])
            raise WeightsError(
                f"{folder}: tensor {twice[0]} is both in {first} and in {shard}; fetch both again"
            )
        tensors |= held
    return tensors


def _single_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    named = folder / _SINGLE
    if named in files:
        return named
    if len(files) == 1:
        return files[0]
    found = ", ".join(file.name for file in files) or "no *.safetensors file"
    raise ModelNotFoundError(
        f"{folder} has {found}; weights are expected in {_SINGLE}, or in shards listed by {_INDEX}"
    )


def _open_file(path: Path) -> dict[str, _Tensor]:
    # Eight bytes with the size of a JSON table, the table, then the tensors' bytes.
    file = MappedFile(path)
    data = file.data
    if len(data) < _HEADER_SIZE_BYTES:
        raise WeightsError(f"{path} is cut off within its header; fetch it again")
    start = _HEADER_SIZE_BYTES + int(data[:_HEADER_SIZE_BYTES].view("<u8")[0])
    if start > len(data):
        raise WeightsError(f"{path} is cut off within its header; fetch it again")
    try:
        table = json.loads(bytes(data[_HEADER_SIZE_BYTES:start]))
        entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
        return {name: _locate(path, name, entry, (file, start)) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} has a damaged header ({error}); fetch it again") from None


def _locate(
    path: Path, name: str, entry: Mapping[str, Any], file_and_start: tuple[MappedFile, int]
) -> _Tensor:
    file, start = file_and_start
    data = file.data[start:]
    first, end = entry["data_offsets"]
    if end > len(data):
        raise WeightsError(
            f"{path}: tensor {name} ends at byte {end} of {len(data)}; the file is cut off, "
            "fetch it again"
        )
    raw, shape = data[first:end], tuple(entry["shape"])
    tensor = _Tensor(entry["dtype"], shape, raw, file, start + first)
    if tensor.dtype in _FORMATS:
        num_values = int(np.prod(tensor.shape, dtype=np.int64))
        if num_values * np.dtype(_FORMATS[tensor.dtype]).itemsize != end - first:
            raise WeightsError(
                f"{path}: tensor {name} of shape {list(tensor.shape)} has {end - first} bytes; "
                "the file is damaged"
            )
    return tensor
