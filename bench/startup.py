"""How long a user waits: for help, and for the first token of a fresh process."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import print_row

NUM_RUNS = 5
KVLOOM = str(Path(sys.executable).parent / "kvloom")


def seconds_of(*arguments: str) -> float:
    """Median wall time of `kvloom ARGUMENTS` in a fresh process."""
    times = []
    for _ in range(NUM_RUNS + 1):
        start = time.perf_counter()
        subprocess.run([KVLOOM, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first run fills the file cache


def main() -> None:
    """Print one row per wait."""
    print_row("`kvloom --help`", f"{seconds_of('--help') * 1000:.0f} ms")
    first_token = seconds_of("generate", "--max-tokens", "1", "Why is the sky blue?")
    print_row("process start to first token, model on disk", f"{first_token:.2f} s")


if __name__ == "__main__":
    main()
