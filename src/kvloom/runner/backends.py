"""Which backend a rank runs on, and in which formats."""

from __future__ import annotations

import logging
import os
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.config import AUTO, EngineConfig, resolve_block_size
from kvloom.dtypes import DType
from kvloom.errors import ConfigError, UnsupportedModelError
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import KVCacheSpec
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.backend import Backend
from kvloom.ops.native import NativeBackend, find_problem
from kvloom.ops.reference import ReferenceBackend
from kvloom.sampling.native import NativeSampler
from kvloom.sampling.token_sampler import TokenSampler

if TYPE_CHECKING:
    from kvloom.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_DTYPES = (AUTO, DType.FLOAT32.value, DType.BFLOAT16.value)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the model made for it.

    Attributes:
        sampler: reads the backend's logits where they are; None for one that reads arrays.
        weights_dtype: what matrices are packed as: "auto" keeps the file's formats.
    """

    backend: Backend
    model: Model
    sampler: TokenSampler | None = None
    weights_dtype: str = AUTO


def choose_backend(
    config: EngineConfig, checkpoint: Checkpoint, rank: TensorParallelRank
) -> BackendChoice:
    """The backend asked for; "auto" is the native one wherever that can run the model.

    On a device that is no CPU, "auto" is torch.

    Raises:
        ConfigError, UnsupportedModelError: the backend asked for cannot, or none can.
    """
    asked = config.device.backend
    if asked == "torch" or config.device.device != "cpu":
        return _choose_torch(config, checkpoint, rank)
    if asked == "reference":
        return _choose_reference(config, checkpoint, rank)
    try:
        return _choose_native(config, checkpoint, rank)
    except (ConfigError, UnsupportedModelError) as error:
        if asked != AUTO:
            raise
        logger.info("backend reference, which is slow: %s", error)
        return _choose_reference(config, checkpoint, rank)


def _choose_reference(
    config: EngineConfig, checkpoint: Checkpoint, rank: TensorParallelRank
) -> BackendChoice:
    dtype = config.model.dtype
    if dtype != AUTO and DType.parse(dtype) is not DType.FLOAT32:
        raise ConfigError(
            f"the reference backend computes in float32, not {dtype}; "
            "leave dtype out, or set kv_cache_dtype to store less"
        )
    dtypes = ModelDTypes(DType.FLOAT32, _kv_dtype(config, DType.FLOAT32))
    model = build_model(checkpoint.config, rank, dtypes, config.model.max_model_len)
    logger.info("backend reference: computed in float32, KV %s", dtypes.kv.value)
    return BackendChoice(ReferenceBackend(), model)


def _choose_torch(
    config: EngineConfig, checkpoint: Checkpoint, rank: TensorParallelRank
) -> BackendChoice:
    device = config.device.device
    if device != "cpu" and rank.world_size > 1:
        raise ConfigError(
            f"one rank runs on {device}, not {rank.world_size}; set tensor_parallel_size to 1"
        )
    if device == "neuron" and config.cache.kv_cache_bytes is None:
        raise ConfigError("torch does not tell the memory of a neuron device; set kv_cache_bytes")
    try:
        from kvloom.ops.torch_backend import TorchBackend, check_spec
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "the torch backend needs torch; install it with: pip install 'kvloom[torch]'"
        ) from None
    stored = {checkpoint.stored_format(name) for name in checkpoint.tensor_names}
    dtypes = resolve_file_dtypes(config, stored, "torch")
    threads = config.device.num_threads
    backend = TorchBackend(device, dtypes.weights, None if threads == AUTO else threads)
    model = build_model(checkpoint.config, rank, dtypes, config.model.max_model_len)
    for spec in _stored_specs(model, block_size=1):
        check_spec(spec)
    logger.info(
        "backend torch on %s: computed in %s, KV %s",
        backend.device,
        dtypes.weights.value,
        dtypes.kv.value,
    )
    return BackendChoice(backend, model)


def _choose_native(
    config: EngineConfig, checkpoint: Checkpoint, rank: TensorParallelRank
) -> BackendChoice:
    num_threads = _num_threads(config, rank.world_size)
    backend = NativeBackend(num_threads)
    stored = {checkpoint.stored_format(name) for name in checkpoint.tensor_names}
    dtypes = resolve_file_dtypes(config, stored)
    model = build_model(checkpoint.config, rank, dtypes, config.model.max_model_len)
    block_size = resolve_block_size(config.cache.block_size, config.device.device)
    for spec in _stored_specs(model, block_size):
        if (problem := find_problem(spec)) is not None:
            raise ConfigError(f"the native backend {problem}; use backend reference")
    sampler = NativeSampler(backend.kernels, backend.team, model.vocab_size)
    weights_dtype = resolve_packed_dtype(config, dtypes)
    logger.info(
        "backend native: weights %s, computed in %s, KV %s, %d threads",
        "as stored" if weights_dtype == AUTO else weights_dtype,
        dtypes.weights.value,
        dtypes.kv.value,
        num_threads,
    )
    return BackendChoice(backend, model, sampler, weights_dtype)


def _stored_specs(model: Model, block_size: int) -> list[KVCacheSpec]:
    """Of the layers that store KV: what others share needs no look of its own."""
    layers = model.get_kv_spec().layers
    return [make_kv_cache_spec(one, block_size) for one in layers if one.shares_kv_with is None]


def resolve_file_dtypes(
    config: EngineConfig, stored_formats: Set[str], backend: str = "native"
) -> ModelDTypes:
    """What the native or torch backend computes and stores in, for a file of these formats.

    A file of float32 values is computed in float32: all else would change them.

    Raises:
        ConfigError: a dtype that the backend has not.
    """
    dtype = config.model.dtype
    plain = dtype.removeprefix("torch.")
    if plain not in _DTYPES:
        raise ConfigError(
            f"the {backend} backend computes in {' or '.join(_DTYPES[1:])}, not {dtype}; "
            "leave dtype out to follow the formats of the file"
        )
    is_exact = plain == DType.FLOAT32.value or (plain == AUTO and stored_formats == {"F32"})
    weights = DType.FLOAT32 if is_exact else DType.BFLOAT16
    return ModelDTypes(weights, _kv_dtype(config, weights))


def resolve_packed_dtype(config: EngineConfig, dtypes: ModelDTypes) -> str:
    """What the native backend packs matrices as: "auto" keeps the formats of the file."""
    if dtypes.weights is DType.FLOAT32:
        return DType.FLOAT32.value
    return config.model.dtype.removeprefix("torch.")


def _kv_dtype(config: EngineConfig, computed: DType) -> DType:
    stored = config.cache.kv_cache_dtype
    return computed if stored == AUTO else DType.parse(stored)


def _num_threads(config: EngineConfig, num_ranks: int) -> int:
    """Threads of one rank: as asked for, or the rank's share of the cores there are for us."""
    asked = config.device.num_threads
    if asked != AUTO:
        return asked
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
