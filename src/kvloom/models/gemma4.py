"""Gemma 4 text models (model_type "gemma4_text"): head sizes by layer, shared KV, experts.

Full layers have larger heads than window layers, and may read their keys as values too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    DecoderModel,
    LayerConfig,
    read_layers,
    read_window,
)
from kvloom.models.fields import read_bool, read_float_or_none, read_int, read_mapping
from kvloom.models.gemma import (
    PER_LAYER_NAMES,
    SANDWICH_NORM_NAMES,
    PerLayerGate,
    PerLayerInputs,
    name_unused_kv,
    read_gemma_config,
    read_pattern,
    read_rope,
    share_kv,
)
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Attention, Batch, Experts, Ops, Parameter, Routing, Value
from kvloom.ops.source import Slice, Source

_DEFAULT_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(frozen=True, slots=True)
class Gemma4Experts:
    """A mixture of experts beside the dense feed-forward, between norms of its own.

    Attributes:
        dense_norm: of what the dense feed-forward gives.
        router_scale: [hidden_size] of the normalised hidden states that are routed.
    """

    dense_norm: Parameter
    router_scale: Parameter
    router: Parameter
    routing: Routing
    input_norm: Parameter
    experts: Experts
    norm: Parameter
    eps: float

    def add_to(self, ops: Ops, dense: Value, x: Value) -> Value:
        """[num_tokens, hidden_size]: the dense result, and the experts of x."""
        h = ops.rms_norm(x, self.router_scale, self.eps)
        logits = ops.linear(ops.scale(h, self.router_scale.shape[0] ** -0.5), self.router)
        routes = ops.route(logits, self.routing)
        h = ops.experts(ops.rms_norm(x, self.input_norm, self.eps), routes, self.experts)
        h = ops.rms_norm(ops.all_reduce(h), self.norm, self.eps)
        return ops.add(ops.rms_norm(dense, self.dense_norm, self.eps), h)


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """Attention and feed-forward, each between two norms; what some models add.

    Attributes:
        k_norm: [head_size]; None where KV is shared.
        reads_keys_as_values: whether there is no projection of values.
        experts: beside the feed-forward; None in dense models.
        per_layer_gate: None without inputs per layer.
        output_scale: [1].
    """

    input_norm: Parameter
    attention: SelfAttention
    q_norm: Parameter
    k_norm: Parameter | None
    reads_keys_as_values: bool
    attention_norm: Parameter
    mlp_input_norm: Parameter
    mlp: FeedForward
    experts: Gemma4Experts | None
    mlp_norm: Parameter
    per_layer_gate: PerLayerGate | None
    output_scale: Parameter


@dataclass(frozen=True, slots=True)
class Gemma4Extras:
    """What only some Gemma 4 models have.

    Attributes:
        final_cap: soft cap of the logits; None without one.
        reads_keys_as_values: whether full layers have no projection of values.
        size_per_layer: values of a layer's own input; 0 without such inputs.
        table_size: vocabulary of those inputs.
        num_experts: 0 in dense models.
        num_experts_per_token: that a token is given to.
        expert_size: inner size of an expert.
    """

    final_cap: float | None
    reads_keys_as_values: bool
    size_per_layer: int
    table_size: int
    num_experts: int
    num_experts_per_token: int
    expert_size: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Gemma4Extras:
        """From Hugging Face's fields."""
        has_experts = read_bool(fields, "enable_moe_block")
        return cls(
            final_cap=read_float_or_none(fields, "final_logit_softcapping"),
            reads_keys_as_values=read_bool(fields, "attention_k_eq_v"),
            size_per_layer=read_int(fields, "hidden_size_per_layer_input", 256, at_least=0),
            table_size=read_int(fields, "vocab_size_per_layer_input", 262_144),
            num_experts=read_int(fields, "num_experts") if has_experts else 0,
            num_experts_per_token=read_int(fields, "top_k_experts") if has_experts else 0,
            expert_size=read_int(fields, "moe_intermediate_size") if has_experts else 0,
        )


class Gemma4Model(DecoderModel):
    """Sandwich-norm decoder whose layers differ in head size, KV and rope."""

    gguf_names: ClassVar[Mapping[str, str]] = {
        **SANDWICH_NORM_NAMES,
        **PER_LAYER_NAMES,
        "layer_scalar": "layer_output_scale",
        "router.proj": "ffn_gate_inp",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    }

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(_read_config(fields), rank, dtypes)
        self.extras = extras = Gemma4Extras.read(fields)
        self.per_layer_inputs = (
            PerLayerInputs.build(self, extras.table_size, extras.size_per_layer)
            if extras.size_per_layer
            else None
        )
        self.layers = [self._build_layer(i) for i in range(len(self.config.layers))]
        self.unused_tensors = name_unused_kv(self.config.layers)

    def _build_layer(self, index: int) -> Gemma4Layer:
        name, extras, layer = f"model.layers.{index}", self.extras, self.config.layers[index]
        is_shared = layer.shares_kv_with is not None
        is_value_key = extras.reads_keys_as_values and layer.window is None
        modules = ["q_proj", "k_proj"] if is_value_key else ["q_proj", "k_proj", "v_proj"]
        norm, head_norm = self.build_norm, f"{name}.self_attn"
        gate_size = extras.size_per_layer
        return Gemma4Layer(
            input_norm=norm(f"{name}.input_layernorm"),
            attention=self.build_attention(
                index, modules[:1] if is_shared else modules, Attention(scale=1.0)
            ),
            q_norm=self.build.norm(f"{head_norm}.q_norm", layer.head_size),
            k_norm=None if is_shared else self.build.norm(f"{head_norm}.k_norm", layer.head_size),
            reads_keys_as_values=is_value_key,
            attention_norm=norm(f"{name}.post_attention_layernorm"),
            mlp_input_norm=norm(f"{name}.pre_feedforward_layernorm"),
            mlp=self.build_feed_forward(index),
            experts=self._build_experts(index) if extras.num_experts else None,
            mlp_norm=norm(f"{name}.post_feedforward_layernorm"),
            per_layer_gate=PerLayerGate.build(self, index, gate_size) if gate_size else None,
            output_scale=self.build.whole(f"{name}.layer_scalar", (1,)),
        )

    def _build_experts(self, index: int) -> Gemma4Experts:
        name, extras, size = f"model.layers.{index}", self.extras, self.config.hidden_size
        gguf_name, count = f"blk.{index}.ffn", extras.num_experts
        scale = (f"{name}.router.scale", f"{gguf_name}_gate_inp.scale")
        expert_scales = (f"{name}.router.per_expert_scale", f"{gguf_name}_down_exps.scale")
        return Gemma4Experts(
            dense_norm=self.build_norm(f"{name}.post_feedforward_layernorm_1"),
            router_scale=self._build_vector(*scale, size),
            router=self.build.whole(f"{name}.router.proj.weight", (count, size)),
            routing=Routing(extras.num_experts_per_token, "softmax", is_normalised=True),
            input_norm=self.build_norm(f"{name}.pre_feedforward_layernorm_2"),
            experts=Experts(
                *self._build_expert_matrices(index),
                activation=self.config.activation,
                scales=self._build_vector(*expert_scales, count),
            ),
            norm=self.build_norm(f"{name}.post_feedforward_layernorm_2"),
            eps=self.config.norm_eps,
        )

    def _build_expert_matrices(self, index: int) -> tuple[Parameter, Parameter]:
        """Gate and up, and down; files of both kinds have gate and up rows in one matrix."""
        name, hidden_size = f"model.layers.{index}.experts", self.config.hidden_size
        count, inner = self.extras.num_experts, self.extras.expert_size
        start, stop = self.rank.share(inner)

        def gate_up(tensor: str) -> list[Source]:
            rows = [Slice(1, first + start, first + stop) for first in (0, inner)]
            return [Source(tensor, (count, 2 * inner, hidden_size), (kept,)) for kept in rows]

        def down(tensor: str) -> list[Source]:
            return [Source(tensor, (count, hidden_size, inner), (Slice(2, start, stop),))]

        return (
            self.build.stack(
                f"{name}.gate_up",
                (count, 2 * (stop - start), hidden_size),
                gate_up(f"{name}.gate_up_proj"),
                gate_up(f"blk.{index}.ffn_gate_up_exps.weight"),
            ),
            self.build.stack(
                f"{name}.down",
                (count, hidden_size, stop - start),
                down(f"{name}.down_proj"),
                down(f"blk.{index}.ffn_down_exps.weight"),
            ),
        )

    def _build_vector(self, name: str, gguf_name: str, size: int) -> Parameter:
        stored, in_file = Source(name, (size,)), Source(gguf_name, (size,))
        return self.build.add(Parameter(name, (size,), self.norm.dtype, (stored,), (in_file,)))

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        x = ops.scale(x, self.config.hidden_size**0.5)
        layer_inputs: Sequence[Value] = [None] * len(self.layers)
        if self.per_layer_inputs is not None:
            layer_inputs = self.per_layer_inputs.compute(ops, batch.token_ids, x)
        for layer, layer_input in zip(self.layers, layer_inputs, strict=True):
            x = self._run_layer(ops, layer, x, layer_input, batch.positions)
        logits, cap = self.logits(ops, x, batch.logits_rows), self.extras.final_cap
        return logits if cap is None else ops.soft_cap(logits, cap)

    def _run_layer(
        self, ops: Ops, layer: Gemma4Layer, x: Value, layer_input: Value, positions: Value
    ) -> Value:
        eps = self.config.norm_eps
        h = self._attend(ops, layer, ops.rms_norm(x, layer.input_norm, eps), positions)
        x = ops.add(x, ops.rms_norm(h, layer.attention_norm, eps))
        h = layer.mlp.compute(ops, ops.rms_norm(x, layer.mlp_input_norm, eps))
        if layer.experts is not None:
            h = layer.experts.add_to(ops, h, x)
        x = ops.add(x, ops.rms_norm(h, layer.mlp_norm, eps))
        if layer.per_layer_gate is not None:
            x = ops.add(x, layer.per_layer_gate.compute(ops, x, layer_input))
        return ops.multiply_columns(x, layer.output_scale)

    def _attend(self, ops: Ops, layer: Gemma4Layer, h: Value, positions: Value) -> Value:
        eps, attention = self.config.norm_eps, layer.attention
        if layer.k_norm is None:
            q = ops.rms_norm(attention.project_query(ops, h), layer.q_norm, eps)
            return attention.attend_shared(ops, attention.rotate_query(ops, q, positions))
        if layer.reads_keys_as_values:
            q, k = attention.project_query_and_key(ops, h)
            v = k
        else:
            q, k, v = attention.project(ops, h)
        q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
        q, k = attention.rotate(ops, q, k, positions)
        return attention.attend(ops, q, k, ops.rms_norm(v, None, eps))


def _read_config(fields: Mapping[str, Any]) -> DecoderConfig:
    if fields.get("use_bidirectional_attention") == "vision":  # texts are read in one direction
        fields = {**fields, "use_bidirectional_attention": None}
    if fields.get("rope_parameters") is None:
        fields = {**fields, "rope_parameters": _DEFAULT_ROPES}
    types = (*read_pattern(fields, 6)[:-1], FULL)  # the last layer always sees everything
    alike = read_layers(fields, 256, lambda size: read_rope(fields, SLIDING, size))
    window = read_window(fields, 512)
    layers = [
        _make_full(fields, layer, i) if kind == FULL else replace(layer, window=window)
        for i, (layer, kind) in enumerate(zip(alike, types, strict=True))
    ]
    layers = share_kv(layers, types, read_int(fields, "num_kv_shared_layers", 0, at_least=0))
    if read_bool(fields, "use_double_wide_mlp"):
        layers = [_widen(layer) if layer.shares_kv_with is not None else layer for layer in layers]
    return read_gemma_config(fields, layers, ("final_logit_softcapping",))


def _make_full(fields: Mapping[str, Any], layer: LayerConfig, index: int) -> LayerConfig:
    """A full layer: `per_layer_config` has what is its own, or else fields for all full layers."""
    if "per_layer_config" in fields:
        own = read_mapping(read_mapping(fields, "per_layer_config"), str(index))
    else:
        own = {"head_dim": read_int(fields, "global_head_dim", 512)}
        if read_bool(fields, "attention_k_eq_v"):
            own["num_key_value_heads"] = fields.get("num_global_key_value_heads")
    head_size = read_int(own, "head_dim", layer.head_size)
    return replace(
        layer,
        num_kv_heads=read_int(own, "num_key_value_heads", layer.num_kv_heads),
        head_size=head_size,
        rope=read_rope(fields, FULL, head_size),
    )


def _widen(layer: LayerConfig) -> LayerConfig:
    return replace(layer, intermediate_size=2 * layer.intermediate_size)
