"""Several choices of a prompt: each text is that of a request that computes everything itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from kvloom.ops.isa import built_isas
from kvloom.sched.forks import Forks
from tiny_folder import make_tiny_folder
from tiny_hybrids import HYBRID_CASES
from tiny_mixtures import MIXTURE_CASES

NATIVE = {"backend": "native", "num_threads": 1}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}

# Fields of the model's config, and options: window, chunk and latent rows, and KV formats.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {"backend": "reference"}),
    "windows": (HYBRID_CASES["gemma3_pattern"], {"backend": "reference"}),
    "chunks": (MIXTURE_CASES["llama4"], {"backend": "reference"}),
    "latent": (MIXTURE_CASES["deepseek_v3"], {"backend": "reference"}),
    "native": (WIDE, NATIVE | {"dtype": "float32", "block_size": 16}),
    "native int8": (WIDE, NATIVE | {"kv_cache_dtype": "int8", "block_size": 16}),
}
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "no prefix cache": {"has_prefix_cache": False},
    "tight": {"is_tight": True},
    "tight, no prefix cache": {"is_tight": True, "has_prefix_cache": False},
    "ahead": {"has_async_stepping": True},
    "drafts": {"num_draft_tokens": 3},
    "two ranks": {"tensor_parallel_size": 2},
}
PARAMS = SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True, presence_penalty=1.0)


def make_llm(folder: Path, options: dict[str, Any]) -> LLM:
    options = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 24} | options
    is_tight = options.pop("is_tight", False)
    llm = LLM(model=str(folder), num_blocks=600, **options)
    if not is_tight:
        return llm
    plan = llm._core.plan
    llm.shutdown()
    num_blocks = 1 + plan.num_reserved_blocks + plan.num_blocks_per_request
    return LLM(model=str(folder), num_blocks=num_blocks, **options)


def texts(llm: LLM) -> list[list[list[int]]]:
    """Prompts of whole blocks and others, as a batch."""
    rng = random.Random(0)
    prompts = [[rng.randrange(40) for _ in range(length)] for length in (1, 9, 16, 30, 33)]
    outputs = llm.generate(prompts, PARAMS)
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, options, and the texts without any fork."""
    fields, options = MODELS[request.param]
    if options["backend"] == "native" and not built_isas():
        pytest.skip("the native library is not built")
    fields = fields | {"vocab_size": 258, "max_position_embeddings": 256}
    folder = make_tiny_folder(tmp_path_factory.mktemp("model"), **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forks, "add", lambda *_: False)
        llm = make_llm(folder, options | {"has_prefix_cache": False})
        expected = texts(llm)
        llm.shutdown()
    return folder, options, expected


@pytest.mark.parametrize("pool", POOLS)
def test_texts_are_those_of_requests_that_share_nothing(model, pool):
    folder, options, expected = model
    llm = make_llm(folder, options | POOLS[pool])
    copies = watch_copies(llm)
    assert texts(llm) == expected
    assert (llm.stats.scheduler.num_preemptions > 0) == POOLS[pool].get("is_tight", False)
    assert sum(copies) > 0
    llm.shutdown()


def watch_copies(llm: LLM) -> list[int]:
    counts: list[int] = []
    schedule = llm._core.scheduler.schedule

    def watched() -> Any:
        output = schedule()
        counts.append(len(output.block_copies))
        return output

    llm._core.scheduler.schedule = watched  # type: ignore[method-assign]
    return counts


def test_only_the_first_choice_computes_the_prompt(tmp_path):
    """Thirty tokens once, the last one for each further choice, and what they generate."""
    llm = make_llm(make_tiny_folder(tmp_path), {"backend": "reference", "has_prefix_cache": False})
    [output] = llm.generate([list(range(30))], PARAMS)
    assert llm.stats.steps.num_scheduled_tokens == 30 + 3 + 4 * 11
    assert output.num_cached_tokens == 0
    llm.shutdown()


def test_cached_tokens_are_those_of_the_first_choice(tmp_path):
    llm = make_llm(make_tiny_folder(tmp_path), {"backend": "reference"})
    cached = [llm.generate([list(range(30))], PARAMS)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 28]
    # Four choices ask for thirty tokens each. The first finds none, then seven blocks; the others
    # share all but the last token.
    assert llm.stats.cache.num_queried_tokens == 2 * 4 * 30
    assert llm.stats.cache.num_hit_tokens == 28 + 6 * 29
    llm.shutdown()
