"""A model cut over ranks computes what the whole model computes, from exactly its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eager_backends import make_backend
from kvloom.dtypes import DType
from kvloom.errors import ParallelSizeError
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank, share_heads, valid_parallel_sizes
from kvloom.models.registry import build_model
from kvloom.ops.reference import ReferenceBackend
from kvloom.weights.steps import take_steps
from tiny_families import ALL_CASES
from tiny_models import (
    CASES,
    TinyRunner,
    build_loaded,
    make_token_ids,
    run_ranks,
    tensor_shapes,
)

DTYPES = ModelDTypes(DType.BFLOAT16, DType.BFLOAT16)
UNEVEN = {"vocab_size": 49, "intermediate_size": 41}


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [*ALL_CASES, "uneven"])
def test_logits_of_every_rank_equal_the_whole_model(case: str, world_size: int) -> None:
    config = CASES["qwen2_tied"] | UNEVEN if case == "uneven" else ALL_CASES[case]
    ids = make_token_ids(case)
    backend = make_backend()
    whole = TinyRunner(build_loaded(config, backend), backend).step(ids)

    def work(rank: TensorParallelRank, communicator: Any) -> np.ndarray:
        runner = TinyRunner(build_loaded(config, backend, rank), backend)
        chunks = [ids[:10], ids[10:11], ids[11:]]
        return np.concatenate([runner.step(chunk, communicator) for chunk in chunks])

    for logits in run_ranks(world_size, work):
        assert isinstance(logits, np.ndarray), logits
        np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", ["llama_mha_biases", "qwen3_biases_mqa", "qwen2_tied"])
def test_ranks_keep_each_row_and_column_once_or_copy_it(case: str, world_size: int) -> None:
    config = CASES[case] | UNEVEN
    counts = {name: np.zeros(shape, int) for name, shape in tensor_shapes(config).items()}
    for rank in range(world_size):
        model = build_model(config, TensorParallelRank(rank, world_size), DTYPES)
        for parameter in model.parameters:
            shapes = []
            for source in parameter.sources:
                kept = take_steps(counts[source.name], source.steps)  # a view
                kept += 1
                shapes.append(kept.shape)
            assert parameter.shape == (sum(s[0] for s in shapes), *shapes[0][1:])
    copies = max(world_size // config["num_key_value_heads"], 1)
    for name, count in counts.items():
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            expected = world_size
        else:
            expected = copies if "k_proj" in name or "v_proj" in name else 1
        assert (count == expected).all(), name


# 32 query heads, 8 KV heads, head size 128, blocks of 16, bfloat16: from the definition of a block.
BLOCK_BYTES = {1: 65_536, 2: 32_768, 4: 16_384, 8: 8_192, 16: 8_192, 32: 8_192}


def large_config(**changes: Any) -> dict[str, Any]:
    return CASES["llama_gqa"] | {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        **changes,
    }


@pytest.mark.parametrize("world_size", BLOCK_BYTES)
def test_kv_heads_per_rank_and_real_bytes(world_size: int) -> None:
    for rank in (0, world_size - 1):
        model = build_model(large_config(), TensorParallelRank(rank, world_size), DTYPES)
        for layer in model.get_kv_spec().layers:
            assert (layer.num_kv_heads, layer.num_global_kv_heads) == (max(8 // world_size, 1), 8)
            assert (layer.head_size, layer.dtype) == (128, DType.BFLOAT16)
    model = build_model(large_config(), TensorParallelRank(0, world_size), DTYPES)
    runner = TinyRunner(model, ReferenceBackend(), block_size=16)
    for layer in model.attention_layers:
        assert layer.spec is not None
        assert layer.spec.page_size_bytes == BLOCK_BYTES[world_size]
        real_bytes = layer.storage.keys.nbytes + layer.storage.values.nbytes
        assert real_bytes == BLOCK_BYTES[world_size] * runner.num_blocks


@pytest.mark.parametrize("world_size", [3, 12])
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(world_size: int) -> None:
    with pytest.raises(ParallelSizeError, match="valid sizes are 1, 2, 4, 8, 16, 32"):
        build_model(large_config(), TensorParallelRank(0, world_size), DTYPES)


def test_valid_sizes() -> None:
    assert valid_parallel_sizes(28, 4) == [1, 2, 4, 28]
    assert 12 not in valid_parallel_sizes(24, 8)
    with pytest.raises(ParallelSizeError, match="24 query heads and 8 KV heads"):
        share_heads(24, 8, TensorParallelRank(0, 12))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (28, 4), (8, 8), (6, 1), (9, 3)])
def test_every_query_head_finds_its_kv_head_on_its_rank(num_heads: int, num_kv_heads: int) -> None:
    group = num_heads // num_kv_heads
    for size in valid_parallel_sizes(num_heads, num_kv_heads):
        seen = []
        for rank in range(size):
            share = share_heads(num_heads, num_kv_heads, TensorParallelRank(rank, size))
            heads_per_kv = share.num_heads // share.num_kv_heads
            for local in range(share.num_heads):
                head = share.first_head + local
                assert share.first_kv_head + local // heads_per_kv == head // group
                seen.append(head)
        assert seen == list(range(num_heads))


def test_shares_cover_a_size_without_overlap() -> None:
    for size in (1, 7, 48, 49):
        for world_size in (1, 2, 3, 7):
            shares = [TensorParallelRank(r, world_size).share(size) for r in range(world_size)]
            assert [i for start, stop in shares for i in range(start, stop)] == list(range(size))
            lengths = [stop - start for start, stop in shares]
            assert max(lengths) - min(lengths) <= 1
