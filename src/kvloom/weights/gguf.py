"""GGUF files as checkpoints: configuration, tokenizer metadata, and tensors as float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from kvloom.errors import UnsupportedModelError
from kvloom.ops.base import StoredRows
from kvloom.weights.gguf_blocks import CONVERSIONS, convert_blocks
from kvloom.weights.gguf_config import EOS_KEYS, ROPE_TENSORS, translate_config
from kvloom.weights.gguf_header import TensorInfo, read_header
from kvloom.weights.mapped_file import MappedFile
from kvloom.weights.packing import stored_rows

_PIECE_VALUES = 1 << 17


class GGUFCheckpoint:
    """A GGUF file: weights, configuration and tokenizer in one.

    Attributes:
        metadata: the file's key/value pairs, the tokenizer's among them.
        config: the same as Hugging Face's config.json fields.
        eos_token_ids: ids that the metadata says end a sequence or a turn.
        tensor_names: of the weights; those that belong to the configuration are left out.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            UnsupportedModelError: an architecture, version or tensor type we do not run.
            WeightsError: the file is cut off or damaged; names the first tensor hit.
        """
        self.path = path
        self._file = MappedFile(path)
        header = read_header(path)
        self._tensors = header.tensors
        self.metadata: Mapping[str, Any] | None = header.metadata
        factors = {
            name: self.read(name).ravel().tolist() for name in ROPE_TENSORS if name in self._tensors
        }
        shapes = {name: info.shape for name, info in self._tensors.items()}
        self.config: dict[str, Any] = translate_config(header.metadata, shapes, factors)
        self.tensor_names = frozenset(self._tensors) - factors.keys()  # those are configuration
        self.eos_token_ids = frozenset(
            header.metadata[key] for key in EOS_KEYS if key in header.metadata
        )

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor in float32, its rows in the file's order.

        Raises:
            UnsupportedModelError: its block format cannot be dequantised.
        """
        info = self._tensors[name]
        try:
            values = self._dequantize(info)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is stored as {info.type.name}, which cannot be "
                "dequantised; use a file quantised differently"
            ) from None
        self.release(name)
        return values

    def stored_format(self, name: str) -> str:
        """The name of the format that `read_rows` gives a tensor in."""
        stored = self._tensors[name].type.name
        return CONVERSIONS[stored].stored if stored in CONVERSIONS else stored

    def read_rows(self, name: str) -> StoredRows:
        """A matrix, its rows in the file's order: a view of the file, or blocks made of its blocks.

        See `kvloom.weights.gguf_blocks` for what is made of what.
        """
        info = self._tensors[name]
        raw = self._file.data[info.start : info.start + info.num_bytes]
        if info.type.name in CONVERSIONS:
            raw = convert_blocks(raw, CONVERSIONS[info.type.name])
        return stored_rows(name, self.stored_format(name), info.shape, raw)

    def release(self, name: str) -> None:
        """The bytes of a tensor need not stay in memory."""
        info = self._tensors[name]
        self._file.release(info.start, info.num_bytes)

    def _dequantize(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        # In pieces whose intermediate arrays stay in the processor's cache: twice as fast as the
        # package's own pieces, and without temporaries as large as the tensor.
        block_size, block_bytes = GGML_QUANT_SIZES[info.type]
        num_blocks = info.num_bytes // block_bytes
        step = _PIECE_VALUES // block_size
        raw = self._file.data[info.start : info.start + info.num_bytes]
        blocks = raw.reshape(num_blocks, block_bytes)
        values = np.empty((num_blocks, block_size), np.float32)
        for start in range(0, num_blocks, step):
            piece = blocks[start : start + step].reshape(1, -1)
            values[start : start + step] = dequantize(piece, info.type).reshape(-1, block_size)
        return values.reshape(info.shape)
