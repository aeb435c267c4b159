"""The torch backend's own: formats, storage, devices, and tiles over many requests."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from eager_backends import make_backend, make_ops
from kvloom.dtypes import DType
from kvloom.errors import ConfigError, WeightsError
from kvloom.kv.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SharedKVSpec,
    SlidingWindowSpec,
)
from kvloom.ops.base import Attention, AttentionMetadata, Batch, KVLayer, Ops, Parameter
from reference_cache import (
    NAN_BITS,
    Cache,
    Piece,
    dense_attention,
    make_sinks,
    random_qkv,
    sees_all,
    sees_window,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eager_backends.NAME", "torch")


def spec(**changes: Any) -> FullAttentionSpec:
    fields = {"block_size": 2, "num_kv_heads": 3, "head_size": 4, "dtype": DType.FLOAT32}
    return FullAttentionSpec(**(fields | changes))


def test_every_operation_takes_the_vocabulary_s_arguments() -> None:
    from kvloom.ops.torch_ops import TorchOps

    names = [name for name in vars(Ops) if not name.startswith("_")]
    assert len(names) > 25
    for name in names:
        wanted = inspect.signature(getattr(Ops, name)).parameters
        assert list(inspect.signature(getattr(TorchOps, name)).parameters) == list(wanted), name


# --- weights ----------------------------------------------------------------------------------


def test_matrices_take_the_model_s_format_and_vectors_stay_float32() -> None:
    import torch

    backend = make_backend(dtype=DType.BFLOAT16)
    for shape, is_stacked, dtype in (
        ((2, 3), False, torch.bfloat16),
        ((4, 2, 3), True, torch.bfloat16),
        ((6,), False, torch.float32),
        ((2, 3), True, torch.float32),  # a vector per expert
    ):
        wanted = Parameter("w", shape, DType.BFLOAT16, (), is_stacked=is_stacked)
        array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
        array.flags.writeable = False  # as mapped files are
        packed = backend.pack(wanted, array)
        assert packed.dtype == dtype
        np.testing.assert_array_equal(backend.to_host(packed.float()), array)


def test_another_shape_is_refused() -> None:
    wanted = Parameter("w", (2, 3), DType.FLOAT32, ())
    with pytest.raises(WeightsError, match=r"w should have shape \(2, 3\), not \(3, 2\)"):
        make_backend().pack(wanted, np.zeros((3, 2)))


def test_a_bfloat16_product_is_one_of_rounded_values() -> None:
    """Sums of few small integers are exact, so only the rounding of x shows."""
    backend = make_backend(dtype=DType.BFLOAT16)
    weight = Parameter("w", (1, 2), DType.BFLOAT16, (), value=np.array([[1.0, 2.0]], np.float32))
    x = np.array([[257.0, 3.0]], np.float32)  # bfloat16 has 8 bits: 257 becomes 256
    assert make_ops(backend).linear(x, weight) == [[262.0]]
    assert make_ops().linear(x, weight) == [[263.0]]


# --- storage ----------------------------------------------------------------------------------


def fill(rows: Any, byte: int) -> None:
    """Set every byte of keys or values."""
    import torch

    for part in (rows.codes, rows.scales):
        if part is not None:
            part.view(torch.int8)[...] = byte


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT8])
@pytest.mark.parametrize("head_size_v", [None, 64])
def test_views_cover_exactly_the_planned_bytes(dtype: DType, head_size_v: int | None) -> None:
    backend = make_backend()
    planned = spec(dtype=dtype, head_size=32, head_size_v=head_size_v)
    raw = backend.allocate_kv(planned.page_size_bytes * 5)
    assert len(raw) == planned.page_size_bytes * 5
    assert (backend.to_host(raw) == 0).all()
    storage = backend.view_kv(raw, planned, 5)
    for rows, size in ((storage.keys, 32), (storage.values, head_size_v or 32)):
        assert rows.codes.shape == (5, 2, 3, size)
        if rows.scales is not None:
            assert rows.scales.shape == (5, 2, 3, size // 32)
        fill(rows, 1)
    assert (backend.to_host(raw) == 1).all()  # the views write through, and no byte is left out


def test_copy_blocks_in_order() -> None:
    backend = make_backend()
    for dtype in (DType.FLOAT32, DType.INT8):
        planned = spec(dtype=dtype, head_size=32)
        raw = backend.allocate_kv(planned.page_size_bytes * 4)
        blocks = raw.view(4, -1)
        blocks[1] = 7
        backend.copy_blocks(backend.view_kv(raw, planned, 4), [(1, 3), (3, 2)])
        assert [int(block.unique()) for block in blocks] == [0, 7, 7, 7]


def test_layers_lie_side_by_side_in_the_blocks_of_a_tensor() -> None:
    backend = make_backend()
    first = spec(block_size=1, num_kv_heads=1, head_size=2)
    second = MLAAttentionSpec(
        block_size=2, num_kv_heads=1, head_size=5, head_size_v=3, dtype=DType.FLOAT32
    )
    sizes = (first.page_size_bytes, second.page_size_bytes)
    raw = backend.allocate_kv(3 * (sum(sizes) + 4))
    layers = [backend.view_kv(raw, first, 3), backend.view_kv(raw, second, 3, sizes[0])]
    fill(layers[0].keys, 1)
    fill(layers[0].values, 2)
    fill(layers[1].keys, 3)
    assert layers[1].values is None
    half = sizes[0] // 2
    expected = [1] * half + [2] * half + [3] * sizes[1] + [0] * 4
    np.testing.assert_array_equal(backend.to_host(raw).reshape(3, -1), [expected] * 3)


REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "fp8": (spec(dtype=DType.FP8), "does not store fp8"),
    "int8": (spec(head_size=16, dtype=DType.INT8), "multiples of 32, not 16 and 16"),
    "shared": (SharedKVSpec(block_size=2, target="layers.0.self_attn"), "layers that store KV"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_at_binding(kind: str) -> None:
    refused, why = REFUSED[kind]
    with pytest.raises(ConfigError, match=why):
        make_backend().view_kv(make_backend().allocate_kv(4096), refused, 2)


@pytest.mark.parametrize(("num_blocks", "offset"), [(3, 0), (2, 8)])
def test_too_little_memory_is_refused(num_blocks: int, offset: int) -> None:
    raw = make_backend().allocate_kv(spec().page_size_bytes * 2)
    with pytest.raises(ConfigError, match=f"do not hold {num_blocks} blocks"):
        make_backend().view_kv(raw, spec(), num_blocks, offset)


def stored_and_read(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The values as attention over a single key gives them back: that key's whole weight is 1."""
    backend = make_backend()
    size = len(values)
    planned = spec(block_size=1, num_kv_heads=1, head_size=32, head_size_v=size, dtype=dtype)
    storage = backend.view_kv(backend.allocate_kv(planned.page_size_bytes * 2), planned, 2)
    one = np.ones(1, np.int64)
    metadata = AttentionMetadata(one[None], one, np.array([0, 1]), one, one - 1, 1)
    ops = make_ops(backend, Batch(one, one, one, [metadata]))
    qk = np.ones((1, 1, 32), np.float32)
    layer = KVLayer("layers.0.self_attn", planned, 0, storage)
    out: np.ndarray = ops.attention(layer, qk, qk, values[None, None], Attention(1.0))[0]
    return out


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_numbers_are_stored_as_the_reference_stores_them(dtype: DType) -> None:
    from kvloom.ops.reference_attention import _decode, _encode

    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array([1.0 + 2**-8, 1e6], np.float32)])
    values = values[np.isfinite(values)]
    values = values[: len(values) // 32 * 32]
    with np.errstate(over="ignore"):
        expected = _decode(_encode(values, dtype), dtype)
    np.testing.assert_array_equal(stored_and_read(values, dtype), expected)


def test_int8_rounds_to_a_127th_of_the_largest_of_32() -> None:
    """A scale has 8 bits and a code is off by half of one: 1 / 254 + 1 / 256 of the largest."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((50, 32)) * 10.0 ** rng.integers(-6, 6, (50, 1))
    values = values.astype(np.float32)
    out = stored_and_read(values.ravel(), DType.INT8).reshape(50, 32)
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(out - values) <= largest * (1 / 254 + 1 / 256)).all()
    codes = 127 * np.array([0, 1, -1, 0.5] * 8, np.float32)  # a scale of 1, so codes are the values
    np.testing.assert_array_equal(stored_and_read(codes.round(), DType.INT8), codes.round())


def test_int8_keeps_zeros_and_marks_what_is_not_finite() -> None:
    values = np.zeros(96, np.float32)
    values[32], values[64] = np.nan, np.inf
    out = stored_and_read(values, DType.INT8)
    np.testing.assert_array_equal(out[:32], 0.0)
    assert np.isnan(out[32:]).all()


def test_int8_attention_is_near_the_textbook_formula() -> None:
    q, k, v = random_qkv(40, (4, 2), (32, 64))
    cache = Cache(8, num_kv_heads=2, head_size=32, head_size_v=64, dtype=DType.INT8)
    out = np.concatenate([cache.step([Piece(0, q[p], k[p], v[p])]) for p in map(one, range(40))])
    assert np.abs(out - dense_attention(q, k, v, Attention(1.0))).max() < 0.15


def test_int8_latent_rows_are_keys_and_values() -> None:
    q, row, _ = random_qkv(20, (2, 1), (64, 64))
    cache = Cache(8, MLAAttentionSpec, head_size=64, head_size_v=32, dtype=DType.INT8)
    ops, *rows = cache.begin([Piece(0, q, row, row)])
    out = ops.latent_attention(cache.layer, rows[0], rows[1], Attention(0.5), 32)
    assert np.abs(out - dense_attention(q, row, row[..., :32], Attention(0.5))).max() < 0.15


def one(position: int) -> slice:
    return slice(position, position + 1)


# --- tiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("max_keys", "max_scores"), [(1 << 16, 1 << 21), (40, 64), (1, 1)])
def test_tiles_of_every_size_compute_the_same(
    monkeypatch: pytest.MonkeyPatch,
    max_keys: int,
    max_scores: int,
    window: int | None,
    has_sinks: bool,
) -> None:
    """Requests of one token share tiles, and a chunk is cut; what other requests hold is NaN."""
    monkeypatch.setattr("kvloom.ops.torch_attention._MAX_KEYS", max_keys)
    monkeypatch.setattr("kvloom.ops.torch_attention._MAX_SCORES", max_scores)
    monkeypatch.setattr("kvloom.ops.torch_attention._MIN_QUERIES", 3)
    sinks = make_sinks([0.3, -1.0, 2.0, 0.0]) if has_sinks else None
    attention = Attention(0.6, sinks=sinks)
    kind = {} if window is None else {"sliding_window": window}
    spec_type = FullAttentionSpec if window is None else SlidingWindowSpec
    cache = Cache(4, spec_type, num_requests=6, num_kv_heads=2, head_size=6, **kind)
    sees = sees_all if window is None else sees_window(window)
    requests = [random_qkv(30 + i, (4, 2), (6, 6)) for i in range(6)]
    expected = [dense_attention(*qkv, attention, sees) for qkv in requests]
    for counts in ([3, 9, 1, 0, 17, 2], [1, 1, 1, 7, 1, 1], [1] * 6, [5, 5, 1, 1, 1, 5]):
        pieces, wanted = [], []
        for request, count in enumerate(counts):
            part = slice(cache.num_computed[request], cache.num_computed[request] + count)
            pieces.append(Piece(request, *(x[part] for x in requests[request])))
            wanted.append(expected[request][part])
        out = cache.step(pieces, attention, num_padding=2)
        np.testing.assert_allclose(out[:-2], np.concatenate(wanted), atol=2e-6)


def test_long_requests_are_cut_so_that_scores_stay_few() -> None:
    from kvloom.ops import torch_attention as tiles

    metadata = AttentionMetadata(
        block_table=np.zeros((3, 1), np.int32),
        slot_mapping=np.zeros(2049, np.int64),
        query_start=np.array([0, 2048, 2048, 2049]),
        seq_lens=np.array([102_048, 0, 70_000]),
        num_computed_tokens=np.array([100_000, 0, 69_999]),
        block_size=16,
    )
    pieces = list(tiles._cut(metadata, tiles._Mask(None, None)))
    rows = [row for p in pieces for row in range(p.row, p.row + p.num_queries)]
    assert rows == list(range(2049))  # each query once
    assert all(p.num_queries * p.num_keys <= 1.01 * tiles._MAX_SCORES for p in pieces)
    assert {(p.request, p.position + p.num_queries) for p in pieces} >= {(0, 102_048), (2, 70_000)}
    # A window bounds the keys, so the same request is cut less.
    local = list(tiles._cut(metadata, tiles._Mask(512, None)))
    assert [p.num_queries for p in local] == [256] * 8 + [1]
    assert {p.num_keys for p in local} == {512 + 255, 512}


def test_a_nan_of_one_request_reaches_no_other() -> None:
    q, k, v = random_qkv(6, (2, 1), (4, 4))
    cache = Cache(4, num_requests=2, head_size=4)
    bad = [np.full_like(x[:2], np.nan) for x in (q, k, v)]
    out = cache.step([Piece(0, *bad), Piece(1, q[:2], k[:2], v[:2])])
    assert np.isnan(out[:2]).all()
    np.testing.assert_allclose(
        out[2:], dense_attention(q[:2], k[:2], v[:2], Attention(1.0)), atol=1e-6
    )


def test_attention_in_bfloat16_is_near_float32() -> None:
    q, k, v = random_qkv(50, (4, 2), (16, 16))
    cache = Cache(16, num_kv_heads=2, head_size=16, dtype=DType.BFLOAT16)
    cache.backend = make_backend(dtype=DType.BFLOAT16)
    out = cache.step([Piece(0, q, k, v)], Attention(0.25))
    expected = dense_attention(q, k, v, Attention(0.25))
    assert 1e-4 < np.abs(out - expected).max() < 0.05


# --- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["neuron", "cuda", "no such device"])
def test_a_device_that_this_torch_has_not_is_refused(device: str) -> None:
    import torch

    from kvloom.ops.torch_backend import TorchBackend

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=f"has no device '{device}' here.*or use device cpu"):
        TorchBackend(device)


def test_unused_memory_is_nan_in_every_format() -> None:
    """The tests above fill pools with it, so that a read of what was never written shows."""
    backend = make_backend()
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        raw = backend.allocate_kv(64)
        raw[:] = NAN_BITS
        planned = spec(block_size=1, num_kv_heads=1, head_size=4, dtype=dtype)
        keys = backend.view_kv(raw[: 2 * planned.page_size_bytes], planned, 2).keys
        assert bool(keys.codes.isnan().all())
