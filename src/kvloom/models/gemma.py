"""What the Gemma families have in common: defaults, ropes, shared KV, inputs per layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvloom.errors import UnsupportedModelError
from kvloom.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    DecoderModel,
    LayerConfig,
    read_activation,
    read_decoder_config,
    read_layer_types,
    read_layers,
)
from kvloom.models.fields import read_bool, read_float, read_int, read_mapping
from kvloom.models.rope import GGUF_FACTORS, RopeFields, build_rope
from kvloom.ops.base import Activation, Ops, Parameter, Rope, Value

# GGUF names of norms before and after each part of a layer.
SANDWICH_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PER_LAYER_NAMES = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}


def read_gemma_config(
    fields: Mapping[str, Any], layers: Sequence[LayerConfig], computes: Collection[str] = ()
) -> DecoderConfig:
    """`read_decoder_config` with Gemma's defaults: a tied head, and tanh-approximated GELU."""
    has_attention_bias = read_bool(fields, "attention_bias")
    return replace(
        read_decoder_config(fields, layers, computes),
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        has_tied_head=read_bool(fields, "tie_word_embeddings", default=True),
        has_qkv_bias=has_attention_bias,
        has_out_bias=has_attention_bias,
    )


def read_pattern(fields: Mapping[str, Any], period: int) -> tuple[str, ...]:
    """The attention kind of every layer: `layer_types`, else every `period`-th is full."""
    types = read_layer_types(fields)
    if types is not None:
        return types
    num_layers = read_int(fields, "num_hidden_layers")
    return tuple(SLIDING if (i + 1) % period else FULL for i in range(num_layers))


def read_rope(fields: Mapping[str, Any], kind: str, head_size: int) -> Rope:
    """The rope of layers of an attention kind.

    Newer configs have `rope_parameters` per kind. Older ones have a base for window layers, and a
    base and a scaling for full layers.
    """
    parameters = read_mapping(fields, "rope_parameters")
    if unknown := parameters.keys() - {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"rope_parameters should have one object for {FULL} and one for {SLIDING}, "
            f"not {sorted(unknown)[0]}"
        )
    settings = read_mapping(parameters, kind)
    if kind == SLIDING:
        theta = read_float(fields, "rope_local_base_freq", 1e4, above=1.0)
    else:
        theta = read_float(fields, "rope_theta", 1e6, above=1.0)
        settings = settings or read_mapping(fields, "rope_scaling")
    own: dict[str, Any] = {"rope_theta": theta, "rope_scaling": settings, "rope_parameters": None}
    if kind == SLIDING:
        own[GGUF_FACTORS] = None  # a file's factors are for full layers
    return build_rope(RopeFields.read({**fields, **own}), head_size)


def read_local_and_global_layers(
    fields: Mapping[str, Any], types: Sequence[str], window: int | None
) -> list[LayerConfig]:
    """Layers of both attention kinds: each kind has its rope, and one has windows."""
    layers = read_layers(fields, 256, lambda size: read_rope(fields, FULL, size))
    local_rope = read_rope(fields, SLIDING, layers[0].head_size)
    return [
        replace(layer, rope=local_rope, window=window) if kind == SLIDING else layer
        for layer, kind in zip(layers, types, strict=True)
    ]


def share_kv(
    layers: Sequence[LayerConfig], types: Sequence[str], num_shared: int
) -> list[LayerConfig]:
    """The last `num_shared` layers read the KV of the last layer of their kind before those.

    Raises:
        UnsupportedModelError: there is none for some kind.
    """
    first = len(layers) - num_shared
    targets = {kind: i for i, kind in enumerate(types[: max(first, 0)])}
    if missing := set(types) - targets.keys():
        raise UnsupportedModelError(
            f"num_kv_shared_layers {num_shared} leaves no layer that stores the KV of "
            f"{sorted(missing)[0]}; check the config"
        )
    return [
        layer if i < first else replace(layer, shares_kv_with=targets[kind])
        for i, (layer, kind) in enumerate(zip(layers, types, strict=True))
    ]


def name_unused_kv(layers: Sequence[LayerConfig]) -> tuple[str, ...]:
    """Beginnings of the names of KV weights that layers which share KV do not read."""
    shared = [i for i, layer in enumerate(layers) if layer.shares_kv_with is not None]
    return tuple(
        beginning
        for i in shared
        for kind in ("k", "v")
        for beginning in (
            f"model.layers.{i}.self_attn.{kind}_proj.",
            f"model.layers.{i}.self_attn.{kind}_norm.",
            f"blk.{i}.attn_{kind}.",
            f"blk.{i}.attn_{kind}_norm.",
        )
    )


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """A small embedding of each token for every layer, from a table and from its hidden state.

    Attributes:
        size: values per layer.
        table: [vocabulary rows of this rank, num_layers x size].
        first_row: of the table.
        projection: [num_layers x size, hidden_size].
        norm: [size].
        eps: of the norm.
    """

    size: int
    table: Parameter
    first_row: int
    projection: Parameter
    norm: Parameter
    eps: float

    @classmethod
    def build(cls, model: DecoderModel, vocab_size: int, size: int) -> PerLayerInputs:
        """Declare the parameters."""
        hidden_size, width = model.config.hidden_size, len(model.config.layers) * size
        return cls(
            size=size,
            table=model.build.embedding("model.embed_tokens_per_layer", vocab_size, width),
            first_row=model.rank.share(vocab_size)[0],
            projection=model.build.whole(
                "model.per_layer_model_projection.weight", (width, hidden_size)
            ),
            norm=model.build.norm("model.per_layer_projection_norm", size),
            eps=model.config.norm_eps,
        )

    def compute(self, ops: Ops, token_ids: Value, x: Value) -> tuple[Value, ...]:
        """One [num_tokens, size] per layer, from embeddings x [num_tokens, hidden_size].

        Ids beyond the table, which stand for images and sounds, have zeros in it.
        """
        num_layers, hidden_size = self.projection.shape[0] // self.size, self.projection.shape[1]
        known = ops.all_reduce(ops.embedding(token_ids, self.table, self.first_row))
        seen = ops.scale(ops.linear(x, self.projection), hidden_size**-0.5)
        seen = ops.merge_heads(ops.rms_norm(ops.heads(seen, num_layers), self.norm, self.eps))
        both = ops.scale(ops.add(ops.scale(known, self.size**0.5), seen), 0.5**0.5)
        return ops.split(both, (self.size,) * num_layers)


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """What a layer adds from its per-layer input: norm(projection(activation(gate(x)) * input))."""

    gate: Parameter
    projection: Parameter
    norm: Parameter
    activation: Activation
    eps: float

    @classmethod
    def build(cls, model: DecoderModel, index: int, size: int) -> PerLayerGate:
        """Declare the parameters of a layer; all ranks have the same."""
        name, hidden_size = f"model.layers.{index}", model.config.hidden_size
        return cls(
            gate=model.build.whole(f"{name}.per_layer_input_gate.weight", (size, hidden_size)),
            projection=model.build.whole(
                f"{name}.per_layer_projection.weight", (hidden_size, size)
            ),
            norm=model.build_norm(f"{name}.post_per_layer_input_norm"),
            activation=model.config.activation,
            eps=model.config.norm_eps,
        )

    def compute(self, ops: Ops, x: Value, layer_input: Value) -> Value:
        """[num_tokens, hidden_size] of x [num_tokens, hidden_size]."""
        h = ops.activation(ops.linear(x, self.gate), self.activation)
        h = ops.linear(ops.multiply(h, layer_input), self.projection)
        return ops.rms_norm(h, self.norm, self.eps)
