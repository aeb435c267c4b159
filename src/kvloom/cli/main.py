"""The `kvloom` command. Subcommands import what they need when they run: --help stays fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvloom.cli import generate, plan
from kvloom.errors import KvloomError

_INTERRUPTED = 130  # the shell's code for SIGINT


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="kvloom",
        description="A KV-caching engine for LLM inference.",
        epilog='Try: kvloom generate "What is a KV cache?"',
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, plan):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a kvloom error becomes one line on stderr and exit code 1."""
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KvloomError as error:
        sys.stderr.write(f"kvloom: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return _INTERRUPTED
    return code
