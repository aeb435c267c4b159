"""What decoder families share: how their parameters are cut, named and stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvloom.dtypes import DType
from kvloom.models.base import GGUFTensor
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Parameter
from kvloom.ops.source import Add, Slice, Source, Step

# A Hugging Face module's path, in the model or below its layer -> the GGUF name of its tensors.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    """The GGUF name of the tensor that Hugging Face calls `name`, by a table of modules."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):  # a parameter that has no module of its own
        module, kind = name, "weight"
    if module in names:
        return f"{names[module]}.{kind}"
    _, _, index, path = module.split(".", 3)  # model.layers.{index}.{path}
    return f"blk.{index}.{names[path]}.{kind}"


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
    def kept(self) -> tuple[Step, ...]:
        """What makes this rank's part of the module's tensors."""
        return keep(0, self.size, (self.start, self.stop))


def fuse_rows(parts: Sequence[Rows], module: str) -> list[Rows]:
    """The same rows in a module that has all rows of the parts' modules, one after another."""
    size, first = sum(part.size for part in parts), 0
    fused: list[Rows] = []
    for part in parts:
        start, stop = first + part.start, first + part.stop
        if fused and fused[-1].stop == start:  # as on a single rank, so that it is read once
            start = fused.pop().start
        fused.append(Rows(module, size, start, stop))
        first += part.size
    return fused


class ParameterBuilder:
    """Declares one rank's parameters and keeps the list of them."""

    def __init__(
        self,
        rank: TensorParallelRank,
        dtype: DType,
        gguf_names: Mapping[str, str],
        fused_modules: Mapping[str, str],
    ) -> None:
        self.rank = rank
        self.parameters: list[Parameter] = []
        self._dtype = dtype
        self._gguf_names = {**GGUF_NAMES, **gguf_names}
        self._fused_modules = fused_modules

    def norm(self, name: str, size: int) -> Parameter:
        """A norm's weight [size], the same on every rank; `name` is the module's."""
        return self.whole(f"{name}.weight", (size,))

    def norm_around_one(self, name: str, size: int) -> Parameter:
        """A norm that weighs by 1 + w; GGUF files have the sum."""
        weight = f"{name}.weight"
        stored = Source(weight, (size,), (Add(1.0),))
        summed = Source(gguf_name(weight, self._gguf_names), (size,))
        return self.add(Parameter(name, (size,), self._dtype, (stored,), (summed,)))

    def whole(self, name: str, shape: tuple[int, ...]) -> Parameter:
        """All of the tensor `name`, the same on every rank."""
        return self._add(name.removesuffix(".weight"), shape, [Source(name, shape)])

    def stack(
        self,
        name: str,
        shape: tuple[int, ...],
        sources: Sequence[Source],
        gguf_sources: Sequence[Source] | None = None,
    ) -> Parameter:
        """Matrices or vectors of experts or heads along axis 0: see `Parameter.is_stacked`."""
        in_file = None if gguf_sources is None else tuple(gguf_sources)
        return self.add(
            Parameter(name, shape, self._dtype, tuple(sources), in_file, is_stacked=True)
        )

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Parameter:
        """This rank's rows of a vocabulary table [vocab_size, hidden_size]."""
        start, stop = self.rank.share(vocab_size)
        kept = keep(0, vocab_size, (start, stop))
        source = Source(f"{name}.weight", (vocab_size, hidden_size), kept)
        return self._add(name, (stop - start, hidden_size), [source])

    def column_linear(
        self, name: str, parts: Sequence[Rows], in_size: int, *, has_bias: bool
    ) -> Linear:
        """Output rows of several modules, stacked: each rank computes its own outputs."""
        path, _, last = name.rpartition(".")
        if last in self._fused_modules:
            parts = fuse_rows(parts, f"{path}.{self._fused_modules[last]}")
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
        source = Source(f"{name}.weight", shape, keep(1, in_size, columns))
        weight = self._add(name, (out_size, stop - start), [source])
        if not has_bias:
            return Linear(weight, None)
        bias = self._add(f"{name}.bias", (out_size,), [Source(f"{name}.bias", (out_size,))])
        return Linear(weight, bias if self.rank.rank == 0 else None)

    def gguf_tensors(self, permuted_heads: dict[str, int]) -> dict[str, GGUFTensor]:
        """Where a GGUF file holds each source, but of parameters with `gguf_sources`.

        Args:
            permuted_heads: modules (last part of the name) with interleaved rows -> their heads.
        """
        names = [
            source.name
            for parameter in self.parameters
            if parameter.gguf_sources is None
            for source in parameter.sources
        ]
        return {
            name: GGUFTensor(
                gguf_name(name, self._gguf_names), permuted_heads.get(name.split(".")[-2], 0)
            )
            for name in names
        }

    def add(self, parameter: Parameter) -> Parameter:
        """A parameter that is put together in a family's own way."""
        self.parameters.append(parameter)
        return parameter

    def _add(self, name: str, shape: tuple[int, ...], sources: Sequence[Source]) -> Parameter:
        return self.add(Parameter(name, shape, self._dtype, tuple(sources)))


def keep(axis: int, size: int, kept: tuple[int, int]) -> tuple[Step, ...]:
    """The steps that keep [start, stop) of an axis of `size`; none if that is all of it."""
    return () if kept == (0, size) else (Slice(axis, *kept),)
