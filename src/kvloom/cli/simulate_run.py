"""What `kvloom simulate` does with its options: one run, or one per value of a sweep."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvloom.cli.options import float_or_auto, int_or_auto
from kvloom.cli.plan import byte_count
from kvloom.cli.plan_budget import MemorySource
from kvloom.cli.plan_model import config_dtype, read_model, resolve_dtypes
from kvloom.config import AUTO, EngineConfig, resolve_block_size
from kvloom.dtypes import DType
from kvloom.errors import CapacityError, ConfigError, ModelNotFoundError
from kvloom.kv.memory import format_bytes
from kvloom.models.base import ModelDTypes
from kvloom.simulate.cost import CostModel, RooflineCost
from kvloom.simulate.devices import find_device
from kvloom.simulate.html import Page
from kvloom.simulate.profile import read_profile
from kvloom.simulate.report import Row, align, as_text, format_seconds
from kvloom.simulate.results import Limits, Summary, as_data, summarise
from kvloom.simulate.routing import ROUTES
from kvloom.simulate.run import Progress, Simulation, SimulationResult
from kvloom.simulate.setup import ModelSource, SimulatedEngine, plan_engine
from kvloom.simulate.trace import (
    Lengths,
    Selection,
    TraceRequest,
    Workload,
    generate,
    read_trace,
)

_DEFAULT_NUM_REQUESTS = 200
_WORKLOAD_DEFAULTS: dict[str, Any] = {
    "speed": 1.0,
    "shrink": 1,
    "rate": 1.0,
    "prompt_tokens": "512",
    "output_tokens": "128",
    "prefix_tokens": None,
    "num_prefixes": 1,
    "seed": 0,
}
_FOR_TRACES = {"speed", "shrink"}
_FOR_MADE_UP = {"rate", "prompt_tokens", "prefix_tokens", "num_prefixes", "seed"}
_SWEEPABLE: dict[str, Callable[[str], Any]] = {
    "block_size": int_or_auto,
    "device": str,
    "kv_cache_dtype": str,
    "max_model_len": int_or_auto,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "memory": byte_count,
    "memory_share": float_or_auto,
    "rate": float,
    "replicas": int,
    "routing": str,
    "speed": float,
    "tp": int,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    engine: SimulatedEngine
    result: SimulationResult
    summary: Summary


def simulate(args: argparse.Namespace) -> str:
    """Run, write the page if one is asked for, and return what is printed.

    Raises:
        CapacityError, ConfigError, ModelError: with the remedy.
    """
    if args.device is None:
        args.device = "h100" if args.profile is None else "cpu"
    if args.sweep:
        return _simulate_sweep(args)
    limits = Limits(args.ttft_limit, args.tpot_limit)
    outcome = _simulate_once(args, limits)
    if args.html is not None:
        page = Page(_title(args), _facts(args, outcome.engine))
        _write(args.html, page.render([("", outcome.result, outcome.summary)], limits))
    if args.json:
        return _json(as_data(outcome.summary, outcome.result.samples))
    facts = "".join(f"  {name:<11} {value}\n" for name, value in _facts(args, outcome.engine))
    return f"{_title(args)}\n\n{facts}\n{as_text(outcome.summary, limits)}"


# --- one run --------------------------------------------------------------------------------


def _simulate_once(args: argparse.Namespace, limits: Limits) -> Outcome:
    if args.replicas < 1:
        raise ConfigError(f"replicas is {args.replicas}; give at least 1")
    if args.routing not in ROUTES:
        raise ConfigError(f"unknown routing {args.routing!r}; choose one of {', '.join(ROUTES)}")
    requests = _requests(args)
    engine, cost = _engine(args)
    with _progress(len(requests)) as progress:
        simulation = Simulation(engine, cost, args.replicas, ROUTES[args.routing])
        result = simulation.run(requests, progress)
    return Outcome(engine, result, summarise(result, limits))


def _requests(args: argparse.Namespace) -> list[TraceRequest]:
    given = {name: v for name in _WORKLOAD_DEFAULTS if (v := getattr(args, name)) is not None}
    ignored = (_FOR_MADE_UP if args.trace is not None else _FOR_TRACES) & given.keys()
    if ignored:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(ignored))
        kind = "made-up requests, not for a trace" if args.trace is not None else "a --trace"
        raise ConfigError(f"{flags} are for {kind}; leave them out")
    chosen = argparse.Namespace(**{**_WORKLOAD_DEFAULTS, **given})
    if args.trace is not None:
        num_output = given.get("output_tokens")
        lengths = None if num_output is None else Lengths.parse(num_output)
        selection = Selection(
            args.num_requests,
            chosen.speed,
            chosen.shrink,
            None if lengths is None else lengths.high,
        )
        return read_trace(Path(args.trace), selection)
    workload = Workload(
        _DEFAULT_NUM_REQUESTS if args.num_requests is None else args.num_requests,
        chosen.rate,
        Lengths.parse(chosen.prompt_tokens),
        Lengths.parse(chosen.output_tokens),
        None if chosen.prefix_tokens is None else Lengths.parse(chosen.prefix_tokens),
        chosen.num_prefixes,
    )
    return generate(workload, chosen.seed)


def _engine(args: argparse.Namespace) -> tuple[SimulatedEngine, CostModel]:
    config = EngineConfig.from_options(
        {
            "model": args.model,
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "kv_cache_dtype": args.kv_cache_dtype,
            "memory_share": args.memory_share,
            "num_blocks": args.num_blocks,
            "has_prefix_cache": args.has_prefix_cache,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "tensor_parallel_size": args.tp,
        }
    )
    device = find_device(args.device)
    block_size = resolve_block_size(args.block_size, device.name)
    if block_size < 1:  # as large as anyone likes: no kernel has to read it
        raise ConfigError(f"block_size is {block_size}; give at least 1")
    memory = MemorySource(device.name, args.memory, args.memory_share)
    fields, dtypes = _read_model(config, device.name)
    source = ModelSource(
        fields=fields,
        dtypes=dtypes,
        block_size=block_size,
    )
    profile = None if args.profile is None else read_profile(Path(args.profile))
    engine = plan_engine(config, source, memory)
    if profile is not None:
        return engine, profile.cost(engine.work, args.tp)
    return engine, RooflineCost(engine.work, device, args.tp)


def _read_model(config: EngineConfig, device: str) -> tuple[Mapping[str, Any], ModelDTypes]:
    """The config's fields, and the formats: on this host the engine's, elsewhere the config's."""
    if device == "cpu":
        files = read_model(config.model.model)
        return files.config, resolve_dtypes(config, files, device)
    fields = _read_fields(config.model.model)
    dtype, kv = config.model.dtype, config.cache.kv_cache_dtype
    weights = config_dtype(fields) if dtype == AUTO else DType.parse(dtype)
    return fields, ModelDTypes(weights=weights, kv=weights if kv == AUTO else DType.parse(kv))


@lru_cache(maxsize=1)  # a sweep reads it once
def _read_fields(reference: str) -> Mapping[str, Any]:
    """The fields of a model's config: numpy is imported only for a file that holds them inside."""
    from kvloom.weights.source import CONFIG_FILES, resolve_model

    path = resolve_model(reference, CONFIG_FILES)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        from kvloom.weights.checkpoint import read_config

        return read_config(path)
    try:
        fields = json.loads(file.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{file} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(fields, dict):
        raise ModelNotFoundError(f"{file} does not hold a JSON object; fetch it again")
    return fields


# --- sweeps ---------------------------------------------------------------------------------


def _simulate_sweep(args: argparse.Namespace) -> str:
    options = dict(_parse_sweep(text) for text in args.sweep)
    limits = Limits(args.ttft_limit, args.tpot_limit)
    rows: list[Row] = [(*options, *_SWEEP_COLUMNS)]
    data, runs = [], []
    for values in itertools.product(*options.values()):
        for name, (_, value) in zip(options, values, strict=True):
            setattr(args, name, value)
        texts = {name: text for name, (text, _) in zip(options, values, strict=True)}
        try:
            outcome = _simulate_once(args, limits)
        except (CapacityError, ConfigError) as error:
            data.append({**texts, "error": str(error)})
            rows.append((*texts.values(), "cannot run", *[""] * (len(_SWEEP_COLUMNS) - 1)))
            continue
        data.append({**texts, **as_data(outcome.summary, outcome.result.samples)})
        rows.append((*texts.values(), *_sweep_row(outcome.summary)))
        if args.html is not None:
            heading = ", ".join(f"{name} {text}" for name, text in texts.items())
            runs.append((heading, outcome.result, outcome.summary))
    if args.html is not None:
        _write(args.html, Page(_title(args), (), rows).render(runs, limits))
    return _json(data) if args.json else f"{args.model}\n\n{align(rows)}"


_SWEEP_COLUMNS = (
    "output/s",
    "goodput",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "hits",
    "preempted",
    "peak",
)


def _sweep_row(summary: Summary) -> Row:
    first, per_token = summary.first_token, summary.per_token
    return (
        f"{summary.output_tokens_per_second:,.0f}",
        f"{summary.goodput:,.3f}",
        "-" if first is None else format_seconds(first.p50),
        "-" if first is None else format_seconds(first.p99),
        "-" if per_token is None else format_seconds(per_token.p50),
        f"{summary.hit_share:.1%}",
        f"{summary.num_preemptions:,}",
        f"{summary.peak_used_share:.1%}",
    )


def _parse_sweep(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The option, and its values: as written, and as the option takes them."""
    name, _, values = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if name not in _SWEEPABLE:
        known = ", ".join(option.replace("_", "-") for option in _SWEEPABLE)
        raise ConfigError(f"--sweep {text!r}: give OPTION=V,V,... with one of {known}")
    try:
        parsed = [(value, _SWEEPABLE[name](value)) for value in values.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"--sweep {text!r}: {error}") from None
    return name, parsed


# --- what is written ------------------------------------------------------------------------


def _title(args: argparse.Namespace) -> str:
    replicas = f"{args.replicas} replica{'s' if args.replicas > 1 else ''}"
    return f"{args.model} on {args.device}, tp {args.tp}, {replicas}"


def _facts(args: argparse.Namespace, engine: SimulatedEngine) -> Sequence[tuple[str, str]]:
    device, plan = find_device(args.device), engine.plan
    times = f"as measured: {args.profile}"
    if args.profile is None:
        times = f"computed from {device.title} ({device.source})"
    trace = "made up" if args.trace is None else str(args.trace)
    return [
        ("requests", trace),
        ("step times", times),
        ("weights", f"{format_bytes(engine.weights_bytes)} per rank"),
        ("KV cache", f"{plan.num_blocks:,} blocks of {format_bytes(plan.block_bytes[0])} per rank"),
        (
            "holds",
            f"{plan.max_concurrency:.2f} requests of {plan.max_model_len:,} tokens per replica",
        ),
    ]


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


def _write(file: str, page: str) -> None:
    Path(file).write_text(page, encoding="utf-8")


@contextmanager
def _progress(num_requests: int) -> Iterator[Progress]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=num_requests)
        shown = 0

        def update(num_ended: int) -> None:
            nonlocal shown
            if num_ended > shown:
                shown = num_ended
                bar.update(task, completed=num_ended)

        yield update
