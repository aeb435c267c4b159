"""The vocabulary a model may use, and the handles it is written over. Standard library only.

A model calls these operations on opaque values and never looks inside one: the reference computes
at once, a tape records. Shapes are in brackets; tokens of all requests lie flat, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvloom.dtypes import DType
from kvloom.kv.spec import KVCacheSpec
from kvloom.ops.source import Source

Value = Any  # an activation: an array in the reference, a buffer handle on a tape
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]
# Formats of packed weights: numbers, or groups of 32 with 8- or 4-bit codes.
PackedFormat = Literal["F32", "BF16", "Q8", "Q4"]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a matrix in the format they are stored in.

    Attributes:
        format: "F32", "F16", "BF16", "Q8_0", "Q4_0" or "Q4_1".
        num_inputs: values per row.
        data: uint8 [num_rows, row_bytes].
        first_row: where they begin in the parameter; row r of matrix e of a stack
            [num_matrices, num_rows, num_inputs] is e x num_rows + r.
    """

    format: str
    num_inputs: int
    data: Any
    first_row: int = 0


@dataclass(slots=True)
class Parameter:
    """A weight of this rank, put together from its sources. The loader fills `value`.

    Sources follow one another along axis 0. In a stack, a source that is a stack itself adds rows
    to every matrix; others are the rows of the first matrix, then of the second, and so on.

    Attributes:
        name: ours, unique in the model.
        shape: of all sources together.
        dtype: the format the checkpoint is expected to have; `plan` counts bytes with it.
        sources: in a Hugging Face checkpoint.
        gguf_sources: in a GGUF file, by its names; None where it has the same tensors, so that the
            model's `gguf_tensors` tells their names.
        is_stacked: axis 0 counts matrices or vectors: of experts, or of heads.
        value: the backend's packed form; None until loaded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    sources: tuple[Source, ...]
    gguf_sources: tuple[Source, ...] | None = None
    is_stacked: bool = False
    value: Any = None

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix or a stack of them, which are packed; vectors stay float32."""
        return len(self.shape) - self.is_stacked == 2

    @property
    def num_bytes(self) -> int:
        """Bytes on this rank in `dtype`."""
        count = 1
        for size in self.shape:
            count *= size
        return self.dtype.num_bytes(count)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first 2 x len(inv_freq) values of each head.

    Attributes:
        inv_freq: radians per position for each pair, scaling already applied.
        attention_factor: multiplies cos and sin (yarn); 1 otherwise.
        is_interleaved: neighbours are rotated against each other (value 2i with 2i + 1); else
            halves are (value i with i + len(inv_freq)).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class PositionScale:
    """Attention temperature that grows with the position (Llama 4's layers without rope).

    factor = 1 + scale x ln(1 + floor((position + 1) / floor_scale))
    """

    scale: float
    floor_scale: float


@dataclass(frozen=True, slots=True)
class Attention:
    """How a layer scores its keys. What a query sees follows from its KV cache spec.

    score = soft_cap x tanh(scale x q.k / soft_cap), masked after the cap.

    Attributes:
        scale: multiplies q.k.
        soft_cap: bounds the scores; None leaves them as they are.
        sinks: [num_heads] a score per head that takes part in the softmax once and has no value.
    """

    scale: float
    soft_cap: float | None = None
    sinks: Parameter | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its experts from one logit per expert.

    The experts with the largest scores are taken; with groups, only from the groups that are best.
    A token's weights are the scores of its experts, without the bias that helped to choose them.

    Attributes:
        num_experts_per_token: experts that a token is given to.
        score: of a logit; "softmax" is over all experts, "softmax_of_chosen" over the chosen ones.
        is_normalised: weights are divided by their sum (plus 1e-20 after "sigmoid").
        factor: multiplies the weights.
        num_groups: equal runs of experts; 1 means no groups.
        num_chosen_groups: groups whose experts take part.
        group_score: of a group: its largest score, or the sum of its two largest; bias included.
    """

    num_experts_per_token: int
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"]
    is_normalised: bool = False
    factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "sum_of_two"] = "max"


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward experts of a layer, their matrices stacked; I is one rank's inner size.

    Attributes:
        gate_up: [num_experts, 2 x I, hidden_size]: an expert's gate rows, then its up rows.
        down: [num_experts, hidden_size, I].
        activation: between them, of gate and up.
        gate_up_bias: [num_experts, 2 x I], or None.
        down_bias: [num_experts, hidden_size], or None.
        weighs_input: the routing weight multiplies the expert's input instead of its output.
        scales: [num_experts] multiplies the routing weight of each expert, or None.
    """

    gate_up: Parameter
    down: Parameter
    activation: Activation
    gate_up_bias: Parameter | None = None
    down_bias: Parameter | None = None
    weighs_input: bool = False
    scales: Parameter | None = None


@dataclass(slots=True)
class KVLayer:
    """The bound cache of one attention layer: full, window, chunk or shared makes no difference.

    Attributes:
        name: the layer's name in the KV cache config.
        spec: how its KV is stored; set when the cache is bound.
        group: index of its KV cache group; set when the cache is bound.
        storage: the backend's view of its blocks; None until bound.
    """

    name: str
    spec: KVCacheSpec | None = None
    group: int = 0
    storage: Any = None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where one KV cache group's tokens live in this step. Arrays are int32 unless said.

    Attributes:
        block_table: [num_reqs, max_num_blocks] block ids; 0 where there is no block. Column i is
            block i of the request's text, counted from its `first_columns`.
        slot_mapping: int64 [num_tokens] slot that each token's KV is written to; -1 skips.
        query_start: [num_reqs + 1] first token of each request in the flat batch; tokens behind the
            last request's are padding, and what attention makes of them is undefined.
        seq_lens: [num_reqs] stored tokens of each request once this step is written.
        num_computed_tokens: [num_reqs] stored tokens before this step.
        block_size: tokens per block of the group.
        first_columns: [num_reqs] where a row of the table begins, if tables are cut to what the
            step's queries see: p lies in column p // block_size - first_columns[request]. None
            where every row begins with the text.
    """

    block_table: Any
    slot_mapping: Any
    query_start: Any
    seq_lens: Any
    num_computed_tokens: Any
    block_size: int
    first_columns: Any = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The flat token batch a model runs on.

    Attributes:
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens].
        logits_rows: int64 [num_rows] tokens whose logits are wanted.
        attention: one entry per KV cache group.
        wants_best_only: whether of each row of logits nothing is asked but which is the greatest;
            for an `Executable` that keeps no more then.
    """

    token_ids: Value
    positions: Value
    logits_rows: Value
    attention: list[AttentionMetadata] = field(default_factory=list)
    wants_best_only: bool = False


class Communicator(Protocol):
    """Collectives of one tensor-parallel rank. With one rank both are the identity."""

    rank: int
    world_size: int

    def all_reduce(self, x: Value) -> Value:
        """Sum over ranks, in rank order on every rank, so that all hold the same bits."""

    def all_gather(self, x: Value) -> Value:
        """Ranks' values side by side along the last axis, in rank order."""


class Ops(Protocol):
    """The operations a model is written over; one instance serves one step."""

    # --- linear maps ------------------------------------------------------------------------

    def embedding(self, token_ids: Value, table: Parameter, first_row: int = 0) -> Value:
        """[num_tokens, hidden_size]; ids outside this rank's rows [first_row, ...) give zeros."""

    def linear(self, x: Value, weight: Parameter, bias: Parameter | None = None) -> Value:
        """X @ weight.T + bias: [num_tokens, in] and [out, in] -> [num_tokens, out]."""

    def head_linear(self, x: Value, weight: Parameter) -> Value:
        """A matrix per head: [num_tokens, num_heads, in] and [num_heads, out, in] -> [..., out]."""

    # --- norms and element-wise -------------------------------------------------------------

    def rms_norm(self, x: Value, weight: Parameter | None, eps: float) -> Value:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis, in float32; None weighs by 1."""

    def layer_norm(self, x: Value, weight: Parameter, eps: float) -> Value:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight over the last axis, in float32."""

    def add(self, a: Value, b: Value) -> Value:
        """Element-wise sum of equal shapes."""

    def multiply(self, a: Value, b: Value) -> Value:
        """Element-wise product of equal shapes, or b has one value per row of a: [..., 1]."""

    def multiply_columns(self, x: Value, weight: Parameter) -> Value:
        """X * weight: [num_tokens, size] and [size], or [1] for all columns."""

    def scale(self, x: Value, factor: float) -> Value:
        """X * factor."""

    def soft_cap(self, x: Value, cap: float) -> Value:
        """Cap * tanh(x / cap)."""

    def activation(self, x: Value, activation: Activation | Literal["tanh"]) -> Value:
        """The activation of every value of x."""

    def gated_activation(self, x: Value, activation: Activation) -> Value:
        """activation(gate) * up, where x is [num_tokens, 2 x size] = gate and up side by side.

        "swiglu_clamped" is gpt-oss's: gate <= 7, -7 <= up <= 7, then
        (up + 1) * gate * sigmoid(1.702 * gate).
        """

    def gaussian_top(self, x: Value, num_deviations: float) -> Value:
        """max(x - (mean(x) + num_deviations * deviation(x)), 0) over the last axis, in float32."""

    def match_rms(self, x: Value, target: Value, floor: float) -> Value:
        """X * rms(target) / max(rms(x), floor), rms(x) = sqrt(mean(x^2)) over the last axis."""

    # --- shapes -----------------------------------------------------------------------------

    def split(self, x: Value, sizes: tuple[int, ...]) -> tuple[Value, ...]:
        """Columns of [..., sum(sizes)], one value [..., size] per size."""

    def concat(self, values: Sequence[Value]) -> Value:
        """Values side by side along the last axis; all else of their shapes is equal."""

    def split_heads(
        self, x: Value, num_heads: int, num_kv_heads: int, head_size: int
    ) -> tuple[Value, Value, Value]:
        """[num_tokens, (num_heads + 2 x num_kv_heads) x head_size] -> q, k, v.

        Each is [num_tokens, its heads, head_size].
        """

    def heads(self, x: Value, num_heads: int) -> Value:
        """[num_tokens, num_heads x size] -> [num_tokens, num_heads, size]."""

    def merge_heads(self, x: Value) -> Value:
        """[num_tokens, num_heads, size] -> [num_tokens, num_heads x size]."""

    def select_rows(self, x: Value, rows: Value) -> Value:
        """[len(rows), ...]: the named rows of x."""

    # --- positions and attention ------------------------------------------------------------

    def rope(self, q: Value, k: Value, positions: Value, rope: Rope) -> tuple[Value, Value]:
        """Rotate q and k by their positions."""

    def rotate(self, x: Value, positions: Value, rope: Rope) -> Value:
        """Rotate the heads of x alone, as `rope` does: for queries of layers that share KV."""

    def scale_by_position(self, x: Value, positions: Value, scale: PositionScale) -> Value:
        """X times the factor of each token's position."""

    def attention(self, kv: KVLayer, q: Value, k: Value, v: Value, attention: Attention) -> Value:
        """Store k and v in this step's slots, then read the blocks.

        All of the step's k and v are written before any query reads: requests of one step may
        share blocks. The mask follows from positions and lengths alone.

        Returns:
            [num_tokens, num_heads x head_size_v].
        """

    def shared_attention(self, kv: KVLayer, q: Value, attention: Attention) -> Value:
        """Read the blocks that the layer whose KV this one shares has stored in this step.

        Value heads are as large as key heads.

        Returns:
            [num_tokens, num_heads x head_size].
        """

    def latent_attention(
        self, kv: KVLayer, q: Value, row: Value, attention: Attention, head_size_v: int
    ) -> Value:
        """Multi-head latent attention: store one row per token, read it as key and as value.

        Args:
            kv: its spec is an MLAAttentionSpec.
            q: [num_tokens, num_heads, head_size], multiplied into the latent space.
            row: [num_tokens, 1, head_size].
            attention: how keys are scored.
            head_size_v: the first values of a row are the value; the spec's, here because a tape
                is recorded before layers are bound.

        Returns:
            [num_tokens, num_heads, head_size_v].
        """

    # --- experts ----------------------------------------------------------------------------

    def route(self, logits: Value, routing: Routing, bias: Parameter | None = None) -> Value:
        """The experts and weights of each token, from [num_tokens, num_experts] router logits.

        Args:
            logits: of the router.
            routing: how experts are chosen and weighed.
            bias: [num_experts] added to the scores when experts are chosen, but not to weights.

        Returns:
            [num_tokens, 2 x num_experts_per_token]: expert ids, then their weights, as float32.
        """

    def experts(self, x: Value, routes: Value, experts: Experts) -> Value:
        """Sum over each token's experts of weight x expert(x): [num_tokens, hidden_size]."""

    # --- ranks ------------------------------------------------------------------------------

    def all_reduce(self, x: Value) -> Value:
        """Sum over tensor-parallel ranks."""

    def all_gather(self, x: Value) -> Value:
        """Concatenate over tensor-parallel ranks along the last axis."""
