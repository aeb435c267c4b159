"""Attention against the machine: the cache's bytes per second beside plain reading, and operations.

The caches are those of SmolLM2-135M (30 layers), of the window and full layers of Gemma-3-270M and
of DeepSeek-V2-Lite's latent rows, in blocks of 16 tokens in random places. KVLOOM_ISA chooses the
instruction set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from report import print_row

from kvloom.ops.isa import load_native

BLOCK_SIZE = 16
NUM_ROUNDS = 5
PLAIN_BYTES = 256 << 20
# KV formats, and the instruction their products are made with.
INSTRUCTIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "s8"}


@dataclass(frozen=True)
class Layers:
    """Equal attention layers. A latent row is key and, in its first head_size_v values, value."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    window: int = 0
    is_latent: bool = False


@dataclass(frozen=True)
class Case:
    """Requests of equal length that compute `num_queries` tokens each."""

    num_reqs: int
    seq_len: int
    num_queries: int = 1

    def num_visible(self, window: int) -> int:
        """Pairs of a query and a key that it sees, for one head."""
        lengths = np.arange(self.seq_len - self.num_queries, self.seq_len) + 1
        return int(self.num_reqs * np.minimum(lengths, window or self.seq_len).sum())


SMOL = Layers("SmolLM2-135M", 30, 9, 3, 64, 64)
WINDOW = Layers("Gemma-3-270M, window", 15, 4, 1, 256, 256, window=512)
FULL = Layers("Gemma-3-270M, full", 3, 4, 1, 256, 256)
LATENT = Layers("DeepSeek-V2-Lite", 4, 16, 1, 576, 512, is_latent=True)
DECODE = (Case(1, 256), Case(8, 256), Case(32, 256), Case(1, 4096), Case(8, 1024))
PREFILL = (Case(1, 512, 512), Case(1, 2048, 2048), Case(1, 3500, 512), Case(8, 128, 128))
LONG = (Case(32, 200), Case(1, 3500), Case(1, 3500, 512))
CASES = [
    *((SMOL, number_format, case) for number_format in INSTRUCTIONS for case in DECODE + PREFILL),
    *((layers, "bfloat16", case) for layers in (WINDOW, FULL, LATENT) for case in LONG),
]


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make_step(
    native: ModuleType, layers: Layers, number_format: str, case: Case, num_threads: int
) -> tuple[Callable[[], object], int]:
    """A step of attention over all layers, and the bytes of the cache that it reads once."""
    api = native.attention
    sizes = (layers.num_kv_heads, layers.head_size, layers.head_size_v, layers.is_latent)
    layout = api.KVLayout(number_format, BLOCK_SIZE, *sizes)
    layer = api.AttentionLayer(layout, layers.num_heads, num_threads, 8192, layers.window)
    width = -(-case.seq_len // BLOCK_SIZE)
    num_blocks = case.num_reqs * width + 1
    rng = np.random.default_rng(0)
    raw = np.zeros((layers.num_layers, num_blocks, layer.block_bytes), np.uint8)
    raw[:] = rng.integers(0, 32, layer.block_bytes, dtype=np.uint8)  # any finite numbers do
    num_tokens = case.num_reqs * case.num_queries
    dtype = np.uint16 if number_format == "bfloat16" else np.float32
    q = np.zeros((num_tokens, layers.num_heads, layers.head_size), dtype)
    out = np.zeros((num_tokens, layers.num_heads * layers.head_size_v), np.float32)
    step = api.AttentionStep(
        np.arange(case.num_reqs + 1, dtype=np.int32) * case.num_queries,
        np.full(case.num_reqs, case.seq_len, np.int32),
        (rng.permutation(num_blocks - 1) + 1).astype(np.int32).reshape(case.num_reqs, width),
    )
    hidden = max(case.seq_len - case.num_queries + 1 - layers.window, 0) if layers.window else 0
    num_read = case.num_reqs * (width - hidden // BLOCK_SIZE)
    num_bytes = layers.num_layers * num_read * layer.block_bytes
    return lambda: layer.attend(raw, q, step, out), num_bytes


def measure(
    native: ModuleType, layers: Layers, number_format: str, case: Case, num_threads: int
) -> str:
    """Medians over rounds.

    Shares are those of a plain read of other memory, or of the peak on registers, both measured in
    the same rounds.
    """
    run, num_bytes = make_step(native, layers, number_format, case, num_threads)
    num_values = layers.num_layers * layers.num_heads * (layers.head_size + layers.head_size_v)
    num_operations = 2 * case.num_visible(layers.window) * num_values
    plain = np.ones(PLAIN_BYTES, np.uint8)
    instruction = INSTRUCTIONS[number_format]
    seconds, reading, peaks = [], [], []
    run()
    for _ in range(NUM_ROUNDS):
        reading.append(
            min(seconds_of(lambda: native.gemm.read_all(plain, num_threads)) for _ in range(2))
        )
        start = time.thread_time()
        operations = native.gemm.peak_operations(instruction, 100_000)
        peaks.append(num_threads * operations / (time.thread_time() - start))
        seconds.append(seconds_of(run))
    median = float(np.median(seconds))
    if case.num_queries > 1:
        rate = num_operations / median
        share = rate / float(np.median(peaks))
        return f"{1e3 * median:.2f} ms, {rate / 1e9:.0f} G/s ({share:.0%} of the peak)"
    bandwidth = num_bytes / median
    share = bandwidth / (PLAIN_BYTES / float(np.median(reading)))
    return f"{1e3 * median:.2f} ms, {bandwidth / 1e9:.1f} GB/s ({share:.0%} of plain reading)"


def main() -> None:
    """Print the rows."""
    native = load_native()
    num_threads = len(os.sched_getaffinity(0))
    for layers, number_format, case in CASES:
        name = f"{case.num_reqs} x {case.num_queries} of {case.seq_len} tokens"
        value = measure(native, layers, number_format, case, num_threads)
        print_row(f"attention {number_format}, {layers.name}, {name}", value)


if __name__ == "__main__":
    main()
