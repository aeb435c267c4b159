"""Tensors into parameters: slices, stacks, permuted rows, and every tensor accounted for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import WeightsError
from kvloom.ops.base import Parameter, StoredRows
from kvloom.ops.source import Add, Reshape, Slice, Source, SwapAxes
from kvloom.weights.loader import RowPacking, load_weights
from memory_checkpoint import MemoryCheckpoint


@dataclass
class Stored:
    name: str
    num_permuted_heads: int = 0


@dataclass
class FakeModel:
    parameters: list[Parameter]
    gguf_tensors: dict[str, Stored] = field(default_factory=dict)
    ignored_tensors: dict[str, str] = field(default_factory=dict)
    unused_tensors: tuple[str, ...] = ()


def parameter(name: str, shape: tuple[int, ...], *sources: Source) -> Parameter:
    return Parameter(name, shape, DType.FLOAT32, sources)


def load(model: FakeModel, tensors: dict[str, np.ndarray], **options: Any) -> int:
    return load_weights(model, MemoryCheckpoint(tensors, **options), lambda _, array: array)


A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = 100 + np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_whole_tensor() -> None:
    model = FakeModel([parameter("a", (4, 3), Source("a", (4, 3)))])
    assert load(model, {"a": A}) == 48
    np.testing.assert_array_equal(model.parameters[0].value, A)


def test_slices_and_stacks() -> None:
    stacked = parameter(
        "ab", (3, 3), Source("a", (4, 3), (Slice(0, 2, 4),)), Source("b", (2, 3), (Slice(0, 1, 2),))
    )
    columns = parameter("c", (4, 1), Source("a", (4, 3), (Slice(1, 1, 2),)))
    model = FakeModel([stacked, columns])
    assert load(model, {"a": A, "b": B}) == (9 + 4) * 4
    np.testing.assert_array_equal(stacked.value, [A[2], A[3], B[1]])
    np.testing.assert_array_equal(columns.value, A[:, 1:2])


def test_a_slice_does_not_keep_the_whole_tensor() -> None:
    part = parameter("a", (1, 3), Source("a", (4, 3), (Slice(0, 0, 1),)))
    load(FakeModel([part]), {"a": A})
    assert part.value.base is None


def test_stacked_biases() -> None:
    bias = parameter("qb", (3,), Source("q", (2,)), Source("k", (1,)))
    load(FakeModel([bias]), {"q": np.float32([1, 2]), "k": np.float32([3])})
    assert bias.value.tolist() == [1, 2, 3]


EXPERTS = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)  # [num_experts, out, in]


def stack(name: str, shape: tuple[int, ...], *sources: Source) -> Parameter:
    return Parameter(name, shape, DType.FLOAT32, sources, is_stacked=True)


def test_a_stack_of_stacks_has_each_matrix_rows_together() -> None:
    shape = EXPERTS.shape
    gate_up = stack("gate_up", (2, 6, 4), Source("gate", shape), Source("up", shape))
    load(FakeModel([gate_up]), {"gate": EXPERTS, "up": 100 + EXPERTS})
    np.testing.assert_array_equal(gate_up.value[1], [*EXPERTS[1], *(100 + EXPERTS[1])])
    np.testing.assert_array_equal(gate_up.value[0, 3:], 100 + EXPERTS[0])


def test_a_stack_of_single_matrices_takes_them_in_order() -> None:
    tensors = {f"{e}.{m}": EXPERTS[e] + 100 * m for e in range(2) for m in range(2)}
    gate_up = stack("gate_up", (2, 6, 4), *(Source(name, (3, 4)) for name in tensors))
    load(FakeModel([gate_up]), tensors)
    for e in range(2):
        np.testing.assert_array_equal(gate_up.value[e], [*EXPERTS[e], *(100 + EXPERTS[e])])


def test_interleaved_columns_of_input_major_experts() -> None:
    """A rank's rows [1, 3) of gate and up, whose columns alternate in [num_experts, in, 6]."""
    stored = np.empty((2, 4, 6), np.float32)
    stored[:, :, 0::2] = EXPERTS.swapaxes(1, 2)
    stored[:, :, 1::2] = 100 + EXPERTS.swapaxes(1, 2)
    sources = [
        Source("both", (2, 4, 6), (SwapAxes(1, 2), Slice(1, odd, 6, 2), Slice(1, 1, 3)))
        for odd in range(2)
    ]
    gate_up = stack("gate_up", (2, 4, 4), *sources)
    load(FakeModel([gate_up]), {"both": stored})
    expected = np.concatenate([EXPERTS[:, 1:3], 100 + EXPERTS[:, 1:3]], axis=1)
    np.testing.assert_array_equal(gate_up.value, expected)


def test_one_matrix_of_a_stack() -> None:
    one = parameter("one", (3, 4), Source("all", (2, 3, 4), (Slice(0, 1, 2), Reshape((3, 4)))))
    load(FakeModel([one]), {"all": EXPERTS})
    np.testing.assert_array_equal(one.value, EXPERTS[1])


def test_a_constant_is_added_where_the_source_says_so() -> None:
    norm = parameter("norm", (2,), Source("n", (2,), (Add(1.0),)))
    norm.gguf_sources = (Source("blk.0.n", (2,)),)
    load(FakeModel([norm]), {"n": np.float32([0.5, -1])})
    assert norm.value.tolist() == [1.5, 0]
    load(FakeModel([norm]), {"blk.0.n": np.float32([0.5, -1])}, metadata={})
    assert norm.value.tolist() == [0.5, -1]


def test_stacked_vectors_are_no_matrix() -> None:
    """Biases of experts: packed from values, never from rows."""
    bias = stack("bias", (2, 4), Source("gate", (2, 2)), Source("up", (2, 2)))
    packing = RowPacking("auto", lambda one, packed, parts: pytest.fail("packed as a matrix"))
    tensors = {"gate": np.float32([[1, 2], [3, 4]]), "up": np.float32([[5, 6], [7, 8]])}
    load_weights(FakeModel([bias]), MemoryCheckpoint(tensors), lambda _, array: array, packing)
    assert bias.value.tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]


@pytest.mark.parametrize("has_stacks", [True, False])
def test_rows_of_a_stack_say_where_they_belong(has_stacks: bool) -> None:
    half = EXPERTS.astype(np.float16) + np.float16(1)  # no zero among them
    if has_stacks:
        sources = [Source("gate", EXPERTS.shape), Source("up", EXPERTS.shape)]
        tensors = {"gate": half, "up": half + 100}
    else:
        tensors = {f"{e}.{m}": half[e] + 100 * m for e in range(2) for m in range(2)}
        sources = [Source(name, (3, 4)) for name in tensors]
    found = np.zeros((12, 4), np.float16)

    def pack_rows(one: Parameter, packed: str, parts: Iterable[StoredRows]) -> np.ndarray:
        for part in parts:
            assert (packed, part.format, part.num_inputs) == ("BF16", "F16", 4)
            assert not found[part.first_row : part.first_row + len(part.data)].any()
            found[part.first_row : part.first_row + len(part.data)] = part.data.view(np.float16)
        return found

    gate_up = stack("gate_up", (2, 6, 4), *sources)
    load_weights(
        FakeModel([gate_up]),
        MemoryCheckpoint(tensors),
        lambda _, array: array,
        RowPacking("auto", pack_rows),
    )
    expected = np.concatenate([1 + EXPERTS, 101 + EXPERTS], axis=1).reshape(12, 4)
    np.testing.assert_array_equal(found, expected)


def test_tensors_for_other_uses_are_left_alone() -> None:
    model = two_parameters()
    model.unused_tensors = ("layers.61.", "vision.")
    load(model, {"a": A, "b": B, "layers.61.x": A, "vision.y": A})
    with pytest.raises(WeightsError, match=r"no use for tensor layers\.6\.x"):
        load(model, {"a": A, "b": B, "layers.6.x": A})


def test_pack_makes_the_value() -> None:
    model = FakeModel([parameter("a", (4, 3), Source("a", (4, 3)))])
    seen = []

    def pack(one: Parameter, array: np.ndarray) -> np.ndarray:
        seen.append((one.name, array.shape))
        return array.astype(np.float16)

    assert load_weights(model, MemoryCheckpoint({"a": A}), pack) == 24
    assert seen == [("a", (4, 3))]
    assert model.parameters[0].value.dtype == np.float16


def test_rows_of_interleaved_heads_are_put_back() -> None:
    # llama.cpp's own conversion, from its definition: per head, halves become pairs.
    original = np.arange(2 * 6 * 3, dtype=np.float32).reshape(12, 3)  # 2 heads of size 6
    stored = original.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert stored[:4, 0].tolist() == [0, 9, 3, 12]
    source = Source("q", (12, 3), (Slice(0, 6, 12),))
    model = FakeModel([parameter("q", (6, 3), source)], {"q": Stored("blk.0.attn_q.weight", 2)})
    load(model, {"blk.0.attn_q.weight": stored}, metadata={})
    np.testing.assert_array_equal(model.parameters[0].value, original[6:])


def test_interleaved_biases_are_put_back() -> None:
    model = FakeModel([parameter("q", (4,), Source("q", (4,)))], {"q": Stored("b", 1)})
    load(model, {"b": np.float32([0, 2, 1, 3])}, metadata={})
    assert model.parameters[0].value.tolist() == [0, 1, 2, 3]


def test_folders_do_not_use_gguf_names() -> None:
    model = FakeModel([parameter("q", (4,), Source("q", (4,)))], {"q": Stored("b", 1)})
    load(model, {"q": np.float32([0, 2, 1, 3])})
    assert model.parameters[0].value.tolist() == [0, 2, 1, 3]


TWO = [("a", (4, 3)), ("b", (2, 3))]


def two_parameters() -> FakeModel:
    return FakeModel([parameter(name, shape, Source(name, shape)) for name, shape in TWO])


def test_a_missing_tensor_is_named_before_any_is_read() -> None:
    model = two_parameters()
    with pytest.raises(WeightsError, match="no tensor b;"):
        load(model, {"a": A})
    with pytest.raises(WeightsError, match=r"no tensor a \(and 1 more\)"):
        load(model, {})
    assert [one.value for one in model.parameters] == [None, None]


def test_a_missing_tensor_has_the_files_name() -> None:
    model = FakeModel([parameter("q", (4,), Source("q", (4,)))], {"q": Stored("blk.0.q", 1)})
    with pytest.raises(WeightsError, match=r"no tensor blk\.0\.q"):
        load(model, {}, metadata={})


def test_a_left_over_tensor_is_named() -> None:
    with pytest.raises(WeightsError, match=r"no use for tensor extra"):
        load(two_parameters(), {"a": A, "b": B, "extra": A})


def test_harmless_left_overs() -> None:
    model = two_parameters()
    load(model, {"a": A, "b": B, "model.layers.0.self_attn.rotary_emb.inv_freq": A})
    assert model.parameters[1].value is not None


def two_parameters_and_a_copy() -> FakeModel:
    model = two_parameters()
    model.ignored_tensors = {"copy": "a"}
    return model


def test_a_copy_may_be_there_in_any_format() -> None:
    for copy in (A, A.astype(np.float16)):
        load(two_parameters_and_a_copy(), {"a": A, "b": B, "copy": copy})


@pytest.mark.parametrize("num_rows", [4, 3000])
def test_what_differs_from_the_tensor_it_should_copy_is_refused(num_rows: int) -> None:
    original = np.zeros((num_rows, 3), np.float32)
    last = original.copy()
    last[-1, -1] = 1
    for other in (last, last.astype(np.float16), original[:-1], original[:, 0]):
        model = FakeModel([parameter("a", (num_rows, 3), Source("a", (num_rows, 3)))])
        model.ignored_tensors = {"copy": "a"}
        with pytest.raises(WeightsError, match="tensor copy "):
            load(model, {"a": original, "copy": other})
        assert model.parameters[0].value is None


@pytest.mark.parametrize("shape", [(12,), (2, 2, 3), ()])
def test_rows_of_what_is_no_matrix_are_refused_by_name(shape: tuple[int, ...]) -> None:
    model = FakeModel([parameter("a", (4, 3), Source("a", (4, 3)))])
    packing = RowPacking("auto", lambda one, packed, parts: list(parts))
    checkpoint = MemoryCheckpoint({"a": np.zeros(shape, np.float32)})
    with pytest.raises(WeightsError, match=r"tensor a has shape"):
        load_weights(model, checkpoint, lambda _, array: array, packing)


def test_a_misshaped_tensor_is_named_with_both_shapes() -> None:
    with pytest.raises(WeightsError, match=r"tensor b has shape \[4, 3\].*\[2, 3\]"):
        load(two_parameters(), {"a": A, "b": A})


def test_one_parameter_at_a_time() -> None:
    """Peak memory: what is kept, one stacked parameter and one of its sources."""
    size = 1 << 18  # values per source: 1 MiB
    parameters = [
        parameter(str(i), (2, size), *(Source(f"{i}.{j}", (1, size)) for j in range(2)))
        for i in range(8)
    ]
    zeros = np.broadcast_to(np.float32(0), (1, size))
    checkpoint = MemoryCheckpoint({s.name: zeros for p in parameters for s in p.sources})
    tracemalloc.start()
    kept = load_weights(
        FakeModel(parameters), checkpoint, lambda _, array: array.astype(np.float16)
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parameter_bytes = 2 * size * 4
    assert kept == 8 * parameter_bytes // 2
    assert peak < kept + parameter_bytes + parameter_bytes // 2 + (1 << 16)


@pytest.mark.parametrize("is_by_rows", [True, False])
def test_experts_are_loaded_within_a_fifth_more_than_they_take(is_by_rows: bool) -> None:
    """Transposed stacks, as the largest checkpoints have them, in float16 as they are stored."""
    shape = (16, 64, 128)  # [num_experts, in, out]: 256 KiB
    parameters = [
        stack(str(i), (16, 128, 64), Source(str(i), shape, (SwapAxes(1, 2),))) for i in range(16)
    ]
    checkpoint = MemoryCheckpoint({p.name: np.ones(shape, np.float16) for p in parameters})

    def pack(one: Parameter, array: np.ndarray) -> np.ndarray:
        return array

    def pack_rows(one: Parameter, packed: str, parts: Iterable[StoredRows]) -> np.ndarray:
        rows = np.empty((16 * 128, 64), np.float16)
        for part in parts:
            rows[part.first_row : part.first_row + len(part.data)] = part.data.view(np.float16)
        return rows

    packing = RowPacking("auto", pack_rows) if is_by_rows else None
    tracemalloc.start()
    kept = load_weights(FakeModel(parameters), checkpoint, pack, packing)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept == 16 * 16 * 128 * 64 * (2 if is_by_rows else 4)
    assert peak < 1.2 * kept
