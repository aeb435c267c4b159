"""From a configuration to an engine with all it needs to take requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.config import EngineConfig
from kvloom.engine.core import EngineCore
from kvloom.engine.inputs import InputProcessor, ModelLimits
from kvloom.engine.stats import EngineObserver
from kvloom.errors import ConfigError
from kvloom.tokenizer import Tokenizer, load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.source import resolve_model


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model in memory, and what turns prompts into its requests."""

    core: EngineCore
    tokenizer: Tokenizer
    inputs: InputProcessor


def as_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig as given, or made of its options by name.

    Raises:
        ConfigError: both are given, or one is not valid.
    """
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError(f"{config!r} is no EngineConfig; write LLM(model=...)")
    if config is not None and options:
        raise ConfigError("give an EngineConfig or options, not both")
    return config or EngineConfig.from_options(options)


def load_engine(config: EngineConfig, observer: EngineObserver | None = None) -> LoadedEngine:
    """Load the model that `config` names.

    Raises:
        ConfigError, ModelError, CapacityError: with the remedy.
    """
    checkpoint = open_checkpoint(resolve_model(config.model.model))
    tokenizer = load_tokenizer(checkpoint)
    core = EngineCore(config, checkpoint, tokenizer, observer)
    limits = ModelLimits(core.max_model_len, core.executor.vocab_size, tokenizer.eos_token_ids)
    return LoadedEngine(core, tokenizer, InputProcessor(tokenizer, limits, config.model.seed))
