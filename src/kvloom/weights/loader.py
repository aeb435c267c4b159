"""From a checkpoint's tensors to a model's parameters, one parameter at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.errors import WeightsError
from kvloom.ops.base import Parameter, Source

Array = npt.NDArray[np.float32]

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
    def ignored_tensors(self) -> frozenset[str]:
        """Hugging Face names that may be there and are never read."""


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


def load_weights(
    model: LoadableModel, checkpoint: TensorReader, pack: Callable[[Parameter, Array], Any]
) -> int:
    """Fill every parameter's value with `pack(parameter, array of parameter.shape)`.

    Besides the packed weights, at most one parameter and one of its sources are in memory.

    Returns:
        Bytes of the packed values, by their `nbytes`.

    Raises:
        WeightsError: a tensor is missing, left over or misshaped; the message names it.
    """
    stored_as = _stored_names(model, checkpoint)
    _check_names(model, checkpoint, stored_as)
    num_bytes = 0
    for parameter in model.parameters:
        parts = (_read(checkpoint, source, stored_as[source.name]) for source in parameter.sources)
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
        for name in checkpoint.tensor_names - wanted - model.ignored_tensors
        if not any(pattern.fullmatch(name) for pattern in _HARMLESS)
    )
    if left_over:
        raise WeightsError(
            f"the model has no use for tensor {left_over[0]}{_and_more(left_over)}, so its results "
            "would be wrong; check that the configuration belongs to the checkpoint"
        )


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read(checkpoint: TensorReader, source: Source, stored: StoredTensor) -> Array:
    """What this rank keeps of a source, rows in Hugging Face's order."""
    array = checkpoint.read(stored.name)
    if array.shape != source.shape:
        raise WeightsError(
            f"tensor {stored.name} has shape {list(array.shape)}, the configuration asks for "
            f"{list(source.shape)}; check that it belongs to the checkpoint"
        )
    if stored.num_permuted_heads:
        array = _restore_halves(array, stored.num_permuted_heads)
    if source.slice is None:
        return array
    kept = slice(source.slice.start, source.slice.stop)
    # A copy: a view would keep what the other ranks have in memory.
    return (array[kept] if source.slice.axis == 0 else array[:, kept]).copy()


def _restore_halves(array: Array, num_heads: int) -> Array:
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
