"""`kvloom batch`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.cli.options import add_engine_arguments, engine_options
from kvloom.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "batch",
        help="answer a file of requests, resumable",
        description="Answer a file of requests in OpenAI's batch format. Answers are appended to "
        "the output as they come; a run that was ended goes on where it was.",
        epilog="Example: kvloom batch requests.jsonl --output answers.jsonl",
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="one request per line")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT.jsonl",
        help="where answers go (default: FILE.answers.jsonl)",
    )
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet; 1 if any request was refused."""
    try:
        from kvloom.server.batch import finished_ids, read_batch, unfinished
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a batch needs {error.name}; install it with: pip install 'kvloom[server]'"
        ) from None
    output = args.output or args.file.with_suffix(".answers.jsonl")
    lines = read_batch(args.file)
    left = list(unfinished(lines, finished_ids(output)))
    sys.stderr.write(f"{len(lines)} requests, {len(lines) - len(left)} answered before\n")
    if not left:
        return 0
    num_refused = _answer_all(args, left, output)
    sys.stderr.write(f"{len(left)} answered in {output}, {num_refused} of them refused\n")
    return 1 if num_refused else 0


def _answer_all(args: argparse.Namespace, lines: list[Any], output: Path) -> int:
    """Load the model and run `lines`; how many were refused."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from kvloom import AsyncLLM
    from kvloom.server.batch import run_batch

    num_refused = 0
    engine = AsyncLLM(**engine_options(args))
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("requests", total=len(lines))

            def on_answer(answer: Mapping[str, Any]) -> None:
                nonlocal num_refused
                num_refused += answer["response"]["status_code"] != 200
                progress.advance(task)

            asyncio.run(run_batch(engine, args.model, lines, output, on_answer))
    finally:
        engine.shutdown()
    return num_refused
