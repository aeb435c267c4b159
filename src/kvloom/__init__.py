"""kvloom: a KV-caching engine for LLM inference.

Public names are imported on first use, so that `import kvloom` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom import errors
    from kvloom.config import EngineConfig
    from kvloom.engine.async_llm import AsyncLLM
    from kvloom.engine.beam_search import BeamSearchOutput, BeamSequence
    from kvloom.engine.llm import LLM
    from kvloom.engine.outputs import CompletionOutput, RequestOutput, TextDelta
    from kvloom.request import SamplingParams
    from kvloom.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSequence",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TextDelta",
    "errors",
]

_HOMES = {
    "AsyncLLM": "kvloom.engine.async_llm",
    "BeamSearchOutput": "kvloom.engine.beam_search",
    "BeamSequence": "kvloom.engine.beam_search",
    "LLM": "kvloom.engine.llm",
    "CompletionOutput": "kvloom.engine.outputs",
    "EngineConfig": "kvloom.config",
    "RequestOutput": "kvloom.engine.outputs",
    "SamplingParams": "kvloom.request",
    "StructuredOutputs": "kvloom.structured_outputs",
    "TextDelta": "kvloom.engine.outputs",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    import importlib

    if name == "errors":
        return importlib.import_module("kvloom.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
