"""What a step asks of a device, against definitions and arithmetic by hand."""

from __future__ import annotations

import json

import pytest

from kvloom.dtypes import DType
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.simulate.work import ExpertWork, ModelWork, Visibility, count_work
from simulated_engines import CONFIGS
from visibility import Kind

KINDS = {
    Kind("full", 4): Visibility(),
    Kind("window", 4, 1): Visibility(window=1),
    Kind("window", 4, 5): Visibility(window=5),
    Kind("chunk", 4, 6): Visibility(chunk_size=6),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pairs_and_keys_are_those_that_queries_see(kind):
    for num_computed in range(15):
        for num_tokens in range(1, 15):
            end = num_computed + num_tokens
            pairs = [
                (query, key)
                for query in range(num_computed, end)
                for key in range(end)
                if kind.sees(query, key)
            ]
            chunk = (num_computed, num_tokens)
            assert KINDS[kind].num_pairs(chunk) == len(pairs)
            assert KINDS[kind].num_keys(chunk) == len({key for _, key in pairs})


def work_of(name: str, num_ranks: int = 1) -> ModelWork:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    dtypes = ModelDTypes(weights=DType.BFLOAT16, kv=DType.BFLOAT16)
    return count_work(build_model(config, TensorParallelRank(0, num_ranks), dtypes), num_ranks)


def test_llama_by_hand():
    """Llama-3.1-8B: 32 layers, hidden 4096, 32 and 8 heads of 128, inner 14336, 128256 tokens."""
    work = work_of("llama-3.1-8b")
    layer = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14336
    assert work.flops_per_token == 2 * 32 * layer
    assert work.flops_per_row == 2 * 4096 * 128256
    assert work.weight_bytes == 2 * (32 * layer + 4096 * 128256)
    (attention,) = work.attention
    assert attention.visibility == Visibility()
    assert attention.flops_per_pair == 32 * 32 * 2 * (128 + 128)
    assert attention.bytes_per_key == 32 * 2 * 8 * 128 * 2
    assert work.experts == ()
    assert work.num_collectives == 0


def test_ranks_share_the_work_and_sum_twice_per_layer():
    """Two sums per layer, one of embeddings, and the logits are gathered."""
    whole, part = work_of("llama-3.1-8b"), work_of("llama-3.1-8b", 4)
    assert part.flops_per_token * 4 == whole.flops_per_token
    assert part.flops_per_row * 4 == whole.flops_per_row
    assert part.weight_bytes * 4 == whole.weight_bytes
    assert part.attention[0].flops_per_pair * 4 == whole.attention[0].flops_per_pair
    assert part.num_collectives == 2 * 32 + 2
    assert part.collective_bytes_per_token == (2 * 32 + 1) * 4096 * 2
    assert part.collective_bytes_per_row == 128256 * 2


def test_gpt_oss_has_windows_and_experts():
    """gpt-oss-20b: 24 layers, every other with a window of 128; 4 of 32 experts, inner 2880."""
    work = work_of("gpt-oss-20b")
    assert {a.visibility for a in work.attention} == {Visibility(), Visibility(window=128)}
    assert {a.bytes_per_key for a in work.attention} == {12 * 2 * 8 * 64 * 2}
    expert_values = 3 * 2880 * 2880
    assert work.experts == (ExpertWork(32, 4, 2 * 32 * expert_values),) * 24
    dense = 2880 * (64 + 2 * 8) * 64 + 64 * 64 * 2880 + 2880 * 32  # attention and router
    assert work.flops_per_token == 2 * 24 * (dense + 4 * expert_values)


def test_expected_experts():
    """One token reads its own; two read one expert less than twice as many, by chance."""
    experts = ExpertWork(num_experts=4, num_chosen=1, num_bytes=400)
    assert experts.expected_bytes(1) == pytest.approx(100)
    assert experts.expected_bytes(2) == pytest.approx(100 * (1 / 4 * 1 + 3 / 4 * 2))
    assert experts.expected_bytes(10_000) == pytest.approx(400)


def test_latent_attention_counts_its_rows():
    """DeepSeek-V3: 61 layers, 128 heads; a row of 512 + 64 values is read as key and as value."""
    (attention,) = work_of("deepseek-v3").attention
    assert attention.bytes_per_key == 61 * (512 + 64) * 2
    assert attention.flops_per_pair == 61 * 128 * 2 * ((512 + 64) + 512)
