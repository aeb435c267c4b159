"""Bytes and block bounds of every spec, from their definitions."""

from __future__ import annotations

import pytest

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, UnsupportedModelError
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVLimits,
    LayerSpec,
    MLAAttentionSpec,
    SharedKVSpec,
    SlidingWindowSpec,
)
from kvloom.models.parallel import TensorParallelRank, share_heads

BF16 = DType.BFLOAT16


def full(block_size: int = 16, num_kv_heads: int = 8, **rest) -> FullAttentionSpec:
    rest = {"head_size": 128, "dtype": BF16, **rest}
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, **rest)


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "copies", "page_bytes"),
    [
        (1, 32, 8, 1, 65_536),
        (2, 16, 4, 1, 32_768),
        (4, 8, 2, 1, 16_384),
        (8, 4, 1, 1, 8_192),
        (16, 2, 1, 2, 8_192),
        (32, 1, 1, 4, 8_192),
    ],
)
def test_page_bytes_of_each_tensor_parallel_size(tp, heads, kv_heads, copies, page_bytes):
    for rank in range(tp):
        share = share_heads(32, 8, TensorParallelRank(rank, tp))
        assert (share.num_heads, share.num_kv_heads) == (heads, kv_heads)
        layer = LayerSpec(
            "layers.0.self_attn", share.num_kv_heads, 128, BF16, num_global_kv_heads=8
        )
        spec = make_kv_cache_spec(layer, block_size=16)
        assert spec.page_size_bytes == page_bytes
        assert spec.total_num_kv_heads == 8
    assert tp * page_bytes == copies * 65_536


@pytest.mark.parametrize(
    ("dtype", "page_bytes"),
    [
        (DType.FLOAT32, 2 * 16 * 8 * 64 * 4),
        (DType.FLOAT16, 2 * 16 * 8 * 64 * 2),
        (DType.BFLOAT16, 2 * 16 * 8 * 64 * 2),
        (DType.INT8, 2 * 16 * 8 * 2 * 34),  # 64 values are two groups of 32 and a bf16 scale
    ],
)
def test_page_bytes_of_each_dtype(dtype, page_bytes):
    assert full(head_size=64, dtype=dtype).page_size_bytes == page_bytes


def test_value_heads_may_have_a_size_of_their_own():
    assert full(head_size=128, head_size_v=64).page_size_bytes == 16 * 8 * (128 + 64) * 2
    assert full(head_size=128).value_head_size == 128


def test_int8_refuses_heads_that_cut_a_group():
    with pytest.raises(ConfigError, match="multiple of 32"):
        _ = full(block_size=1, num_kv_heads=1, head_size=40, dtype=DType.INT8).page_size_bytes


def test_latent_attention_stores_one_row_per_token():
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=512 + 64, dtype=BF16)
    assert spec.page_size_bytes == 16 * 576 * 2
    assert spec.max_num_blocks(33, KVLimits(34, 2048)) == 3


def test_a_sharing_layer_takes_nothing():
    spec = SharedKVSpec(block_size=16, target="layers.0.self_attn")
    limits = KVLimits(1000, 2048)
    assert (spec.page_size_bytes, spec.max_num_blocks(999, limits)) == (0, 0)
    assert spec.max_memory_usage_bytes(limits) == 0
    assert spec.shared_target == "layers.0.self_attn"
    assert full().shared_target is None


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks"), [(2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_the_last_token_of_a_request_is_not_stored(max_model_len, num_blocks):
    spec = full(block_size=16)
    assert spec.max_memory_usage_bytes(KVLimits(max_model_len, 8)) == num_blocks * 65_536


def most_blocks_touched(needed, num_tokens: int, budget: int, block_size: int) -> int:
    """Brute force: blocks that hold what is `needed` at each step of each cut into chunks.

    A step that starts with `computed` tokens adds up to `budget`, and may read from `needed` on.
    """
    most = 0
    for computed in range(num_tokens):
        end = min(computed + budget, num_tokens)
        first_block = needed(computed) // block_size
        most = max(most, (end - 1) // block_size - first_block + 1)
    return most


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 16, 33])
@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_window_bound_is_exact(block_size, window, budget):
    spec = SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=window
    )
    for num_tokens in (1, 2, 7, 30, 200):
        limits = KVLimits(num_tokens + 1, budget)
        bound = spec.max_num_blocks(num_tokens, limits)
        brute = most_blocks_touched(
            lambda computed: max(computed - window + 1, 0), num_tokens, budget, block_size
        )
        assert bound >= brute
        assert bound <= full(block_size).max_num_blocks(num_tokens, limits)
    assert bound == brute  # long enough for every alignment of the window


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 16, 33])
@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_chunk_bound_is_exact(block_size, chunk, budget):
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=BF16, attention_chunk_size=chunk
    )
    for num_tokens in (1, 2, 7, 30, 600):
        limits = KVLimits(num_tokens + 1, budget)
        bound = spec.max_num_blocks(num_tokens, limits)
        brute = most_blocks_touched(
            lambda computed: computed // chunk * chunk, num_tokens, budget, block_size
        )
        assert bound >= brute
    assert bound == brute  # long enough for every alignment of the chunk


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, FullAttentionSpec),
        ({"sliding_window_size": 512}, SlidingWindowSpec),
        ({"chunk_size": 64}, ChunkedLocalAttentionSpec),
        ({"shares_kv_with": "layers.0.self_attn"}, SharedKVSpec),
        ({"shares_kv_with": "layers.0.self_attn", "sliding_window_size": 512}, SharedKVSpec),
    ],
)
def test_a_layer_becomes_the_spec_of_its_kind(fields, expected):
    layer = LayerSpec("layers.1.self_attn", 4, 64, BF16, **fields)
    spec = make_kv_cache_spec(layer, block_size=32)
    assert type(spec) is expected
    assert spec.block_size == 32


def test_a_layer_keeps_its_numbers():
    layer = LayerSpec("x", 4, 64, DType.FLOAT16, num_global_kv_heads=16, head_size_v=32)
    assert make_kv_cache_spec(layer, 8) == FullAttentionSpec(
        block_size=8,
        num_kv_heads=4,
        head_size=64,
        dtype=DType.FLOAT16,
        head_size_v=32,
        num_global_kv_heads=16,
    )
    window = make_kv_cache_spec(LayerSpec("x", 4, 64, BF16, sliding_window_size=100), 8)
    assert window.sliding_window == 100
    chunk = make_kv_cache_spec(LayerSpec("x", 4, 64, BF16, chunk_size=100), 8)
    assert chunk.attention_chunk_size == 100


def test_a_layer_with_window_and_chunks_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"layers\.3\.self_attn"):
        make_kv_cache_spec(
            LayerSpec("layers.3.self_attn", 4, 64, BF16, sliding_window_size=8, chunk_size=8), 16
        )


def test_page_formula_has_the_numbers_of_the_page():
    spec = full(block_size=16, num_kv_heads=4, head_size_v=64, num_global_kv_heads=8)
    assert spec.page_formula == "16 tokens x 4 of 8 KV heads x (128 + 64) bfloat16"
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=BF16)
    assert latent.page_formula == "16 tokens x 576 bfloat16"
    assert "layers.0" in SharedKVSpec(block_size=16, target="layers.0").page_formula
