"""The `kvloom` command. Subcommands import what they need when they run: --help stays fast."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from kvloom.errors import KvloomError

_INTERRUPTED = 130  # the shell's code for SIGINT
_BROKEN_PIPE = 141  # the shell's code for SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """Looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"kvloom {version('kvloom')}\n")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    from kvloom.cli import batch, bench, generate, plan, serve, simulate, top

    parser = _Parser(
        prog="kvloom",
        description="A KV-caching engine for LLM inference.",
        epilog='Try: kvloom generate "What is a KV cache?"',
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, plan, serve, top, batch, simulate, bench):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; whatever goes wrong on purpose is one line on stderr and exit code 1."""
    try:
        _prepare_streams()
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where it may still fail in one line
    except KvloomError as error:
        return _fail(str(error))
    except BrokenPipeError:  # `kvloom ... | head`: who read has read enough
        _discard_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        _discard_stdout()
        reason = error.strerror or str(error)
        return _fail(f"{error.filename}: {reason}" if error.filename else reason)
    except MemoryError as error:
        return _fail(
            f"out of memory ({str(error) or 'no details'}); free some, or lower --memory-share or "
            "--max-num-batched-tokens"
        )
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return _INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    args, rest = make_parser().parse_known_args(argv)
    if rest:
        is_prompt = args.command == "generate" and not rest[0].startswith("-")
        hint = '; quote the prompt: kvloom generate "..."' if is_prompt else ""
        unknown = f"unrecognized arguments: {' '.join(rest)}{hint}"
        _Parser(prog=f"kvloom {args.command}").error(unknown)
    code: int = args.run(args)
    return code


def _prepare_streams() -> None:
    """Python has None for a stream that was closed before it started."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
    if sys.stdout is None:
        raise OSError("stdout is closed; send it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer may hold characters that the terminal's encoding does not have.
        sys.stdout.reconfigure(errors="replace")


def _discard_stdout() -> None:
    """What could not be written is not tried again when Python ends."""
    with suppress(OSError, AttributeError):  # stdout may be no file, or None
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    sys.stderr.write(f"kvloom: error: {message}\n")
    return 1
