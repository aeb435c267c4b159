"""The engines: where each is installed, how it is started, and what it reads and computes with."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers_cells import AttentionSize, BenchModel, Format, ModelSize, OpsPerSecond
from peers_process import EngineCommand

from kvloom.weights.gguf_header import read_header

HEAD_TENSORS = ("output.weight", "token_embd.weight")  # a tied head is the embedding

BF16_BYTES = 2.0
INT8_BYTES = 34 / 32  # groups of 32 with a 16-bit scale


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of the peers' environments and of the models, which model, and how many threads."""

    peers: Path
    models: Path
    model: BenchModel
    num_threads: int

    @property
    def gguf(self) -> Path:
        """The quantised model."""
        return self.models / self.model.gguf

    @property
    def folder(self) -> Path:
        """The bf16 model."""
        return self.models / self.model.folder

    def python(self, peer: str) -> str:
        """Of a peer's environment."""
        return str(self.peers / peer / "bin" / "python")


# Of the machine that the bars were measured on, with 2 threads.
STATED_PEAKS = OpsPerSecond(bf16=940e9, int8=1850e9)


def engine_commands(places: Places, options: Mapping[str, Any]) -> dict[str, EngineCommand]:
    """All engines by name; `options` are those of our own `LLM`, for both of its models."""
    gguf, folder, threads = str(places.gguf), str(places.folder), str(places.num_threads)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    vllm = {
        **offline,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",  # unless a plugin is what is measured
    }
    pace = {name: value for name, value in vllm.items() if name != "VLLM_PLUGINS"}
    openvino = {"INFERENCE_NUM_THREADS": places.num_threads}
    in_bf16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    llama = {
        "bin": str(places.peers / "llama-bin"),
        # One cache for all slots, so that one server has room for every cell.
        "arguments": [
            *("--threads", threads, "--threads-batch", threads, "--parallel", "32"),
            *("--ctx-size", "16384", "--kv-unified", "--cache-ram", "0", "--no-webui"),
        ],
    }
    return {
        "kvloom-bf16": EngineCommand(sys.executable, "kvloom", folder, options),
        "kvloom-q4": EngineCommand(sys.executable, "kvloom", gguf, options),
        "pace": EngineCommand(
            places.python("pace"), "vllm", folder, {"enforce_eager": False}, pace
        ),
        "pace-eager": EngineCommand(
            places.python("pace"), "vllm", folder, {"enforce_eager": True}, pace
        ),
        "vllm": EngineCommand(places.python("vllm"), "vllm", folder, {"enforce_eager": True}, vllm),
        "openvino": EngineCommand(places.python("openvino"), "openvino", gguf, openvino),
        "openvino-bf16": EngineCommand(
            places.python("openvino"), "openvino", gguf, {**openvino, **in_bf16}
        ),
        "llama": EngineCommand(sys.executable, "llama", gguf, llama),
    }


def read_model_size(places: Places) -> ModelSize:
    """From the bf16 model's configuration, its head tied."""
    config = json.loads((places.folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_size = config["head_dim"]
    num_q, num_kv = (
        config[name] * head_size for name in ("num_attention_heads", "num_key_value_heads")
    )
    projections = 2 * hidden * num_q + 2 * hidden * num_kv
    kinds = Counter(config.get("layer_types") or ["full_attention"] * layers)
    windows = {"full_attention": None, "sliding_attention": config.get("sliding_window")}
    return ModelSize(
        num_body_weights=layers * (projections + 3 * hidden * config["intermediate_size"]),
        num_head_weights=hidden * config["vocab_size"],
        attention=tuple(
            AttentionSize(count * 2 * num_kv, count * 2 * num_q, windows[kind])
            for kind, count in kinds.items()
        ),
    )


def engine_formats(places: Places, options: Mapping[str, Any]) -> dict[str, Format]:
    """What each engine's limit is made of."""
    size = read_model_size(places)
    in_bf16 = Format(
        BF16_BYTES * size.num_body_weights, BF16_BYTES * size.num_head_weights, BF16_BYTES, False
    )
    # Greedy steps read a copy of the head in int8, and little of the head itself.
    screened = replace(in_bf16, head_bytes=INT8_BYTES * size.num_head_weights, is_head_int8=True)
    tensors = read_header(places.gguf).tensors
    head = next(tensors[name] for name in HEAD_TENSORS if name in tensors)
    body_bytes = sum(t.num_bytes for name, t in tensors.items() if name not in HEAD_TENSORS)

    def quantised(kv_value_bytes: float) -> Format:
        """As the file has it."""
        return Format(body_bytes, head.num_bytes, kv_value_bytes, is_int8=True)

    ours = INT8_BYTES if options.get("kv_cache_dtype") == "int8" else BF16_BYTES
    return {
        "kvloom-bf16": screened,
        "kvloom-q4": quantised(ours),
        "pace": in_bf16,
        "pace-eager": in_bf16,
        "vllm": in_bf16,
        "openvino": quantised(INT8_BYTES),
        "openvino-bf16": quantised(BF16_BYTES),
        "llama": quantised(BF16_BYTES),
    }
