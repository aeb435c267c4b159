"""What the simulation itself takes: Llama-3.3-70B on 16 replicas of 8 H100, a trace of long chats.

The trace is mooncake_conversation.jsonl (FAST'25 artifact of Mooncake), named as the argument or
found beside the repository. Each size runs in a process of its own: peak memory never falls.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from report import print_row

from kvloom.cli.main import make_parser
from kvloom.cli.simulate_run import simulate

ROOT = Path(__file__).parents[1]
TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"
CONFIG = ROOT / "tests" / "data" / "model_configs" / "llama-3.3-70b.json"
OPTIONS = "--device h100 --tp 8 --replicas 16 --max-num-seqs 256 --max-num-batched-tokens 8192"
SIZES = (3000, 6000, 12_000)


def run_here(trace: str, num_requests: int) -> None:
    """Simulate, and print what it took as JSON."""
    args = ["simulate", str(CONFIG), *OPTIONS.split(), "--trace", trace, "--json"]
    start = time.process_time()
    args += ["--num-requests", str(num_requests)]
    data = json.loads(simulate(make_parser().parse_args(args)))
    seconds = time.process_time() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([seconds, peak_bytes, data["num_steps"], data["num_failed"]]))


def main() -> None:
    """Print one row per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", default=str(TRACE))
    parser.add_argument("--here", type=int, help="simulate so many requests in this process")
    args = parser.parse_args()
    if args.here is not None:
        run_here(args.trace, args.here)
        return
    for size in SIZES:
        command = [sys.executable, __file__, args.trace, "--here", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, peak_bytes, num_steps, num_failed = json.loads(done.stdout)
        print_row(
            f"simulating {size:,} requests, 16 replicas: {num_steps:,} steps, {num_failed} failed",
            f"{seconds:.0f} s of one core ({1e3 * seconds / size:.1f} ms per request), "
            f"{peak_bytes / 2**30:.2f} GiB",
        )


if __name__ == "__main__":
    main()
