"""Activations and mixtures of experts on torch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvloom.ops.base import Activation, Experts, Parameter, Routing

# gpt-oss's gated activation: how far gate and up reach, and how steep the gate's sigmoid is.
_CLAMP = 7.0
_STEEPNESS = 1.702


def multiply_matrix(x: Tensor, matrix: Tensor) -> Tensor:
    """X @ matrix.T over the last axis, in the matrix's format, as float32."""
    return functional.linear(x.to(matrix.dtype), matrix).float()


def activate(x: Tensor, activation: Activation | Literal["tanh"]) -> Tensor:
    """The activation of every value of x."""
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    raise ValueError(f"{activation} needs a gate and an up value")


def activate_gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of x [..., 2 x size], gate and up side by side."""
    gate, up = x.chunk(2, dim=-1)
    if activation != "swiglu_clamped":
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return (up + 1) * gate * torch.sigmoid(_STEEPNESS * gate)


def route(logits: Tensor, routing: Routing, bias: Parameter | None) -> Tensor:
    """[num_tokens, 2 x num_experts_per_token]: expert ids, the best first, then their weights."""
    if routing.score == "softmax":
        scores = logits.softmax(dim=-1)
    else:
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits
    merits = scores if bias is None else scores + bias.value  # what experts are chosen by
    if routing.num_groups > 1:
        merits = _keep_best_groups(merits, routing)
    ids = _largest(merits, routing.num_experts_per_token)
    weights = scores.gather(-1, ids)
    if routing.score == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    if routing.is_normalised:
        epsilon = 1e-20 if routing.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=-1, keepdim=True) + epsilon)
    return torch.cat([ids.float(), weights * routing.factor], dim=-1)


def _keep_best_groups(merits: Tensor, routing: Routing) -> Tensor:
    """Merits with -inf in all groups but the best."""
    grouped = merits.unflatten(-1, (routing.num_groups, merits.shape[-1] // routing.num_groups))
    num_counted = 1 if routing.group_score == "max" else 2
    group_merits = grouped.sort(dim=-1, descending=True).values[..., :num_counted].sum(dim=-1)
    is_kept = torch.zeros_like(group_merits, dtype=torch.bool)
    is_kept.scatter_(-1, _largest(group_merits, routing.num_chosen_groups), True)
    return grouped.masked_fill(~is_kept[..., None], -math.inf).flatten(-2)


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest values of the last axis, in falling order; of equals the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def run_experts(x: Tensor, routes: Tensor, experts: Experts) -> Tensor:
    """Sum over each token's experts of weight x expert(x).

    All choices of an expert lie together, so that it runs once over them. A token's own results are
    added in the order of its choices, whoever else chose the same.
    """
    num_experts, hidden_size = experts.down.shape[:2]
    ids, weights = routes.chunk(2, dim=-1)
    num_choices = ids.shape[1]
    ids = ids.flatten().long()
    order = ids.argsort(stable=True)
    weights = weights.flatten()[order, None]  # [num_tokens x num_choices, 1], as all below
    if experts.scales is not None:
        weights = weights * experts.scales.value[ids[order], None]
    chosen = x[order // num_choices]
    if experts.weighs_input:
        chosen = chosen * weights
    counts = ids.bincount(minlength=num_experts).tolist()
    parts = enumerate(chosen.split(counts))
    y = torch.cat([_run_expert(part, expert, experts) for expert, part in parts])
    if not experts.weighs_input:
        y = y * weights
    by_token = torch.empty_like(y)
    by_token[order] = y
    return by_token.view(len(x), num_choices, hidden_size).sum(dim=1)


def _run_expert(x: Tensor, expert: int, experts: Experts) -> Tensor:
    if not len(x):
        return x
    gate_up = multiply_matrix(x, experts.gate_up.value[expert])
    if experts.gate_up_bias is not None:
        gate_up = gate_up + experts.gate_up_bias.value[expert]
    inner = activate_gated(gate_up, experts.activation)
    y = multiply_matrix(inner, experts.down.value[expert])
    return y if experts.down_bias is None else y + experts.down_bias.value[expert]
