"""Tiny models of every family on the native backend: the reference's logits, chunk by chunk."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.isa import built_isas, can_run
from kvloom.ops.reference import ReferenceBackend
from native_runner import SIZES, Chunk, NativeRunner, make_backend, make_table
from tiny_families import ALL_CASES
from tiny_models import TinyRunner, build_loaded, make_token_ids, run_ranks

ISAS = [isa for isa in built_isas() if can_run(isa)]


def fit_kernels(config: dict[str, Any]) -> dict[str, Any]:
    """The kernels take heads, and latent rows, of multiples of 16."""
    if "kv_lora_rank" in config:
        return {**config, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    if config["model_type"] == "phi3":  # heads of 32, with as many rotated pairs as before
        share = config.get("partial_rotary_factor", 1.0)
        return {**config, "hidden_size": 128, "partial_rotary_factor": share / 4}
    return {"head_dim": 16, **config}


CONFIGS = {case: fit_kernels(config) for case, config in ALL_CASES.items()}
# A window, shared KV, soft caps; norms of values; rotations, experts and scales; latent rows.
PORTABLE_CASES = ["gemma3n", "gemma4_experts", "llama4", "deepseek_v3"]
SMALL = replace(SIZES, max_model_len=64)


def reference_logits(case: str) -> np.ndarray:
    reference = ReferenceBackend()
    model = build_loaded(CONFIGS[case], reference)
    return TinyRunner(model, reference, 16).step(make_token_ids(case))


def chunked_logits(runner: NativeRunner, ids: list[int], cuts: list[int]) -> np.ndarray:
    table, bounds = make_table(1, 4), [0, *cuts, len(ids)]
    steps = [runner.step([Chunk(ids[a:b], table, a)])[0] for a, b in itertools.pairwise(bounds)]
    return np.concatenate(steps)


@pytest.mark.parametrize("case", ALL_CASES)
def test_logits_equal_the_reference(case: str) -> None:
    runner = NativeRunner(CONFIGS[case], make_backend(), sizes=SMALL)
    logits, expected = (
        chunked_logits(runner, make_token_ids(case), [10, 11]),
        reference_logits(case),
    )
    # As near as the reference is to transformers: sandwich norms amplify what is rounded.
    bound = 2e-5 + 4e-6 * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(("packed", "tolerance"), [("F32", 2e-5), ("BF16", 0.15)])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", PORTABLE_CASES)
def test_every_instruction_set_and_format(
    case: str, isa: str, packed: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and batch mates change no bit; bfloat16 comes near."""
    monkeypatch.setenv("KVLOOM_ISA", isa)
    kv_dtype = DType.FLOAT32 if packed == "F32" else DType.BFLOAT16
    backend, ids = make_backend(), make_token_ids(case)

    def runner() -> NativeRunner:
        return NativeRunner(CONFIGS[case], backend, kv_dtype, packed, sizes=SMALL)

    whole = chunked_logits(runner(), ids, [])
    expected = reference_logits(case)
    assert np.abs(whole - expected).max() < tolerance * max(1.0, expected.std())
    np.testing.assert_array_equal(chunked_logits(runner(), ids, [1, 2, 9, 17]), whole)
    mate = Chunk(ids[::-1], make_table(2, 4, 65))
    _, beside = runner().step([mate, Chunk(ids, make_table(1, 4))])
    np.testing.assert_array_equal(beside, whole)


@pytest.mark.parametrize("case", ["gemma3n", "gpt_oss", "llama4", "deepseek_v3"])
def test_two_ranks_equal_the_reference(case: str) -> None:
    ids = make_token_ids(case)
    make_backend()  # skips here rather than in a thread

    def work(rank: TensorParallelRank, communicator: Any) -> np.ndarray:
        backend = make_backend(1)
        runner = NativeRunner(
            CONFIGS[case], backend, rank=rank, communicator=communicator, sizes=SMALL
        )
        return chunked_logits(runner, ids, [9])

    for logits in run_ranks(2, work):
        assert isinstance(logits, np.ndarray), logits
        np.testing.assert_allclose(logits, reference_logits(case), rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", ["gemma3n", "gemma4_experts", "gpt_oss", "deepseek_v3"])
def test_activation_bytes_count_what_tokens_need(case: str) -> None:
    """At least the residual and all experts' results; nothing else grows with the tokens."""
    sizes = [replace(SMALL, max_num_tokens=count) for count in (256, 512, 1024)]
    config, backend = CONFIGS[case], make_backend()
    few, more, most = (
        NativeRunner(config, backend, sizes=size).executable.activation_bytes for size in sizes
    )
    num_choices = config.get("num_experts_per_tok", config.get("top_k_experts", 1))
    assert more - few >= 256 * 4 * config["hidden_size"] * (1 + num_choices)
    # The orders of experts have rows for logits as well, of which there are 1,024 here.
    assert most - more == 2 * (more - few)
