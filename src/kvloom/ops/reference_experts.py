"""Activations and mixtures of experts of the reference."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvloom.ops.base import Activation, Experts, Parameter, Routing

Array = npt.NDArray[np.float32]

# gpt-oss's gated activation: how far gate and up reach, and how steep the gate's sigmoid is.
_CLAMP = np.float32(7.0)
_STEEPNESS = np.float32(1.702)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); where exp(-x) overflows, that is 0 as it should be."""
    y: Array = np.reciprocal(1 + np.exp(-x))
    return y


def activate(x: Array, activation: Activation | Literal["tanh"]) -> Array:
    """The activation of every value of x."""
    half = np.float32(0.5)
    if activation == "tanh":
        return np.tanh(x)
    if activation == "silu":
        return x * sigmoid(x)
    if activation == "gelu":
        erf = np.vectorize(math.erf, otypes=[np.float32])
        exact: Array = x * half * (1 + erf(x * np.float32(math.sqrt(0.5))))
        return exact
    if activation == "gelu_tanh":
        inner = np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        approximate: Array = x * half * (1 + np.tanh(inner))
        return approximate
    raise ValueError(f"{activation} needs a gate and an up value")


def activate_gated(x: Array, activation: Activation) -> Array:
    """activation(gate) * up of x [..., 2 x size], gate and up side by side."""
    size = x.shape[-1] // 2
    gate, up = x[..., :size], x[..., size:]
    if activation != "swiglu_clamped":
        return activate(gate, activation) * up
    gate, up = np.minimum(gate, _CLAMP), np.clip(up, -_CLAMP, _CLAMP)
    return (up + 1) * gate * sigmoid(_STEEPNESS * gate)


def route(logits: Array, routing: Routing, bias: Parameter | None) -> Array:
    """[num_tokens, 2 x num_experts_per_token]: expert ids, the best first, then their weights."""
    if routing.score == "softmax":
        scores = _softmax(logits)
    else:
        scores = sigmoid(logits) if routing.score == "sigmoid" else logits
    merits = scores if bias is None else scores + bias.value  # what experts are chosen by
    if routing.num_groups > 1:
        merits = _keep_best_groups(merits, routing)
    ids = _largest(merits, routing.num_experts_per_token)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if routing.score == "softmax_of_chosen":
        weights = _softmax(weights)
    if routing.is_normalised:
        epsilon = np.float32(1e-20 if routing.score == "sigmoid" else 0.0)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + epsilon)
    weights = weights * np.float32(routing.factor)
    return np.concatenate((ids.astype(np.float32), weights), axis=-1)


def _keep_best_groups(merits: Array, routing: Routing) -> Array:
    """The merits [num_tokens, num_experts], -inf outside the best groups."""
    num_tokens, num_experts = merits.shape
    grouped = merits.reshape(num_tokens, routing.num_groups, num_experts // routing.num_groups)
    num_counted = 1 if routing.group_score == "max" else 2
    group_merits = np.sort(grouped, axis=-1)[..., -num_counted:].sum(axis=-1)
    is_kept = np.zeros(group_merits.shape, np.bool_)
    np.put_along_axis(is_kept, _largest(group_merits, routing.num_chosen_groups), True, axis=-1)
    kept: Array = np.where(is_kept[..., None], grouped, np.float32(-np.inf))
    return kept.reshape(num_tokens, num_experts)


def _largest(x: Array, count: int) -> npt.NDArray[np.int64]:
    """Indices of the largest values of the last axis, in falling order; of equals the first."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    normalised: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normalised


def run_experts(x: Array, routes: Array, experts: Experts) -> Array:
    """Sum over each token's experts of weight x expert(x), expert by expert."""
    ids, weights = np.split(routes, 2, axis=-1)
    out = np.zeros((len(x), experts.down.shape[1]), np.float32)
    for expert in np.unique(ids).astype(int):
        tokens, choices = np.nonzero(ids == expert)
        weight = weights[tokens, choices][:, None]
        if experts.scales is not None:
            weight = weight * experts.scales.value[expert]
        chosen = x[tokens] * weight if experts.weighs_input else x[tokens]
        y = _run_expert(chosen, expert, experts)
        out[tokens] += y if experts.weighs_input else weight * y
    return out


def _run_expert(x: Array, expert: int, experts: Experts) -> Array:
    gate_up: Array = x @ experts.gate_up.value[expert].T
    if experts.gate_up_bias is not None:
        gate_up = gate_up + experts.gate_up_bias.value[expert]
    y: Array = activate_gated(gate_up, experts.activation) @ experts.down.value[expert].T
    return y if experts.down_bias is None else y + experts.down_bias.value[expert]
