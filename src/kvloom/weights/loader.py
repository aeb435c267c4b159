"""From a checkpoint's tensors to a model's parameters, one parameter at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.errors import WeightsError
from kvloom.ops.backend import PackRows
from kvloom.ops.base import PackedFormat, Parameter, StoredRows
from kvloom.ops.source import Source
from kvloom.weights.packing import can_move, packed_bytes, packed_format
from kvloom.weights.steps import (
    block_steps,
    move_rows,
    only_moves,
    restore_halves,
    rows_of_units,
    take_steps,
)

Array = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]

_PIECE_ROWS = 1024

# Tensors that some folders hold and no model reads.
_HARMLESS = (
    re.compile(r".*\.rotary_emb\.inv_freq"),  # follows from the configuration; old files store it
)


class StoredTensor(Protocol):
    """Where a tensor of a Hugging Face name is found in a GGUF file."""

    @property
    def name(self) -> str:
        """Its name there."""

    @property
    def num_permuted_heads(self) -> int:
        """Heads whose rows are stored as interleaved rotary pairs; 0 if none are."""


class LoadableModel(Protocol):
    """What the loader asks of a model: the attributes of `kvloom.models.base.Model`."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What to fill."""

    @property
    def gguf_tensors(self) -> Mapping[str, StoredTensor]:
        """By Hugging Face name, for the sources of parameters without `gguf_sources`."""

    @property
    def ignored_tensors(self) -> Mapping[str, str]:
        """Hugging Face names that may be there besides, and the source each is a copy of."""

    @property
    def unused_tensors(self) -> Sequence[str]:
        """Beginnings of names of tensors that the checkpoint has for other uses."""


class TensorReader(Protocol):
    """What the loader asks of a `kvloom.weights.checkpoint.Checkpoint`."""

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """None unless tensors have GGUF's names."""

    @property
    def tensor_names(self) -> frozenset[str]:
        """All tensors there are."""

    def read(self, name: str) -> Array:
        """One tensor in float32."""

    def stored_format(self, name: str) -> str:
        """The name of the format that a tensor is stored in."""

    def read_rows(self, name: str) -> StoredRows:
        """Matrices as they are stored: number formats, and blocks of 32 values."""

    def release(self, name: str) -> None:
        """The rows of a tensor are not needed any longer."""


@dataclass(frozen=True, slots=True)
class RowPacking:
    """How matrices are packed from their stored rows.

    Attributes:
        dtype: "auto" keeps the stored formats; see `kvloom.weights.packing`.
        pack_rows: called with the parameter, what to pack it as, and its sources' rows.
    """

    dtype: str
    pack_rows: PackRows


def load_weights(
    model: LoadableModel,
    checkpoint: TensorReader,
    pack: Callable[[Parameter, Array], Any],
    row_packing: RowPacking | None = None,
) -> int:
    """Fill every parameter's value with `pack(parameter, array of parameter.shape)`.

    Matrices go through `row_packing` instead if it is given. Besides the packed weights, at most
    one parameter and one of its sources are in memory, or one source alone with `row_packing`.

    Returns:
        Bytes of the packed values, by their `nbytes`.

    Raises:
        WeightsError: a tensor is missing, left over, misshaped, or differs from the one it must be
            a copy of; the message names it.
    """
    sources = _sources_by_stored_name(model, checkpoint)
    _check_names(model, checkpoint, {one.name for part in sources for one in part})
    _check_copies(model, checkpoint)
    num_bytes = 0
    for parameter, parts in zip(model.parameters, sources, strict=True):
        if row_packing is not None and parameter.is_matrix:
            parameter.value = _pack_rows(parameter, parts, checkpoint, row_packing)
        else:
            parameter.value = pack(parameter, _read_parameter(parameter, parts, checkpoint))
        num_bytes += parameter.value.nbytes
    return num_bytes


def count_weights_bytes(model: LoadableModel, checkpoint: TensorReader, dtype: str) -> int:
    """What `load_weights` with rows packed as `dtype` will return, padding left out; reads nothing.

    Raises:
        WeightsError: a tensor is missing or left over; the message names it.
    """
    sources = _sources_by_stored_name(model, checkpoint)
    _check_names(model, checkpoint, {one.name for part in sources for one in part})
    num_bytes = 0
    for parameter, parts in zip(model.parameters, sources, strict=True):
        packed = _packed_format(parts, checkpoint, dtype) if parameter.is_matrix else "F32"
        num_bytes += packed_bytes(packed, math.prod(parameter.shape))
    return num_bytes


def _sources_by_stored_name(
    model: LoadableModel, checkpoint: TensorReader
) -> list[tuple[Source, ...]]:
    """Each parameter's sources by the checkpoint's own names."""
    if checkpoint.metadata is None:
        return [parameter.sources for parameter in model.parameters]
    names = model.gguf_tensors  # made anew at every access
    return [
        parameter.gguf_sources or tuple(_gguf_source(s, names[s.name]) for s in parameter.sources)
        for parameter in model.parameters
    ]


def _gguf_source(source: Source, stored: StoredTensor) -> Source:
    num_heads = stored.num_permuted_heads
    restored = restore_halves(source.shape, num_heads) if num_heads else ()
    return Source(stored.name, source.shape, restored + source.steps)


def _check_names(model: LoadableModel, checkpoint: TensorReader, wanted: Set[str]) -> None:
    if missing := sorted(wanted - checkpoint.tensor_names):
        raise WeightsError(
            f"the checkpoint has no tensor {missing[0]}{_and_more(missing)}; "
            "fetch it again, or check that its configuration belongs to it"
        )
    left_over = sorted(
        name
        for name in checkpoint.tensor_names - wanted - model.ignored_tensors.keys()
        if not name.startswith(tuple(model.unused_tensors))
        and not any(pattern.fullmatch(name) for pattern in _HARMLESS)
    )
    if left_over:
        raise WeightsError(
            f"the model has no use for tensor {left_over[0]}{_and_more(left_over)}, so its results "
            "would be wrong; check that the configuration belongs to the checkpoint"
        )


def _check_copies(model: LoadableModel, checkpoint: TensorReader) -> None:
    for name, source in model.ignored_tensors.items():
        if name not in checkpoint.tensor_names:  # in no GGUF file: the names are Hugging Face's
            continue
        if not _is_copy(checkpoint, name, source):
            raise WeightsError(
                f"tensor {name} differs from {source}, but the configuration says that they are "
                "the same (tie_word_embeddings); set it to false if the checkpoint has its own head"
            )


def _is_copy(checkpoint: TensorReader, name: str, original: str) -> bool:
    if checkpoint.stored_format(name) != checkpoint.stored_format(original):
        return np.array_equal(checkpoint.read(name), checkpoint.read(original))
    # Equal formats are compared as they are stored: float32 would take more memory.
    ours, theirs = (checkpoint.read_rows(one).data for one in (name, original))
    is_copy = ours.shape == theirs.shape and all(
        np.array_equal(ours[first : first + _PIECE_ROWS], theirs[first : first + _PIECE_ROWS])
        for first in range(0, len(ours), _PIECE_ROWS)
    )
    for one in (name, original):
        checkpoint.release(one)
    return is_copy


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _pack_rows(
    parameter: Parameter,
    sources: Sequence[Source],
    checkpoint: TensorReader,
    row_packing: RowPacking,
) -> Any:
    packed = _packed_format(sources, checkpoint, row_packing.dtype)

    def parts() -> Iterator[StoredRows]:
        placement = _Placement(parameter)
        for source in sources:
            stored = checkpoint.stored_format(source.name)
            if can_move(stored, packed) and only_moves(source):
                units = _read_units(checkpoint, source)
            else:
                stored, units = "F32", _read(checkpoint, source)
            for first_row, rows in placement.place(units):
                yield rows_of_units(rows, stored, first_row)
            checkpoint.release(source.name)

    return row_packing.pack_rows(parameter, packed, parts())


def _packed_format(sources: Sequence[Source], checkpoint: TensorReader, dtype: str) -> PackedFormat:
    return packed_format(
        [checkpoint.stored_format(source.name) for source in sources],
        dtype,
        has_whole_blocks=all(block_steps(source) is not None for source in sources),
    )


class _Placement:
    """Where the arrays of a parameter's sources go, in the parameter's flattened leading axes."""

    def __init__(self, parameter: Parameter) -> None:
        self._shape = parameter.shape
        self._is_stacked = parameter.is_stacked
        self._num_filled = 0  # of every matrix by stacks, of all of them by others

    def place(self, array: AnyArray) -> Iterator[tuple[int, AnyArray]]:
        """First row (or value) and rows (or values) of each run that the next array fills."""
        if self._is_stacked and array.ndim == len(self._shape):
            for index, item in enumerate(array):
                yield index * self._shape[1] + self._num_filled, item
            self._num_filled += array.shape[1]
        else:
            yield self._num_filled, array
            self._num_filled += len(array)


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise WeightsError(
            f"tensor {name} has shape {list(shape)}, the configuration asks for {list(wanted)}; "
            "check that it belongs to the checkpoint"
        )


def _read_units(checkpoint: TensorReader, source: Source) -> AnyArray:
    """A source as it is stored, after its steps: [..., num_units]."""
    rows = checkpoint.read_rows(source.name)
    _check_shape(source.name, (*rows.data.shape[:-1], rows.num_inputs), source.shape)
    return move_rows(rows, source)


def _read(checkpoint: TensorReader, source: Source) -> AnyArray:
    """A source in float32, after its steps."""
    array = checkpoint.read(source.name)
    _check_shape(source.name, array.shape, source.shape)
    return take_steps(array, source.steps)


def _read_parameter(
    parameter: Parameter, sources: Sequence[Source], checkpoint: TensorReader
) -> Array:
    """All of a parameter in float32."""
    arrays = (_read(checkpoint, source) for source in sources)
    if len(sources) == 1 and (array := next(arrays)).shape == parameter.shape:
        # A copy of a part: a view would keep what the other ranks have in memory.
        return array.copy() if sources[0].steps else array
    values = np.empty(parameter.shape, np.float32)
    flat = values.reshape(-1, *parameter.shape[1 + parameter.is_stacked :])
    placement = _Placement(parameter)
    for array in arrays:
        for first, part in placement.place(array):
            flat[first : first + len(part)] = part
    return values
