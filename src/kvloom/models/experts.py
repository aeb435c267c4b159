"""Mixtures of experts: how their matrices are stacked and cut, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.errors import UnsupportedModelError
from kvloom.models.layers import ParameterBuilder, keep
from kvloom.models.modules import FeedForward
from kvloom.ops.base import Activation, Experts, Ops, Parameter, Routing, Value
from kvloom.ops.source import Source, Step


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of a layer, and the inner values [start, stop) of each that this rank computes.

    Attributes:
        inner_size: of one expert, over all ranks.
    """

    num_experts: int
    hidden_size: int
    inner_size: int
    start: int
    stop: int

    def keep(self, axis: int) -> tuple[Step, ...]:
        """What makes this rank's part of an axis of inner values."""
        return keep(axis, self.inner_size, (self.start, self.stop))

    def gguf_gate_up(self, index: int) -> list[Source]:
        """The gate and up matrices of a layer's experts, as every family's GGUF files have them."""
        shape = (self.num_experts, self.inner_size, self.hidden_size)
        return [
            Source(f"blk.{index}.ffn_{kind}_exps.weight", shape, self.keep(1))
            for kind in ("gate", "up")
        ]

    def gguf_down(self, index: int) -> list[Source]:
        """The down matrices of a layer's experts."""
        shape = (self.num_experts, self.hidden_size, self.inner_size)
        return [Source(f"blk.{index}.ffn_down_exps.weight", shape, self.keep(2))]


def check_routing(routing: Routing, num_experts: int) -> None:
    """Refuse a routing that has not enough experts to choose from.

    Raises:
        UnsupportedModelError: names the numbers that do not fit.
    """
    num_groups, num_chosen_groups = routing.num_groups, routing.num_chosen_groups
    if num_experts % num_groups or num_chosen_groups > num_groups:
        raise UnsupportedModelError(
            f"{num_experts} experts do not make {num_groups} groups of which {num_chosen_groups} "
            "are chosen; check the config"
        )
    num_candidates = num_experts // num_groups * num_chosen_groups
    if routing.num_experts_per_token > num_candidates:
        raise UnsupportedModelError(
            f"a token cannot be given to {routing.num_experts_per_token} experts out of "
            f"{num_candidates}; check the config"
        )


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """Where a Hugging Face checkpoint has a layer's experts, cut for this rank."""

    gate_up: Sequence[Source]
    down: Sequence[Source]


def build_experts(
    build: ParameterBuilder,
    index: int,
    sizes: ExpertSizes,
    sources: ExpertSources,
    activation: Activation,
) -> Experts:
    """The experts of layer `index`, without biases, that weigh their output."""
    name, num_inner = f"model.layers.{index}.experts", sizes.stop - sizes.start
    return Experts(
        gate_up=build.stack(
            f"{name}.gate_up",
            (sizes.num_experts, 2 * num_inner, sizes.hidden_size),
            sources.gate_up,
            sizes.gguf_gate_up(index),
        ),
        down=build.stack(
            f"{name}.down",
            (sizes.num_experts, sizes.hidden_size, num_inner),
            sources.down,
            sizes.gguf_down(index),
        ),
        activation=activation,
    )


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A router's choice of experts, and one feed-forward that every token passes.

    Attributes:
        router: [num_experts, hidden_size].
        choice_bias: [num_experts] helps to choose experts, but not to weigh them; None for none.
    """

    router: Parameter
    routing: Routing
    experts: Experts
    shared: FeedForward
    choice_bias: Parameter | None = None

    def compute(self, ops: Ops, h: Value) -> Value:
        """[num_tokens, hidden_size] of h [num_tokens, hidden_size]."""
        routes = ops.route(ops.linear(h, self.router), self.routing, self.choice_bias)
        chosen = ops.experts(h, routes, self.experts)
        return ops.all_reduce(ops.add(chosen, self.shared.compute_share(ops, h)))
