"""What a step asks of a device, counted on the model's own tape: operations, and bytes moved.

A forward pass is recorded, not described a second time: whatever a family computes is counted. Only
matrices, attention and what ranks exchange are; all else is small beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import LayerSpec
from kvloom.models.base import Model
from kvloom.ops.base import Experts, Parameter
from kvloom.ops.tape import Operation, Rows, TapeValue, record

Chunk = tuple[int, int]
"""(computed tokens, tokens of this step) of one request."""

_BLOCK_SIZE = 32  # any: bytes per token do not depend on it
_VALUE_BYTES = 2  # of an activation between ranks


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the duration of a step depends on.

    Attributes:
        chunks: one per request.
        num_rows: requests whose logits are wanted, as they get a token.
        is_after_idle: whether the engine had nothing to do before it.
    """

    chunks: list[Chunk]
    num_rows: int
    is_after_idle: bool = False

    @property
    def num_tokens(self) -> int:
        """Over all requests."""
        return sum([num_tokens for _, num_tokens in self.chunks])


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys a query sees: all, those of a window, or those of its aligned chunk."""

    window: int | None = None
    chunk_size: int | None = None

    def num_pairs(self, chunk: Chunk) -> int:
        """Queries times the keys that each of them sees."""
        num_computed, num_tokens = chunk
        if self.chunk_size is not None:
            end = num_computed + num_tokens
            return self._pairs_before(end) - self._pairs_before(num_computed)
        num_growing = num_tokens
        if self.window is not None:  # behind it, each query sees a whole window
            num_growing = min(max(self.window - num_computed, 0), num_tokens)
        growing = num_growing * num_computed + num_growing * (num_growing + 1) // 2
        return growing + (num_tokens - num_growing) * (self.window or 0)

    def num_keys(self, chunk: Chunk) -> int:
        """Keys that some query of the chunk sees: read once for all of them."""
        num_computed, num_tokens = chunk
        if self.chunk_size is not None:
            return num_computed % self.chunk_size + num_tokens
        if self.window is not None:
            return min(num_computed, self.window - 1) + num_tokens
        return num_computed + num_tokens

    def _pairs_before(self, end: int) -> int:
        size = self.chunk_size or 1
        rest = end % size
        return end // size * (size * (size + 1) // 2) + rest * (rest + 1) // 2


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """All layers that see alike.

    Attributes:
        flops_per_pair: for one query and one key, over the layers.
        bytes_per_key: keys and values of one token, over the layers.
    """

    visibility: Visibility
    flops_per_pair: int
    bytes_per_key: float


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """The experts of one layer.

    Attributes:
        num_chosen: experts that a token is given to.
        num_bytes: of all experts.
    """

    num_experts: int
    num_chosen: int
    num_bytes: int

    def expected_bytes(self, num_tokens: int) -> float:
        """Of the experts that some token chooses, if every choice is as likely."""
        share_unused: float = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_bytes * (1 - share_unused)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One rank's work.

    Attributes:
        flops_per_token: of matrices, for each token of a step.
        flops_per_row: of matrices, for each row of logits.
        weight_bytes: of the matrices that every step reads.
        experts: of the layers that have them.
        attention: by what layers see.
        num_collectives: sums and gathers over ranks, per step.
        collective_bytes_per_token: of the values that they make, per token.
        collective_bytes_per_row: the same per row of logits.
    """

    flops_per_token: int
    flops_per_row: int
    weight_bytes: int
    experts: tuple[ExpertWork, ...]
    attention: tuple[AttentionWork, ...]
    num_collectives: int
    collective_bytes_per_token: int
    collective_bytes_per_row: int


def count_work(model: Model, world_size: int) -> ModelWork:
    """What a rank of `world_size` computes and reads in a step."""
    operations = record(model, world_size).operations
    flops: Counter[Rows] = Counter()
    exchanged: Counter[Rows] = Counter()
    read: dict[str, int] = {}
    for operation in operations:
        rows = operation.outputs[0].rows
        flops[rows] += _matrix_flops(operation)
        if operation.name in ("linear", "head_linear"):
            weight: Parameter = operation.arguments[1]
            read[weight.name] = weight.num_bytes
        elif operation.name in ("all_reduce", "all_gather"):
            exchanged[rows] += operation.output.width * _VALUE_BYTES
    return ModelWork(
        flops_per_token=flops[Rows.TOKENS],
        flops_per_row=flops[Rows.LOGITS],
        weight_bytes=sum(read.values()),
        experts=tuple(_expert_work(op) for op in operations if op.name == "experts"),
        attention=_attention_work(operations, model.get_kv_spec().layers),
        num_collectives=sum(op.name in ("all_reduce", "all_gather") for op in operations),
        collective_bytes_per_token=exchanged[Rows.TOKENS],
        collective_bytes_per_row=exchanged[Rows.LOGITS],
    )


def _matrix_flops(operation: Operation) -> int:
    """Per row: a multiplication and an addition per value of the matrices it passes."""
    if operation.name in ("linear", "head_linear"):
        weight: Parameter = operation.arguments[1]
        return 2 * prod(weight.shape)
    if operation.name == "experts":
        routes: TapeValue = operation.arguments[1]
        experts: Experts = operation.arguments[2]
        values = sum(prod(weight.shape[1:]) for weight in (experts.gate_up, experts.down))
        return 2 * _num_chosen(routes) * values
    return 0


def _num_chosen(routes: TapeValue) -> int:
    """A route is the chosen experts' ids, then their weights."""
    return routes.width // 2


def _expert_work(operation: Operation) -> ExpertWork:
    routes: TapeValue = operation.arguments[1]
    experts: Experts = operation.arguments[2]
    num_bytes = experts.gate_up.num_bytes + experts.down.num_bytes
    return ExpertWork(experts.gate_up.shape[0], _num_chosen(routes), num_bytes)


def _attention_work(
    operations: Iterable[Operation], layers: Iterable[LayerSpec]
) -> tuple[AttentionWork, ...]:
    specs = {layer.name: layer for layer in layers}
    flops: Counter[Visibility] = Counter()
    num_bytes: dict[Visibility, float] = {}
    for operation in operations:
        if operation.name not in ("attention", "shared_attention", "latent_attention"):
            continue
        kv, q = operation.arguments[:2]
        layer = specs[kv.name]
        sees = Visibility(layer.sliding_window_size, layer.chunk_size)
        # Scores take the query's values, the weighted sum the output's.
        flops[sees] += 2 * (q.width + operation.output.width)
        stored = make_kv_cache_spec(replace(layer, shares_kv_with=None), _BLOCK_SIZE)
        per_token = stored.page_size_bytes / _BLOCK_SIZE
        num_bytes[sees] = num_bytes.get(sees, 0.0) + per_token
    return tuple(AttentionWork(sees, flops[sees], num_bytes[sees]) for sees in flops)
