"""The command line that all measurements beside peers have, and what they do before they start."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from peers_cells import BenchModel
from peers_engines import Places


def make_parser(doc: str, out: str, num_rounds: int) -> argparse.ArgumentParser:
    """Options of all of them; `doc` is the script's, `out` and `num_rounds` are defaults."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="the peers' environments")
    parser.add_argument("--models", type=Path, required=True, help="the models' folder")
    parser.add_argument("--out", type=Path, default=Path(out), help="logs and samples")
    parser.add_argument("--rounds", type=int, default=num_rounds, help="0 for the text check alone")
    parser.add_argument("--threads", type=int, default=2, help="processors that all of them share")
    parser.add_argument("--no-text", action="store_true", help="leave the text check out")
    return parser


def prepare(arguments: argparse.Namespace, model: BenchModel) -> Places:
    """Take the processors, make the folder for logs, and say where everything is."""
    # A plain end would leave what was started behind, asleep.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    # Inherited by all that is started: none may use more processors than another.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    # Absolute: engines run in another folder.
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return Places(arguments.peers.resolve(), arguments.models.resolve(), model, arguments.threads)
