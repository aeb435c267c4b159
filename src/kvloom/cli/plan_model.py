"""What `kvloom plan` knows of a model: its config, the formats of its tensors, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvloom.config import AUTO, EngineConfig
from kvloom.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from kvloom.dtypes import DType
    from kvloom.models.base import Model, ModelDTypes
    from kvloom.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What there is of a model.

    Attributes:
        stored_formats: of a GGUF file's tensors, else as the config says.
        checkpoint: the GGUF file; None where the config alone was read.
    """

    config: Mapping[str, Any]
    stored_formats: set[str]
    checkpoint: Checkpoint | None = None


def read_model(reference: str) -> ModelFiles:
    """The config, and the tensors' formats.

    Raises:
        UnsupportedModelError: the config names no format that there is.
    """
    from kvloom.dtypes import DType
    from kvloom.weights.checkpoint import open_checkpoint, read_config
    from kvloom.weights.source import CONFIG_FILES, resolve_model

    path = resolve_model(reference, CONFIG_FILES)
    if path.is_file() and path.suffix != ".json":
        checkpoint = open_checkpoint(path)
        formats = {checkpoint.stored_format(name) for name in checkpoint.tensor_names}
        return ModelFiles(checkpoint.config, formats, checkpoint)
    config = read_config(path)
    return ModelFiles(config, {"F32" if config_dtype(config) is DType.FLOAT32 else "BF16"})


def count_weights_bytes(model: Model, config: EngineConfig, files: ModelFiles, device: str) -> int:
    """On this host what the engine will hold of a file; elsewhere as the dtype says."""
    if device != "cpu" or files.checkpoint is None:
        return sum(parameter.num_bytes for parameter in model.parameters)
    from kvloom.runner.backends import resolve_file_dtypes, resolve_packed_dtype
    from kvloom.weights.loader import count_weights_bytes as count_loaded_bytes

    dtypes = resolve_file_dtypes(config, files.stored_formats)
    return count_loaded_bytes(model, files.checkpoint, resolve_packed_dtype(config, dtypes))


def config_dtype(model_config: Mapping[str, Any]) -> DType:
    """The format of the weights that a config names; float32 if it names none.

    Raises:
        UnsupportedModelError: there is no such format.
    """
    from kvloom.dtypes import DType

    for name in ("dtype", "torch_dtype"):
        if model_config.get(name) is not None:
            try:
                return DType.parse(model_config[name])
            except ConfigError as error:
                raise UnsupportedModelError(f"the config's {name}: {error}") from None
    return DType.FLOAT32


def resolve_dtypes(config: EngineConfig, files: ModelFiles, device: str) -> ModelDTypes:
    """On this host those of the engine; elsewhere the config's, as vLLM has them."""
    from kvloom.dtypes import DType
    from kvloom.models.base import ModelDTypes

    if device == "cpu":
        from kvloom.runner.backends import resolve_file_dtypes

        dtypes = resolve_file_dtypes(config, files.stored_formats)
        if dtypes.kv is DType.FP8:
            raise ConfigError("no backend of this host stores fp8; set kv_cache_dtype to int8")
        return dtypes
    dtype, kv = config.model.dtype, config.cache.kv_cache_dtype
    weights = config_dtype(files.config) if dtype == AUTO else DType.parse(dtype)
    return ModelDTypes(weights=weights, kv=weights if kv == AUTO else DType.parse(kv))
