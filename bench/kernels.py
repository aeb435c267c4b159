"""The GEMM against the machine: shares of a peak on registers alone, and of the memory's bandwidth.

The first row is a gate: the command fails below 85% of the peak that the same instruction reaches
in the same run. KVLOOM_ISA chooses the instruction set.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from report import print_row

from kvloom.ops.isa import load_native

NUM_OUTPUTS, NUM_INPUTS = 3072, 576
LEAST_SHARE = 0.85
NUM_ROUNDS = 15
STREAMED_BYTES = 256 << 20  # more than any cache holds
SOURCES = {"f32": "f32", "bf16": "bf16", "q8": "q8_0", "q4": "q4_1"}
INPUT_BYTES = {"f32": 4, "bf16": 2, "q8": 34 / 32, "q4": 20 / 32}


Clock = Callable[[], float]


def seconds_of(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Time of one call by `clock`."""
    start = clock()
    work()
    return clock() - start


def make_weight(native: ModuleType, name: str) -> Any:
    """Random bits, small enough to be finite as numbers and as scales."""
    weight = native.gemm.GemmWeight(name, False, NUM_OUTPUTS, NUM_INPUTS)
    num_bytes = round(INPUT_BYTES[name] * NUM_INPUTS) * NUM_OUTPUTS
    weight.pack(SOURCES[name], 0, np.random.default_rng(0).integers(0, 60, num_bytes, np.uint8))
    return weight


def make_bench(native: ModuleType, weights: list[Any], name: str, size: tuple[int, int]) -> Any:
    """Products of `size` = (rows, threads): the same rows with each weight in turn."""
    num_rows, num_threads = size
    x = np.random.default_rng(1).standard_normal((num_rows, NUM_INPUTS)).astype(np.float32)
    row_format = native.gemm.row_format_for(name, num_rows)
    return native.gemm.GemmBench(weights, x, row_format, num_threads)


def peak_rate(native: ModuleType, instruction: str) -> float:
    """Operations per second of independent dot products on registers alone."""
    start = time.thread_time()
    return native.gemm.peak_operations(instruction, 100_000) / (time.thread_time() - start)


def share_of_peak(native: ModuleType, name: str, num_rows: int) -> tuple[float, float]:
    """Operations per second on one core, and their share of the peak's: medians over rounds.

    The peak is measured before and after each product, so that a slower clock slows both; times are
    those of the thread, so that other programs take no part of them.
    """
    instruction = {"f32": "f32", "bf16": "bf16", "q8": "s8", "q4": "s8"}[name]
    bench = make_bench(native, [make_weight(native, name)], name, (num_rows, 1))
    operations = 2.0 * num_rows * NUM_OUTPUTS * NUM_INPUTS
    bench.run()
    rates, shares = [], []
    for _ in range(NUM_ROUNDS):
        before = peak_rate(native, instruction)
        rates.append(operations / seconds_of(bench.run, time.thread_time))
        shares.append(2 * rates[-1] / (before + peak_rate(native, instruction)))
    return float(np.median(rates)), float(np.median(shares))


def share_of_bandwidth(native: ModuleType, name: str, num_threads: int) -> tuple[float, float]:
    """Bytes of weights per second for one row, and their share of what plain reading reaches."""
    one = make_weight(native, name)
    num_weights = STREAMED_BYTES // one.num_bytes
    weights = [make_weight(native, name) for _ in range(num_weights)]
    bench = make_bench(native, weights, name, (1, num_threads))
    plain = np.ones(STREAMED_BYTES, np.uint8)
    bench.run()
    rates, shares = [], []
    for _ in range(NUM_ROUNDS):
        probes = [
            STREAMED_BYTES / seconds_of(lambda: native.gemm.read_all(plain, num_threads))
            for _ in range(2)
        ]
        rates.append(num_weights * one.num_bytes / seconds_of(bench.run))
        shares.append(rates[-1] / max(probes))
    return float(np.median(rates)), float(np.median(shares))


def main() -> int:
    """Print the rows; 1 if the gate fails."""
    native = load_native()
    rate, gate_share = share_of_peak(native, "bf16", 512)
    size = f"{NUM_OUTPUTS} x {NUM_INPUTS}"
    verdict = "at least" if gate_share >= LEAST_SHARE else "NOT"
    print_row(
        f"GEMM bf16, 512 x {size}, one core",
        f"{rate / 1e9:.0f} GFLOP/s, {gate_share:.0%} of the peak ({verdict} {LEAST_SHARE:.0%})",
    )
    for name in SOURCES:
        for num_rows in (8, 32, 512):
            rate, share = share_of_peak(native, name, num_rows)
            print_row(
                f"GEMM {name}, {num_rows} x {size}, one core",
                f"{rate / 1e9:.0f} G/s, {share:.0%} of the peak",
            )
    num_threads = len(os.sched_getaffinity(0))
    for name in SOURCES:
        rate, share = share_of_bandwidth(native, name, num_threads)
        print_row(
            f"GEMM {name}, 1 x {size}, {num_threads} threads",
            f"{rate / 1e9:.1f} GB/s, {share:.0%} of plain reading",
        )
    return 0 if gate_share >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
