"""Small GGUF files, written by the gguf package: what kvloom reads must agree with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}

_ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    metadata: Mapping[str, Any],
) -> Path:
    """Write `tensors` (raw bytes and type each, or float32 values) and `metadata` to `path`."""
    pairs = dict(metadata)
    writer = gguf.GGUFWriter(path, pairs.pop("general.architecture"))
    for key, value in pairs.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            getattr(writer, _ADD[type(value)])(key, value)
    if "general.alignment" in pairs:
        writer.data_alignment = pairs["general.alignment"]
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
