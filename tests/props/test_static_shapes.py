"""Static shapes change no text, no step has another shape, and what is padding is never read."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvloom.errors import CapacityError
from kvloom.ops.isa import built_isas
from static_engines import Watch, make_engine, make_prompts, run, watching
from tiny_families import ALL_CASES

LONGEST_PROMPT, MAX_TOKENS = 40, 6
MAX_MODEL_LEN = LONGEST_PROMPT + MAX_TOKENS
MODELS = {
    "full": {**ALL_CASES["llama_gqa"], "head_dim": 16},
    "window": {**ALL_CASES["mistral_window"], "head_dim": 16, "num_hidden_layers": 2},
    "hybrid": {**ALL_CASES["gemma3_pattern"], "tie_word_embeddings": False, "sliding_window": 9},
    "chunk": ALL_CASES["llama4"],  # with experts
    "latent": ALL_CASES["deepseek_v3"],
}
MODELS = {name: {**model, "max_position_embeddings": 64} for name, model in MODELS.items()}
NATIVE = [name for name in MODELS if name != "latent"]
RUNS = [
    *(("reference", name) for name in MODELS),
    *(("native", name) for name in NATIVE),
    *(pytest.param("torch", name, marks=pytest.mark.torch) for name in ("hybrid", "chunk")),
]


def options_of(backend: str) -> dict[str, Any]:
    if backend == "native" and not built_isas():
        pytest.skip("the native library is not built")
    block_size = 16 if backend == "native" else 4
    return {
        "backend": backend,
        "dtype": "float32",
        "block_size": block_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 6,
    }


def fewest_blocks(name: str, options: dict[str, Any]) -> int:
    """The smallest pool that holds one request of any length.

    It depends on every budget, the buckets too: the planner lays the groups out for them.
    """
    for num_blocks in range(2, 100):
        try:
            make_engine(MODELS[name], **options, num_blocks=num_blocks).shutdown()
        except CapacityError:
            continue
        return num_blocks
    raise AssertionError("no pool is large enough")


PROMPTS = make_prompts(seed=1, count=7, longest=LONGEST_PROMPT, vocab_size=48)


@functools.cache
def dynamic_texts(backend: str, name: str) -> list[list[int]]:
    core = make_engine(MODELS[name], **options_of(backend), num_blocks=200)
    return run(core, PROMPTS, MAX_TOKENS)


def buckets(largest: int, at_least: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """One to four sizes, of which the last is at least so large."""
    last = st.integers(at_least, largest)
    some = st.sets(st.integers(1, largest), max_size=3)
    return st.builds(lambda n, few: (*sorted(m for m in few if m < n), n), last, some)


@pytest.mark.parametrize(("backend", "name"), RUNS)
def test_texts_equal_those_of_dynamic_shapes(backend: str, name: str, scale: int) -> None:
    """The pool is tight, and some requests have their prompts scored: many rows of logits."""

    # Without shrinking: it would run thousands of engines.
    @settings(
        max_examples=(3 if backend == "native" else 2) * scale,
        phases=(Phase.generate,),
    )
    @given(
        num_tokens=buckets(64),
        num_reqs=buckets(7),
        context_lens=buckets(80, at_least=MAX_MODEL_LEN),
        segment=st.sampled_from(["auto", 1, 7, 30]),
        num_more_blocks=st.integers(0, 12),
        num_draft_tokens=st.sampled_from([0, 3]),
    )
    def check(
        num_tokens: tuple[int, ...],
        num_reqs: tuple[int, ...],
        context_lens: tuple[int, ...],
        segment: Any,
        num_more_blocks: int,
        num_draft_tokens: int,
    ) -> None:
        options = options_of(backend) | {
            "has_static_shapes": True,
            "num_batched_tokens_buckets": num_tokens,
            "num_seqs_buckets": num_reqs,
            "context_len_buckets": context_lens,
            "prefill_segment": segment,
            "num_draft_tokens": num_draft_tokens,
        }
        num_blocks = fewest_blocks(name, options) + num_more_blocks
        watch = Watch()
        with watching(watch, backend):
            core = make_engine(MODELS[name], **options, num_blocks=num_blocks)
        assert len(set(watch.warmed)) == len(watch.warmed) > 0
        assert not watch.seen
        assert run(core, PROMPTS, MAX_TOKENS) == dynamic_texts(backend, name)
        assert set(watch.seen) <= set(watch.warmed)

    dynamic_texts(backend, name)
    check()


@pytest.mark.parametrize(("backend", "name"), RUNS)
def test_poison_where_nothing_may_be_read_changes_no_logit(backend: str, name: str) -> None:
    """The null block and all unwritten slots are NaN, and so is what comes out of padding."""
    options = options_of(backend) | {
        "num_batched_tokens_buckets": (8, 32),
        "num_seqs_buckets": (2, 8),
        "context_len_buckets": (32, 64),
    }
    num_blocks = fewest_blocks(name, options) + 4
    watch = Watch(poisons=True)
    with watching(watch, backend):
        core = make_engine(MODELS[name], **options, num_blocks=num_blocks)
    assert run(core, PROMPTS, MAX_TOKENS) == dynamic_texts(backend, name)
    steps = core.stats.steps
    assert steps.num_padded_tokens > steps.num_scheduled_tokens > 0
    if name == "full":
        # Prefill and decode share steps, and so do several prefills; somebody gives way.
        mixtures = list(zip(watch.num_prefills, watch.num_decodes, strict=True))
        assert any(prefills and decodes for prefills, decodes in mixtures)
        assert any(prefills > 1 for prefills, _ in mixtures)
        assert core.stats.scheduler.num_preemptions > 0


@pytest.mark.parametrize("world_size", [2])
def test_ranks_pad_alike(world_size: int) -> None:
    watch = Watch()
    with watching(watch, "reference"):
        core = make_engine(
            MODELS["hybrid"],
            **options_of("reference"),
            num_blocks=60,
            tensor_parallel_size=world_size,
            has_static_shapes=True,
        )
    assert run(core, PROMPTS[:4], MAX_TOKENS) == dynamic_texts("reference", "hybrid")[:4]
    assert {watch.warmed.count(shape) for shape in watch.warmed} == {world_size}
    assert set(watch.seen) <= set(watch.warmed)
