"""From a checkpoint's tensors to a model's parameters, one parameter at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.errors import WeightsError
from kvloom.ops.base import PackedFormat, Parameter, Source, StoredRows
from kvloom.weights.packing import (
    BLOCK_VALUES,
    can_move,
    float_rows,
    keep_columns,
    packed_format,
)

Array = npt.NDArray[np.float32]

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
        """By Hugging Face name, for every source of the parameters."""

    @property
    def ignored_tensors(self) -> Mapping[str, str]:
        """Hugging Face names that may be there besides, and the source each is a copy of."""


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
        """A matrix as it is stored: number formats, and blocks of 32 values."""

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
    pack_rows: Callable[[Parameter, PackedFormat, Iterable[StoredRows]], Any]


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
    stored_as = _stored_names(model, checkpoint)
    _check_names(model, checkpoint, stored_as)
    _check_copies(model, checkpoint, stored_as)
    num_bytes = 0
    for parameter in model.parameters:
        if row_packing is not None and len(parameter.shape) == 2:
            parameter.value = _pack_rows(parameter, checkpoint, stored_as, row_packing)
        else:
            parts = (_read(checkpoint, s, stored_as[s.name]) for s in parameter.sources)
            parameter.value = pack(parameter, _stack(parameter, parts))
        num_bytes += parameter.value.nbytes
    return num_bytes


@dataclass(frozen=True, slots=True)
class _SameName:
    """A tensor of a folder: stored under its Hugging Face name, rows in order."""

    name: str
    num_permuted_heads: int = 0


def _stored_names(model: LoadableModel, checkpoint: TensorReader) -> dict[str, StoredTensor]:
    names = {source.name for parameter in model.parameters for source in parameter.sources}
    if checkpoint.metadata is None:
        return {name: _SameName(name) for name in names}
    gguf_tensors = model.gguf_tensors  # made anew at every access
    return {name: gguf_tensors[name] for name in names}


def _check_names(
    model: LoadableModel, checkpoint: TensorReader, stored_as: Mapping[str, StoredTensor]
) -> None:
    wanted = {stored.name for stored in stored_as.values()}
    if missing := sorted(wanted - checkpoint.tensor_names):
        raise WeightsError(
            f"the checkpoint has no tensor {missing[0]}{_and_more(missing)}; "
            "fetch it again, or check that its configuration belongs to it"
        )
    left_over = sorted(
        name
        for name in checkpoint.tensor_names - wanted - model.ignored_tensors.keys()
        if not any(pattern.fullmatch(name) for pattern in _HARMLESS)
    )
    if left_over:
        raise WeightsError(
            f"the model has no use for tensor {left_over[0]}{_and_more(left_over)}, so its results "
            "would be wrong; check that the configuration belongs to the checkpoint"
        )


def _check_copies(
    model: LoadableModel, checkpoint: TensorReader, stored_as: Mapping[str, StoredTensor]
) -> None:
    for name, source in model.ignored_tensors.items():
        if name not in checkpoint.tensor_names:
            continue
        if not _is_copy(checkpoint, name, stored_as[source].name):
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
    checkpoint: TensorReader,
    stored_as: Mapping[str, StoredTensor],
    row_packing: RowPacking,
) -> Any:
    formats = [checkpoint.stored_format(stored_as[s.name].name) for s in parameter.sources]
    packed = packed_format(
        formats,
        row_packing.dtype,
        has_whole_blocks=all(map(_has_whole_blocks, parameter.sources)),
    )

    def parts() -> Iterator[StoredRows]:
        for source, stored_format in zip(parameter.sources, formats, strict=True):
            stored = stored_as[source.name]
            if can_move(stored_format, packed):
                yield _read_rows(checkpoint, source, stored)
                checkpoint.release(stored.name)
            else:
                yield float_rows(_read(checkpoint, source, stored))

    return row_packing.pack_rows(parameter, packed, parts())


def _has_whole_blocks(source: Source) -> bool:
    kept = source.slice
    return kept is None or kept.axis == 0 or not (kept.start | kept.stop) % BLOCK_VALUES


def _read_rows(checkpoint: TensorReader, source: Source, stored: StoredTensor) -> StoredRows:
    """What this rank keeps of a source as it is stored, rows in Hugging Face's order."""
    rows = checkpoint.read_rows(stored.name)
    _check_shape(stored.name, (len(rows.data), rows.num_inputs), source.shape)
    if stored.num_permuted_heads:
        rows = replace(rows, data=_restore_halves(rows.data, stored.num_permuted_heads))
    if source.slice is None:
        return rows
    start, stop = source.slice.start, source.slice.stop
    if source.slice.axis == 1:
        return keep_columns(rows, start, stop)
    return replace(rows, data=rows.data[start:stop])


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise WeightsError(
            f"tensor {name} has shape {list(shape)}, the configuration asks for {list(wanted)}; "
            "check that it belongs to the checkpoint"
        )


def _read(checkpoint: TensorReader, source: Source, stored: StoredTensor) -> Array:
    """What this rank keeps of a source, rows in Hugging Face's order."""
    array = checkpoint.read(stored.name)
    _check_shape(stored.name, array.shape, source.shape)
    if stored.num_permuted_heads:
        array = _restore_halves(array, stored.num_permuted_heads)
    if source.slice is None:
        return array
    kept = slice(source.slice.start, source.slice.stop)
    # A copy: a view would keep what the other ranks have in memory.
    return (array[kept] if source.slice.axis == 0 else array[:, kept]).copy()


def _restore_halves(array: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undo interleaving: per head, rows a0 b0 a1 b1 ... become a0 a1 ... b0 b1 ..."""
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _stack(parameter: Parameter, parts: Iterable[Array]) -> Array:
    if len(parameter.sources) == 1:
        return next(iter(parts))
    stacked = np.empty(parameter.shape, np.float32)
    first = 0
    for part in parts:
        stacked[first : first + len(part)] = part
        first += len(part)
    return stacked
