"""What decoder families share: how their parameters are cut, named and stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvloom.dtypes import DType
from kvloom.models.base import GGUFTensor
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Parameter, Slice, Source

# Last part of a Hugging Face module's name -> last part of the GGUF tensor's name.
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_GGUF_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """The GGUF name of the tensor that Hugging Face calls `name` in these families."""
    module, _, kind = name.rpartition(".")
    if module in _GGUF_MODEL_NAMES:
        return f"{_GGUF_MODEL_NAMES[module]}.{kind}"
    _, _, index, *_, last = module.split(".")  # model.layers.{index}. ... .{last}
    return f"blk.{index}.{_GGUF_LAYER_NAMES[last]}.{kind}"


class Linear(NamedTuple):
    """The weight [out, in] of a linear operation, and its bias [out] if it has one."""

    weight: Parameter
    bias: Parameter | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The output rows [start, stop) of a Hugging Face linear module with `size` rows in all."""

    module: str
    size: int
    start: int
    stop: int

    @property
    def kept(self) -> Slice | None:
        """The slice of the module's tensors that this rank keeps."""
        return _slice(0, self.size, (self.start, self.stop))


class ParameterBuilder:
    """Declares one rank's parameters and keeps the list of them."""

    def __init__(self, rank: TensorParallelRank, dtype: DType) -> None:
        self.rank = rank
        self.parameters: list[Parameter] = []
        self._dtype = dtype

    def norm(self, name: str, size: int) -> Parameter:
        """A norm's weight [size], the same on every rank; `name` is the module's."""
        return self._add(name, (size,), [Source(f"{name}.weight", (size,))])

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Parameter:
        """This rank's rows of a vocabulary table [vocab_size, hidden_size]."""
        start, stop = self.rank.share(vocab_size)
        kept = _slice(0, vocab_size, (start, stop))
        source = Source(f"{name}.weight", (vocab_size, hidden_size), kept)
        return self._add(name, (stop - start, hidden_size), [source])

    def column_linear(
        self, name: str, parts: Sequence[Rows], in_size: int, *, has_bias: bool
    ) -> Linear:
        """Output rows of several modules, stacked: each rank computes its own outputs."""
        num_rows = sum(part.stop - part.start for part in parts)
        weight = self._add(
            name,
            (num_rows, in_size),
            [Source(f"{p.module}.weight", (p.size, in_size), p.kept) for p in parts],
        )
        if not has_bias:
            return Linear(weight, None)
        biases = [Source(f"{p.module}.bias", (p.size,), p.kept) for p in parts]
        return Linear(weight, self._add(f"{name}.bias", (num_rows,), biases))

    def row_linear(
        self, name: str, shape: tuple[int, int], columns: tuple[int, int], *, has_bias: bool
    ) -> Linear:
        """Input columns [start, stop) of one module [out, in]: ranks' outputs must be summed.

        The bias is loaded everywhere and added by the first rank alone, so that the sum has it
        once.
        """
        out_size, in_size = shape
        start, stop = columns
        source = Source(f"{name}.weight", shape, _slice(1, in_size, columns))
        weight = self._add(name, (out_size, stop - start), [source])
        if not has_bias:
            return Linear(weight, None)
        bias = self._add(f"{name}.bias", (out_size,), [Source(f"{name}.bias", (out_size,))])
        return Linear(weight, bias if self.rank.rank == 0 else None)

    def gguf_tensors(self, permuted_heads: dict[str, int]) -> dict[str, GGUFTensor]:
        """Where a GGUF file holds each source.

        Args:
            permuted_heads: modules (last part of the name) with interleaved rows -> their heads.
        """
        names = [source.name for parameter in self.parameters for source in parameter.sources]
        return {
            name: GGUFTensor(gguf_name(name), permuted_heads.get(name.split(".")[-2], 0))
            for name in names
        }

    def _add(self, name: str, shape: tuple[int, ...], sources: Sequence[Source]) -> Parameter:
        parameter = Parameter(name, shape, self._dtype, tuple(sources))
        self.parameters.append(parameter)
        return parameter


def _slice(axis: int, size: int, kept: tuple[int, int]) -> Slice | None:
    return None if kept == (0, size) else Slice(axis, *kept)
