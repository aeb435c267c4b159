"""vLLM's configuration: what of it is refused, what is changed, and what it is in kvloom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm import envs

from kvloom.config import (
    AUTO,
    MAX_DRAFT_TOKENS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.request import MAX_LOGPROBS

WORKER_CLASS = "kvloom.vllm_plugin.worker.KvloomWorker"
BLOCK_SIZE = 16  # what layers are asked for; vLLM's groups take it or multiples of it
# Keys of vLLM's additional_config, and the fields of DeviceConfig that they fill.
DEVICE_OPTIONS = ("backend", "num_threads")
_LOAD_FORMATS = ("auto", "hf", "safetensors")
_CACHE_DTYPES = (AUTO, DType.BFLOAT16.value, DType.FLOAT16.value)
_EXECUTORS = (None, "uni", "mp")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An option of vLLM that cannot be honoured when `is_asked`."""

    option: str
    is_asked: Callable[[Any], Any]
    remedy: str = "leave it out"


_ONE = "set it to 1"


def _is_asked_of_speculation(is_asked: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same of vLLM's whole configuration."""
    return lambda c: c.speculative_config is not None and is_asked(c.speculative_config)


_SPECULATION_REFUSALS = tuple(
    _Refusal(f"speculative_config.{option}", _is_asked_of_speculation(is_asked), remedy)
    for option, is_asked, remedy in (
        ("method", lambda s: s.method != "ngram", "set it to ngram"),
        (
            "num_speculative_tokens",
            lambda s: s.num_speculative_tokens > MAX_DRAFT_TOKENS,
            f"set it to {MAX_DRAFT_TOKENS} or less",
        ),
        (
            "num_speculative_tokens_per_batch_size",
            lambda s: s.num_speculative_tokens_per_batch_size,
            "leave it out",
        ),
        (
            "rejection_sample_method",
            lambda s: s.rejection_sample_method != "standard",
            "set it to standard",
        ),
        ("enable_adaptive_verification", lambda s: s.enable_adaptive_verification, "leave it out"),
    )
)
_REFUSALS = (
    _Refusal("tensor_parallel_size", lambda c: c.parallel_config.tensor_parallel_size > 1, _ONE),
    _Refusal(
        "pipeline_parallel_size", lambda c: c.parallel_config.pipeline_parallel_size > 1, _ONE
    ),
    _Refusal("data_parallel_size", lambda c: c.parallel_config.data_parallel_size > 1, _ONE),
    _Refusal(
        "decode_context_parallel_size",
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        _ONE,
    ),
    _Refusal(
        "prefill_context_parallel_size",
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        _ONE,
    ),
    _Refusal(
        "distributed_executor_backend",
        lambda c: c.parallel_config.distributed_executor_backend not in _EXECUTORS,
        "set it to uni or mp",
    ),
    _Refusal("enable_dbo", lambda c: c.parallel_config.enable_dbo),
    _Refusal("runner", lambda c: c.model_config.runner_type != "generate", "set it to generate"),
    _Refusal("quantization", lambda c: c.model_config.quantization is not None),
    _Refusal("dtype", lambda c: _dtype_name(c) == "float16", "set it to bfloat16 or float32"),
    _Refusal(
        "revision", lambda c: c.model_config.revision, "fetch that revision, and name its folder"
    ),
    _Refusal("hf_overrides", lambda c: c.model_config.hf_overrides, "change config.json"),
    _Refusal("hf_config_path", lambda c: c.model_config.hf_config_path),
    _Refusal("model_impl", lambda c: c.model_config.model_impl not in ("auto", "vllm")),
    _Refusal("logits_processors", lambda c: c.model_config.logits_processors),
    _Refusal("enable_prompt_embeds", lambda c: c.model_config.enable_prompt_embeds),
    _Refusal("enable_sleep_mode", lambda c: c.model_config.enable_sleep_mode),
    _Refusal("return_sampling_mask", lambda c: c.model_config.return_sampling_mask),
    _Refusal(
        "logprobs_mode",
        lambda c: c.model_config.logprobs_mode != "raw_logprobs",
        "set it to raw_logprobs",
    ),
    _Refusal(
        "max_logprobs",
        lambda c: not 0 <= c.model_config.max_logprobs <= MAX_LOGPROBS,
        f"set it to {MAX_LOGPROBS} or less",
    ),
    _Refusal(
        "load_format",
        lambda c: c.load_config.load_format not in _LOAD_FORMATS,
        f"set it to one of {', '.join(_LOAD_FORMATS)}",
    ),
    _Refusal(
        "kv_cache_dtype",
        lambda c: c.cache_config.cache_dtype not in _CACHE_DTYPES,
        f"set it to one of {', '.join(_CACHE_DTYPES)}",
    ),
    _Refusal(
        "block_size",
        lambda c: (c.cache_config.block_size or BLOCK_SIZE) % BLOCK_SIZE,
        f"set it to a multiple of {BLOCK_SIZE}",
    ),
    _Refusal("kv_cache_dtype_skip_layers", lambda c: c.cache_config.kv_cache_dtype_skip_layers),
    _Refusal("kv_sharing_fast_prefill", lambda c: c.cache_config.kv_sharing_fast_prefill),
    _Refusal("kv_offloading_size", lambda c: c.cache_config.kv_offloading_size),
    _Refusal("cpu_offload_gb", lambda c: c.offload_config.uva.cpu_offload_gb),
    _Refusal("offload_group_size", lambda c: c.offload_config.prefetch.offload_group_size),
    _Refusal("enable_lora", lambda c: c.lora_config is not None),
    *_SPECULATION_REFUSALS,
    _Refusal("kv_transfer_config", lambda c: c.kv_transfer_config is not None),
    _Refusal("ec_transfer_config", lambda c: c.ec_transfer_config is not None),
    _Refusal("weight_transfer_config", lambda c: c.weight_transfer_config is not None),
    _Refusal("watermark_config", lambda c: c.watermark_config is not None),
)


def refuse_unsupported(vllm_config: Any) -> None:
    """Check every option that could change what is computed.

    Raises:
        ConfigError: names the option, and what to do about it.
    """
    if vllm_config.model_config is None:  # vLLM makes such configurations for itself
        return
    for refusal in _REFUSALS:
        if refusal.is_asked(vllm_config):
            raise ConfigError(f"kvloom's plugin does not do {refusal.option}; {refusal.remedy}")
    if vllm_config.model_config.is_multimodal_model:
        raise ConfigError(
            f"{vllm_config.model_config.architecture} takes more than text, which kvloom's plugin "
            "does not do; choose a text model"
        )
    _device_config(vllm_config.additional_config)


def adapt_config(vllm_config: Any) -> None:
    """Name our worker, and turn off what serves vLLM's own models only."""
    # vLLM looks for its platform while it still imports its own configuration.
    from vllm.config import CompilationMode, CUDAGraphMode

    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = WORKER_CLASS
    # Models are not torch modules, so there is nothing to compile or to capture.
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    vllm_config.compilation_config.cudagraph_capture_sizes = []
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is None and envs.VLLM_CPU_KVCACHE_SPACE:
        cache.kv_cache_memory_bytes = envs.VLLM_CPU_KVCACHE_SPACE * _GIB


def engine_config(vllm_config: Any) -> EngineConfig:
    """What vLLM's configuration is in kvloom's words."""
    model, cache, steps = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.scheduler_config,
    )
    return EngineConfig(
        model=ModelConfig(
            model=model.model,
            dtype=_dtype_name(vllm_config),
            max_model_len=model.max_model_len,
            seed=abs(model.seed or 0),
        ),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            kv_cache_dtype=cache.cache_dtype,
            memory_share=cache.gpu_memory_utilization,
            kv_cache_bytes=cache.kv_cache_memory_bytes,
            has_prefix_cache=cache.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=steps.max_num_seqs,
            max_num_batched_tokens=steps.max_num_batched_tokens,
        ),
        speculative=_speculative_config(vllm_config.speculative_config),
        device=_device_config(vllm_config.additional_config),
    )


def _speculative_config(asked: Any | None) -> SpeculativeConfig:
    """VLLM's n-grams; the drafts are our own, and vLLM schedules them."""
    if asked is None:
        return SpeculativeConfig()
    return SpeculativeConfig(
        num_draft_tokens=asked.num_speculative_tokens,
        min_ngram_tokens=asked.prompt_lookup_min,
        max_ngram_tokens=asked.prompt_lookup_max,
    )


def _device_config(additional_config: Mapping[str, Any]) -> DeviceConfig:
    """The options that vLLM has no name for.

    Raises:
        ConfigError: one that we have no name for either.
    """
    for name in additional_config:
        if name not in DEVICE_OPTIONS:
            raise ConfigError(
                f"unknown key {name!r} in additional_config; kvloom's plugin knows "
                f"{' and '.join(DEVICE_OPTIONS)}"
            )
    return DeviceConfig(**additional_config)


def _dtype_name(vllm_config: Any) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")
