"""Attention against the machine: the cache's bytes per second beside plain reading, and operations.

The cache is that of SmolLM2-135M: 30 layers, 3 KV heads of 64 numbers for 9 query heads, blocks of
16 tokens in random places. KVLOOM_ISA chooses the instruction set.
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

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 30, 9, 3, 64, 16
NUM_ROUNDS = 7
PLAIN_BYTES = 256 << 20
FORMATS = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Case:
    """Requests of equal length that compute `num_queries` tokens each."""

    num_reqs: int
    seq_len: int
    num_queries: int = 1

    @property
    def num_visible(self) -> int:
        """Pairs of a query and a key that it sees, for one head."""
        hidden = self.num_queries * (self.num_queries - 1) // 2
        return self.num_reqs * (self.num_queries * self.seq_len - hidden)


DECODE = (Case(1, 256), Case(8, 256), Case(32, 256), Case(1, 4096), Case(8, 1024))
PREFILL = (Case(1, 512, 512), Case(1, 2048, 2048), Case(1, 2048, 512), Case(8, 128, 128))


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make_step(
    native: ModuleType, number_format: str, case: Case, num_threads: int
) -> tuple[Callable[[], object], int]:
    """A step of attention over all layers, and the bytes of the cache that it reads once."""
    api = native.attention
    layout = api.KVLayout(number_format, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE)
    layer = api.AttentionLayer(layout, NUM_HEADS, num_threads, 8192)
    width = -(-case.seq_len // BLOCK_SIZE)
    num_blocks = case.num_reqs * width + 1
    rng = np.random.default_rng(0)
    raw = np.zeros((NUM_LAYERS, num_blocks, layer.block_bytes), np.uint8)
    raw[:] = rng.integers(0, 32, layer.block_bytes, dtype=np.uint8)  # any finite numbers do
    num_tokens = case.num_reqs * case.num_queries
    dtype = np.uint16 if number_format == "bfloat16" else np.float32
    q = np.zeros((num_tokens, NUM_HEADS, HEAD_SIZE), dtype)
    out = np.zeros((num_tokens, NUM_HEADS * HEAD_SIZE), np.float32)
    step = api.AttentionStep(
        np.arange(case.num_reqs + 1, dtype=np.int32) * case.num_queries,
        np.full(case.num_reqs, case.seq_len, np.int32),
        (rng.permutation(num_blocks - 1) + 1).astype(np.int32).reshape(case.num_reqs, width),
    )
    num_bytes = NUM_LAYERS * case.num_reqs * width * layer.block_bytes
    return lambda: layer.attend(raw, q, step, out), num_bytes


def measure(native: ModuleType, number_format: str, case: Case, num_threads: int) -> str:
    """Medians over rounds; the share is that of a plain read of other memory in the same round."""
    run, num_bytes = make_step(native, number_format, case, num_threads)
    plain = np.ones(PLAIN_BYTES, np.uint8)
    seconds, shares = [], []
    run()
    for _ in range(NUM_ROUNDS):
        reading = [seconds_of(lambda: native.gemm.read_all(plain, num_threads)) for _ in range(2)]
        seconds.append(seconds_of(run))
        shares.append(num_bytes / seconds[-1] / (PLAIN_BYTES / min(reading)))
    median = float(np.median(seconds))
    operations = 4 * case.num_visible * NUM_HEADS * HEAD_SIZE * NUM_LAYERS
    value = f"{1e3 * median:.2f} ms, {operations / median / 1e9:.0f} G/s"
    if case.num_queries > 1:
        return value
    return (
        f"{value}, {num_bytes / median / 1e9:.1f} GB/s ({np.median(shares):.0%} of plain reading)"
    )


def main() -> None:
    """Print the rows."""
    native = load_native()
    num_threads = len(os.sched_getaffinity(0))
    for number_format in FORMATS:
        for case in (*DECODE, *PREFILL):
            name = f"{case.num_reqs} x {case.num_queries} of {case.seq_len} tokens"
            value = measure(native, number_format, case, num_threads)
            print_row(f"attention {number_format}, {name}, {NUM_LAYERS} layers", value)


if __name__ == "__main__":
    main()
