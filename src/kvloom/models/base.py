"""What the engine knows of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvloom.dtypes import DType
from kvloom.kv.spec import KVSpec
from kvloom.ops.base import Batch, KVLayer, Ops, Parameter, Value


@dataclass(frozen=True, slots=True)
class ModelDTypes:
    """Formats of a model's parameters (as the checkpoint has them) and of its stored KV."""

    weights: DType
    kv: DType


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a Hugging Face tensor is found in a GGUF file.

    Attributes:
        name: the tensor's name there.
        num_permuted_heads: heads whose rows are stored as interleaved rotary pairs; 0 if the rows
            are in Hugging Face's order. Such a tensor holds, per head, row i of the first half,
            then row i of the second half, and so on:
            `x.reshape(num_permuted_heads, head_size // 2, 2, ...).swapaxes(1, 2)` restores it.
    """

    name: str
    num_permuted_heads: int = 0


class Model(ABC):
    """One rank's part of a model: its parameters, its KV layers and its forward pass.

    Attributes:
        max_model_len: most tokens of one request (prompt and output) the model was made for.
        vocab_size: logits per row.
        parameters: every weight of this rank; the loader fills their values.
        attention_layers: in order of execution; binding the KV cache fills them.
        ignored_tensors: Hugging Face names that a checkpoint may hold besides, each with the source
            that it must be a copy of.
        unused_tensors: beginnings of names of tensors that a checkpoint may hold for other uses, of
            which this model has none.
    """

    max_model_len: int
    vocab_size: int
    parameters: list[Parameter]
    attention_layers: list[KVLayer]
    ignored_tensors: dict[str, str]
    unused_tensors: tuple[str, ...] = ()

    @property
    @abstractmethod
    def gguf_tensors(self) -> dict[str, GGUFTensor]:
        """Where a GGUF file holds each source, by its Hugging Face name; not of `gguf_sources`."""

    @abstractmethod
    def get_kv_spec(self) -> KVSpec:
        """What each attention layer of this rank stores."""

    @abstractmethod
    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size] of `batch.logits_rows`; every rank holds all columns."""
