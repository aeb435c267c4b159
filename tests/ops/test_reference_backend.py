"""The reference's operations and storage, against a second way to compute the same."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from kvloom.ops.base import AttentionMetadata, Batch, KVLayer, Ops, Parameter, Rope
from kvloom.ops.reference import ReferenceBackend
from kvloom.runner.collectives import SingleRankCommunicator

BACKEND = ReferenceBackend()
STORED = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]


def make_ops() -> Ops:
    none = np.zeros(0, np.int64)
    return BACKEND.ops(Batch(none, none, none), SingleRankCommunicator())


def parameter(values: object) -> Parameter:
    array = np.array(values, np.float32)
    made = Parameter("weight", array.shape, DType.FLOAT32, ())
    made.value = BACKEND.pack(made, array)
    return made


def spec(**changes: object) -> FullAttentionSpec:
    fields = {"block_size": 2, "num_kv_heads": 3, "head_size": 4, "dtype": DType.FLOAT32}
    return FullAttentionSpec(**(fields | changes))


def test_pack_makes_float32_and_refuses_another_shape() -> None:
    wanted = Parameter("w", (2, 3), DType.BFLOAT16, ())
    packed = BACKEND.pack(wanted, np.arange(6, dtype=np.float64).reshape(2, 3))
    assert packed.dtype == np.float32
    with pytest.raises(WeightsError, match=r"w should have shape \(2, 3\), not \(3, 2\)"):
        BACKEND.pack(wanted, np.zeros((3, 2)))


def test_embedding_gives_zeros_for_rows_of_other_ranks() -> None:
    table = parameter([[1, 2], [3, 4], [5, 6]])
    ids = np.array([4, 5, 6, 7, 0])
    out = make_ops().embedding(ids, table, first_row=4)
    np.testing.assert_array_equal(out, [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]])


def test_linear_and_its_bias() -> None:
    weight = parameter([[1, 2], [3, 4], [5, 6]])  # [out = 3, in = 2]
    x = np.array([[1, 10]], np.float32)
    np.testing.assert_array_equal(make_ops().linear(x, weight), [[21, 43, 65]])
    with_bias = make_ops().linear(x, weight, parameter([1, 0, -1]))
    np.testing.assert_array_equal(with_bias, [[22, 43, 64]])


def test_rms_norm_over_the_last_axis() -> None:
    x = np.array([[[3.0, 4.0], [0.0, 0.0]]], np.float32)  # mean square 12.5 and 0
    out = make_ops().rms_norm(x, parameter([1.0, 2.0]), 1e-5)
    root = math.sqrt(12.5 + 1e-5)
    np.testing.assert_allclose(out, [[[3 / root, 8 / root], [0, 0]]], rtol=1e-6)


ACTIVATIONS = {
    "silu": lambda x: x / (1.0 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2.0)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation_applies_to_the_first_half(name: str) -> None:
    gate = [-30.0, -2.0, -0.5, 0.0, 0.7, 3.0, 40.0]
    up = [2.0, -1.0, 4.0, 1.0, 0.5, 1.0, -1.0]
    out = make_ops().gated_activation(np.array([gate + up], np.float32), name)  # type: ignore[arg-type] # a parametrized name
    expected = [ACTIVATIONS[name](g) * u for g, u in zip(gate, up, strict=True)]
    np.testing.assert_allclose(out[0], expected, atol=1e-6)


def test_silu_of_very_negative_values_does_not_overflow() -> None:
    out = make_ops().gated_activation(np.array([[-1e30, 1.0]], np.float32), "silu")
    assert out[0, 0] == 0.0


def test_split_heads_takes_q_then_k_then_v() -> None:
    x = np.arange(2 * 16, dtype=np.float32).reshape(2, 16)
    q, k, v = make_ops().split_heads(x, num_heads=4, num_kv_heads=2, head_size=2)
    np.testing.assert_array_equal(q, x[:, :8].reshape(2, 4, 2))
    np.testing.assert_array_equal(k, x[:, 8:12].reshape(2, 2, 2))
    np.testing.assert_array_equal(v, x[:, 12:].reshape(2, 2, 2))


def test_rope_is_a_rotation_of_complex_pairs() -> None:
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((5, 2, 8)), rng.standard_normal((5, 1, 8))
    positions, rope = np.array([0, 1, 7, 100, 8191]), Rope((1.0, 0.1, 0.003), 1.2)
    rotated = make_ops().rope(q.astype(np.float32), k.astype(np.float32), positions, rope)
    for before, after in zip((q, k), rotated, strict=True):
        pairs = before[..., :3] + 1j * before[..., 3:6]
        turned = 1.2 * pairs * np.exp(1j * np.outer(positions, rope.inv_freq))[:, None]
        np.testing.assert_allclose(after[..., :3], turned.real, atol=1e-5)
        np.testing.assert_allclose(after[..., 3:6], turned.imag, atol=1e-5)
        np.testing.assert_array_equal(after[..., 6:], before[..., 6:].astype(np.float32))


def test_one_step_may_use_several_ropes() -> None:
    ops, x, positions = make_ops(), np.ones((1, 1, 2), np.float32), np.array([1])
    first, _ = ops.rope(x, x, positions, Rope((1.0,)))
    second, _ = ops.rope(x, x, positions, Rope((0.5,)))
    np.testing.assert_allclose(first[0, 0, 0], math.cos(1.0) - math.sin(1.0), rtol=1e-6)
    np.testing.assert_allclose(second[0, 0, 0], math.cos(0.5) - math.sin(0.5), rtol=1e-6)


def test_select_rows_repeats_and_reorders() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(make_ops().select_rows(x, np.array([2, 0, 2])), x[[2, 0, 2]])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("head_size_v", [None, 6])
def test_views_cover_exactly_the_planned_bytes(dtype: DType, head_size_v: int | None) -> None:
    planned = spec(dtype=dtype, head_size_v=head_size_v)
    raw = BACKEND.allocate_kv(planned.page_size_bytes * 5)
    assert raw.nbytes == planned.page_size_bytes * 5
    storage = BACKEND.view_kv(raw, planned, 5)
    assert storage.keys.nbytes + storage.values.nbytes == raw.nbytes
    assert storage.keys.shape == (5, 2, 3, 4)
    assert storage.values.shape == (5, 2, 3, head_size_v or 4)
    storage.keys[...], storage.values[...] = 1, 1
    ones = raw.view(storage.keys.dtype)
    assert (ones == 1).all()  # the views write through, and no byte is left out


def test_copy_blocks_moves_keys_and_values() -> None:
    raw = BACKEND.allocate_kv(spec().page_size_bytes * 4)
    storage = BACKEND.view_kv(raw, spec(), 4)
    storage.keys[1], storage.values[1] = 5.0, 7.0
    BACKEND.copy_blocks(storage, [(1, 3), (3, 2)])
    for block, (key, value) in enumerate([(0, 0), (5, 7), (5, 7), (5, 7)]):
        assert (storage.keys[block] == key).all()
        assert (storage.values[block] == value).all()


REFUSED: dict[str, KVCacheSpec] = {
    "window": SlidingWindowSpec(
        block_size=2, num_kv_heads=1, head_size=2, dtype=DType.FLOAT32, sliding_window=8
    ),
    "window without its own management": spec(sliding_window=8),
    "chunks without their own management": spec(attention_chunk_size=8),
    "int8": spec(head_size=32, dtype=DType.INT8),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_at_binding(kind: str) -> None:
    refused = REFUSED[kind]
    raw = BACKEND.allocate_kv(refused.page_size_bytes * 2)
    with pytest.raises(ConfigError, match="reference backend"):
        BACKEND.view_kv(raw, refused, 2)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not hold 3 blocks"):
        BACKEND.view_kv(BACKEND.allocate_kv(spec().page_size_bytes * 2), spec(), 3)


def stored_and_read(values: list[float], dtype: DType) -> np.ndarray:
    """The values as attention over a single key gives them back: that key's whole weight is 1."""
    planned = spec(block_size=1, num_kv_heads=1, head_size=1, head_size_v=len(values), dtype=dtype)
    storage = BACKEND.view_kv(BACKEND.allocate_kv(planned.page_size_bytes * 2), planned, 2)
    one = np.ones(1, np.int64)
    metadata = AttentionMetadata(
        block_table=one[None],
        slot_mapping=one,
        query_start=np.array([0, 1]),
        seq_lens=one,
        num_computed_tokens=one - 1,
        block_size=1,
    )
    ops = BACKEND.ops(Batch(one, one, one, [metadata]), SingleRankCommunicator())
    qk, v = np.ones((1, 1, 1), np.float32), np.array([[values]], np.float32)
    return ops.attention(KVLayer("layers.0.self_attn", planned, 0, storage), qk, qk, v, 1.0)[0]


def test_bfloat16_rounds_to_nearest_even() -> None:
    def value_of(bits: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])

    cases = {
        0x3F800000: 0x3F800000,  # 1.0 stays
        0x3F808000: 0x3F800000,  # a tie goes to the even neighbour below
        0x3F818000: 0x3F820000,  # a tie goes to the even neighbour above
        0x3F808001: 0x3F810000,  # just above the tie
        0x3F807FFF: 0x3F800000,  # just below the tie
        0xBF818000: 0xBF820000,  # the sign makes no difference
        0x7F7FFFFF: 0x7F800000,  # the largest float32 rounds to infinity
        0x00000001: 0x00000000,  # the smallest number rounds to zero
        0xFF800000: 0xFF800000,  # infinity stays
    }
    read = stored_and_read([value_of(bits) for bits in cases], DType.BFLOAT16)
    assert [hex(b) for b in read.view(np.uint32)] == [hex(b) for b in cases.values()]


@pytest.mark.parametrize("dtype", STORED)
def test_nan_stays_nan_and_float16_overflow_is_infinite(dtype: DType) -> None:
    patterns = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    read = stored_and_read(list(patterns.view(np.float32)), dtype)
    assert np.isnan(read).all()
    large = stored_and_read([1e6], dtype)[0]
    assert large == np.inf if dtype is DType.FLOAT16 else large == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_values_stay_in_their_row(value: float) -> None:
    ops = make_ops()
    x = np.array([[1.0, 2.0, 3.0, 4.0], [value, value, value, value]], np.float32)
    weight = parameter(np.eye(4) - 0.5)
    for out in (
        ops.linear(x, weight),
        ops.rms_norm(x, parameter([1.0] * 4), 1e-5),
        ops.gated_activation(x, "silu"),
        ops.add(x, -x),
    ):
        assert np.isfinite(out[0]).all()
        assert out.shape[0] == 2
