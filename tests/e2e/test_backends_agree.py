"""Tiny models of several families write the same text on every backend and in every engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM
from kvloom.ops.isa import built_isas
from tiny_families import ALL_CASES
from tiny_folder import greedy, make_tiny_folder

# Each with the number of blocks that is too few for all prompts at once.
FAMILIES = {
    "qwen3_tied": 8,
    "gemma3n": 14,
    "gemma4_experts": 14,
    "gpt_oss": 11,
    "llama4": 14,
    "deepseek_v3": 8,
}
HEAD_SIZES = {"head_dim": 16, "global_head_dim": 16}  # what the native kernels take
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
# What an engine may do: wait for room and compute again, guess, pad its steps, schedule ahead.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"num_blocks": 100},
    "tight": {"max_num_batched_tokens": 16},
    "drafts": {"num_blocks": 100, "num_draft_tokens": 3},
    "static": {"num_blocks": 100, "has_static_shapes": True, "max_num_batched_tokens": 24},
    "ahead": {"num_blocks": 100, "has_async_stepping": True, "max_num_batched_tokens": 24},
}
PROMPTS = [[7, 8, 9] * 9, list(range(20, 50)), [1], list(range(20, 40)) + [3] * 12]


@pytest.fixture(scope="module")
def texts_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def texts(family: str, backend: str, engine: str) -> tuple[tuple[int, ...], ...]:
        config = {**ALL_CASES[family], "vocab_size": 258}
        changes = LATENT if "kv_lora_rank" in config else HEAD_SIZES
        folder: Path = make_tiny_folder(tmp_path_factory.mktemp(family), **{**config, **changes})
        options = {"num_blocks": FAMILIES[family], "max_model_len": 60, **ENGINES[engine]}
        llm = LLM(model=folder, backend=backend, dtype="float32", **options)
        assert llm._core.executor._workers[0]._backend.name == backend
        outputs = llm.generate(PROMPTS, greedy(max_tokens=12))
        assert (llm.stats.scheduler.num_preemptions > 0) == (engine == "tight")
        llm._core.manager.check()
        llm.shutdown()
        return tuple(tuple(output.outputs[0].token_ids) for output in outputs)

    return texts


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("native", marks=pytest.mark.skipif(not built_isas(), reason="not built")),
        pytest.param("torch", marks=pytest.mark.torch),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_reference_s(texts_of: Any, family: str, backend: str, engine: str) -> None:
    assert texts_of(family, backend, engine) == texts_of(family, "reference", "plain")
