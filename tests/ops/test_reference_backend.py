"""The reference's storage: where keys and values lie, and in which format."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SharedKVSpec
from kvloom.ops.base import Attention, AttentionMetadata, Batch, KVLayer, Parameter
from kvloom.ops.reference import ReferenceBackend
from kvloom.runner.collectives import SingleRankCommunicator

BACKEND = ReferenceBackend()
STORED = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]


def spec(**changes: object) -> FullAttentionSpec:
    fields = {"block_size": 2, "num_kv_heads": 3, "head_size": 4, "dtype": DType.FLOAT32}
    return FullAttentionSpec(**(fields | changes))


def test_pack_makes_float32_and_refuses_another_shape() -> None:
    wanted = Parameter("w", (2, 3), DType.BFLOAT16, ())
    packed = BACKEND.pack(wanted, np.arange(6, dtype=np.float64).reshape(2, 3))
    assert packed.dtype == np.float32
    with pytest.raises(WeightsError, match=r"w should have shape \(2, 3\), not \(3, 2\)"):
        BACKEND.pack(wanted, np.zeros((3, 2)))


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


@pytest.mark.parametrize("dtype", STORED)
def test_latent_values_are_the_first_columns_of_the_keys(dtype: DType) -> None:
    planned = MLAAttentionSpec(
        block_size=2, num_kv_heads=1, head_size=5, head_size_v=3, dtype=dtype
    )
    raw = BACKEND.allocate_kv(planned.page_size_bytes * 4)
    storage = BACKEND.view_kv(raw, planned, 4)
    assert storage.keys.shape == (4, 2, 1, 5)
    assert storage.values.shape == (4, 2, 1, 3)
    storage.keys[...] = np.arange(5)
    assert (storage.values == np.arange(3)).all()
    assert storage.keys.nbytes == raw.nbytes
    BACKEND.copy_blocks(storage, [(1, 2)])
    assert (storage.keys == np.arange(5)).all()


def test_layers_lie_side_by_side_in_the_blocks_of_a_tensor() -> None:
    # The first page has 6 bytes, so the float32 values of the second are not aligned.
    first = spec(block_size=1, num_kv_heads=1, head_size=1, head_size_v=2, dtype=DType.FLOAT16)
    second = spec()
    num_blocks, offset = 3, first.page_size_bytes
    raw = BACKEND.allocate_kv(num_blocks * (offset + second.page_size_bytes + 2))
    storages = [BACKEND.view_kv(raw, first, 3), BACKEND.view_kv(raw, second, 3, offset)]
    for number, storage in enumerate(storages):
        for block in range(num_blocks):
            storage.keys[block], storage.values[block] = 10 * number + block, 5 * number + block
    for number, storage in enumerate(storages):
        for block in range(num_blocks):
            assert (storage.keys[block] == 10 * number + block).all()
            assert (storage.values[block] == 5 * number + block).all()
    blocks = raw.reshape(num_blocks, -1)
    assert (blocks[1, :offset].view(np.float16) == 1).all()
    assert blocks[1, offset : offset + 4].view(np.float32) == 11
    assert (blocks[:, -2:] == 0).all()


REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "int8": (spec(head_size=32, dtype=DType.INT8), "does not store int8"),
    "shared": (SharedKVSpec(block_size=2, target="layers.0.self_attn"), "layers that store KV"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_at_binding(kind: str) -> None:
    refused, why = REFUSED[kind]
    with pytest.raises(ConfigError, match=why):
        BACKEND.view_kv(BACKEND.allocate_kv(4096), refused, 2)


@pytest.mark.parametrize(("num_blocks", "offset"), [(3, 0), (2, 8)])
def test_too_little_memory_is_refused(num_blocks: int, offset: int) -> None:
    raw = BACKEND.allocate_kv(spec().page_size_bytes * 2)
    with pytest.raises(ConfigError, match=f"do not hold {num_blocks} blocks"):
        BACKEND.view_kv(raw, spec(), num_blocks, offset)


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
    return ops.attention(
        KVLayer("layers.0.self_attn", planned, 0, storage), qk, qk, v, Attention(1.0)
    )[0]


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
