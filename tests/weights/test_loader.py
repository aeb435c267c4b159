"""Tensors into parameters: slices, stacks, permuted rows, and every tensor accounted for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import WeightsError
from kvloom.ops.base import Parameter, Slice, Source, StoredRows
from kvloom.weights.loader import RowPacking, load_weights
from kvloom.weights.packing import stored_rows


@dataclass
class Stored:
    name: str
    num_permuted_heads: int = 0


@dataclass
class FakeModel:
    parameters: list[Parameter]
    gguf_tensors: dict[str, Stored] = field(default_factory=dict)
    ignored_tensors: dict[str, str] = field(default_factory=dict)


class FakeCheckpoint:
    def __init__(
        self, tensors: dict[str, np.ndarray], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors = tensors
        self.metadata = metadata
        self.tensor_names = frozenset(tensors)

    def read(self, name: str) -> np.ndarray:
        return np.array(self._tensors[name], np.float32)

    def stored_format(self, name: str) -> str:
        return "F16" if self._tensors[name].dtype == np.float16 else "F32"

    def read_rows(self, name: str) -> StoredRows:
        array = self._tensors[name]
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return stored_rows(name, self.stored_format(name), array.shape, raw)

    def release(self, name: str) -> None:
        pass


def parameter(name: str, shape: tuple[int, ...], *sources: Source) -> Parameter:
    return Parameter(name, shape, DType.FLOAT32, sources)


def load(model: FakeModel, tensors: dict[str, np.ndarray], **options: Any) -> int:
    return load_weights(model, FakeCheckpoint(tensors, **options), lambda _, array: array)


A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = 100 + np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_whole_tensor() -> None:
    model = FakeModel([parameter("a", (4, 3), Source("a", (4, 3)))])
    assert load(model, {"a": A}) == 48
    np.testing.assert_array_equal(model.parameters[0].value, A)


def test_slices_and_stacks() -> None:
    stacked = parameter(
        "ab", (3, 3), Source("a", (4, 3), Slice(0, 2, 4)), Source("b", (2, 3), Slice(0, 1, 2))
    )
    columns = parameter("c", (4, 1), Source("a", (4, 3), Slice(1, 1, 2)))
    model = FakeModel([stacked, columns])
    assert load(model, {"a": A, "b": B}) == (9 + 4) * 4
    np.testing.assert_array_equal(stacked.value, [A[2], A[3], B[1]])
    np.testing.assert_array_equal(columns.value, A[:, 1:2])


def test_a_slice_does_not_keep_the_whole_tensor() -> None:
    part = parameter("a", (1, 3), Source("a", (4, 3), Slice(0, 0, 1)))
    load(FakeModel([part]), {"a": A})
    assert part.value.base is None


def test_stacked_biases() -> None:
    bias = parameter("qb", (3,), Source("q", (2,)), Source("k", (1,)))
    load(FakeModel([bias]), {"q": np.float32([1, 2]), "k": np.float32([3])})
    assert bias.value.tolist() == [1, 2, 3]


def test_pack_makes_the_value() -> None:
    model = FakeModel([parameter("a", (4, 3), Source("a", (4, 3)))])
    seen = []

    def pack(one: Parameter, array: np.ndarray) -> np.ndarray:
        seen.append((one.name, array.shape))
        return array.astype(np.float16)

    assert load_weights(model, FakeCheckpoint({"a": A}), pack) == 24
    assert seen == [("a", (4, 3))]
    assert model.parameters[0].value.dtype == np.float16


def test_rows_of_interleaved_heads_are_put_back() -> None:
    # llama.cpp's own conversion, from its definition: per head, halves become pairs.
    original = np.arange(2 * 6 * 3, dtype=np.float32).reshape(12, 3)  # 2 heads of size 6
    stored = original.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert stored[:4, 0].tolist() == [0, 9, 3, 12]
    source = Source("q", (12, 3), Slice(0, 6, 12))
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
    checkpoint = FakeCheckpoint({"a": np.zeros(shape, np.float32)})
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
    checkpoint = FakeCheckpoint({s.name: zeros for p in parameters for s in p.sources})
    tracemalloc.start()
    kept = load_weights(
        FakeModel(parameters), checkpoint, lambda _, array: array.astype(np.float16)
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parameter_bytes = 2 * size * 4
    assert kept == 8 * parameter_bytes // 2
    assert peak < kept + parameter_bytes + parameter_bytes // 2 + (1 << 16)
