"""Rows of the README's table of numbers, and the line that says where they were made."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


def print_row(what: str, value: str) -> None:
    """One row, with the command that makes it again."""
    print(f"| {what} | {value} | `scripts/bench {Path(sys.argv[0]).stem}` |", flush=True)


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Print the machine and the head of the table."""
    import numpy

    num_cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    print(f"{cpu_name()}, {num_cores} cores, Python {python}, numpy {numpy.__version__}\n")
    print("| what | measured | command |\n|---|---|---|", flush=True)


if __name__ == "__main__":
    main()
