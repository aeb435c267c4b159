"""`kvloom generate`: stream one answer to the terminal."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.cli.options import add_engine_arguments, engine_options
from kvloom.errors import RequestError

if TYPE_CHECKING:
    from kvloom import LLM, StructuredOutputs
    from kvloom.engine.outputs import TextDelta

_SAMPLING_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        help="stream one answer to the terminal",
        description="Stream one answer to the terminal; figures follow on stderr.",
        epilog='Example: kvloom generate "What is a KV cache?" --max-tokens 64',
    )
    parser.add_argument("prompt", help='the prompt; "-" reads it from stdin')
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="send the prompt as a user message (default: if the model has a chat template)",
    )
    _add_sampling_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="print what runs, start-up phases and plan"
    )
    parser.set_defaults(run=run)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens generated (default: the rest of the room in max_model_len)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0 picks the most likely token (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="sample from the likeliest tokens that hold this share of probability "
        "(default: %(default)s, all)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="sample from the N likeliest tokens (default: %(default)s, all)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="sample from tokens at least X times as likely as the likeliest "
        "(default: %(default)s, all)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same answer each time, at a temperature above 0"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on where the model ends its answer"
    )
    structured = group.add_mutually_exclusive_group()
    structured.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="answer in JSON that this schema allows"
    )
    structured.add_argument(
        "--regex", metavar="REGEX", help="answer with a match of this regular expression"
    )


def run(args: argparse.Namespace) -> int:
    """Load the model, stream the answer, print the figures."""
    start = time.perf_counter()
    if args.verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    from kvloom import LLM, SamplingParams

    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    _require_unicode("prompt", [prompt])
    _require_unicode("stop", args.stop)
    params = SamplingParams(
        **{name: getattr(args, name) for name in _SAMPLING_OPTIONS},
        structured_outputs=_structured_outputs(args),
    )
    imported = time.perf_counter()
    llm = LLM(**engine_options(args))
    is_chat = llm.tokenizer.has_chat_template if args.chat is None else args.chat
    request: Any = [{"role": "user", "content": prompt}] if is_chat else prompt
    ready = time.perf_counter()
    timing = _print_stream(llm.stream(request, params))
    _print_figures(llm, timing, ready)
    if args.verbose:
        phases = {"import": imported - start, **llm.stats.phase_seconds}
        _print_phases(phases, timing.first - ready, timing.first - start)
    return 0


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputs | None:
    from kvloom import StructuredOutputs

    if args.regex is not None:
        return StructuredOutputs(regex=args.regex)
    if args.json_schema is None:
        return None
    try:
        return StructuredOutputs(json=args.json_schema.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("json_schema", f"{args.json_schema} cannot be read: {error}") from None


def _read_stdin() -> str:
    """All of stdin without its final newline, which ends the line rather than the prompt."""
    if sys.stdin is None:
        raise RequestError("prompt", "stdin is closed; give the prompt as an argument")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "prompt", f"stdin is not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from None
    return re.sub(r"\r?\n\Z", "", text)


def _require_unicode(field: str, texts: list[str]) -> None:
    """Python keeps bytes of an argument that the locale cannot decode as lone surrogates."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                field, f"the argument is not UTF-8 (character {error.start}); convert it"
            ) from None


@dataclass(slots=True)
class _Timing:
    """When the first and the last token came, and how many there were."""

    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0


def _print_stream(deltas: Iterator[TextDelta]) -> _Timing:
    timing = _Timing()
    for delta in deltas:
        timing.last = time.perf_counter()
        timing.first = timing.first or timing.last
        timing.num_tokens += len(delta.token_ids)
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return timing


def _print_figures(llm: LLM, timing: _Timing, ready: float) -> None:
    cache = llm.stats.cache
    seconds = timing.last - timing.first
    rate = f"{(timing.num_tokens - 1) / seconds:.1f} tokens/s" if timing.num_tokens > 1 else "-"
    hits = "prefix cache off"
    if llm.config.cache.has_prefix_cache:
        hits = (
            f"{cache.num_hit_tokens} of {cache.num_queried_tokens} prompt tokens from the "
            "prefix cache"
        )
    lines = [
        f"{timing.num_tokens} tokens, first after {timing.first - ready:.2f} s, then {rate}",
        f"KV cache: {cache.num_peak_blocks} of {cache.num_usable_blocks} blocks used at the peak, "
        f"{hits}, {llm.stats.scheduler.num_preemptions} preemptions",
    ]
    drafts = llm.stats.scheduler
    if llm.config.speculative.num_draft_tokens:
        lines.append(f"drafts: {drafts.num_accepted_tokens} of {drafts.num_draft_tokens} accepted")
    if llm.config.shapes.is_static(llm.config.device.device):
        steps = llm.stats.steps
        num_padding, num_padded = steps.num_padding_tokens, steps.num_padded_tokens
        lines.append(f"static shapes: {num_padding} of {num_padded} tokens computed are padding")
    sys.stderr.write("\n" + "\n".join(lines) + "\n")


def _print_phases(phases: dict[str, float], first_token: float, total: float) -> None:
    """Start-up phases in order; what is left over is the work between them."""
    rows = {**phases, "first token": first_token, "start to first token": total}
    for name, seconds in rows.items():
        sys.stderr.write(f"{name:<22}{seconds:8.3f} s\n")
