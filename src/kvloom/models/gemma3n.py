"""Gemma 3n text models (model_type "gemma3n_text"): four alternating streams, shared KV, low ranks.

Of the streams of AltUp (arXiv 2301.13310) a layer computes one and predicts the others from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

from kvloom.errors import UnsupportedModelError
from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import DecoderConfig, DecoderModel, read_window
from kvloom.models.fields import read_bool, read_float_or_none, read_int
from kvloom.models.gemma import (
    PER_LAYER_NAMES,
    SANDWICH_NORM_NAMES,
    PerLayerGate,
    PerLayerInputs,
    name_unused_kv,
    read_gemma_config,
    read_local_and_global_layers,
    read_pattern,
    share_kv,
)
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Attention, Batch, Ops, Parameter, Value
from kvloom.ops.source import Reshape, Slice, Source

_Streams = tuple[Value, ...]  # each [num_tokens, hidden_size]

_STREAM_FLOOR = 1e-5**0.5  # least root mean square that a stream is divided by


@dataclass(frozen=True, slots=True)
class AltUp:
    """Predicts every stream from all of them, and corrects them by what a layer made of one.

    Attributes:
        active: the stream that layers compute.
        router_norm: [hidden_size].
        router: [num_streams, hidden_size] how a token weighs the streams.
        prediction: [num_streams^2, num_streams].
        correction: [num_streams, num_streams].
        output_scale: [hidden_size] of the corrected active stream.
        is_output_scaled: whether it is used; checkpoints have it in any case.
    """

    active: int
    router_norm: Parameter
    router: Parameter
    prediction: Parameter
    correction: Parameter
    output_scale: Parameter
    is_output_scaled: bool
    eps: float

    def predict(self, ops: Ops, streams: _Streams) -> _Streams:
        """Stream m plus the sum over n of coefficient (m, n) times stream n."""
        routed = self._route(ops, streams[self.active])
        coefficients = ops.linear(routed, self.prediction)  # [num_tokens, num_streams^2]
        columns = ops.split(coefficients, (1,) * len(streams) ** 2)
        predicted = []
        for m, stream in enumerate(streams):
            for n, other in enumerate(streams):
                stream = ops.add(stream, ops.multiply(other, columns[m * len(streams) + n]))
            predicted.append(stream)
        return tuple(predicted)

    def correct(self, ops: Ops, predicted: _Streams, activated: Value) -> _Streams:
        """Stream m plus (1 + coefficient m) times what is new in the activated stream."""
        routed = self._route(ops, activated)
        columns = ops.split(ops.linear(routed, self.correction), (1,) * len(predicted))
        news = ops.add(activated, ops.scale(predicted[self.active], -1.0))
        return tuple(
            ops.add(stream, ops.add(news, ops.multiply(news, column)))
            for stream, column in zip(predicted, columns, strict=True)
        )

    def output(self, ops: Ops, corrected: _Streams) -> Value:
        """The active stream, scaled."""
        x = corrected[self.active]
        return ops.multiply_columns(x, self.output_scale) if self.is_output_scaled else x

    def _route(self, ops: Ops, x: Value) -> Value:
        """[num_tokens, num_streams]."""
        h = ops.scale(ops.rms_norm(x, self.router_norm, self.eps), 1.0 / self.router_norm.shape[0])
        return ops.activation(ops.linear(h, self.router), "tanh")


@dataclass(frozen=True, slots=True)
class Laurel:
    """Adds what a map of low rank makes of the hidden states."""

    left: Parameter
    right: Parameter
    norm: Parameter
    eps: float

    def compute(self, ops: Ops, h: Value) -> Value:
        """[num_tokens, hidden_size] of h [num_tokens, hidden_size]."""
        low_rank = ops.linear(ops.linear(h, self.left), self.right)
        return ops.add(h, ops.rms_norm(low_rank, self.norm, self.eps))


@dataclass(frozen=True, slots=True)
class Gemma3nLayer:
    """Attention beside a low-rank map, then a feed-forward, on the active stream.

    Attributes:
        k_norm: [head_size]; None where KV is shared.
        inner_size: of the feed-forward, over all ranks.
        num_deviations: gates this far above their mean take part; None lets all.
    """

    altup: AltUp
    input_norm: Parameter
    laurel: Laurel
    attention: SelfAttention
    q_norm: Parameter
    k_norm: Parameter | None
    attention_norm: Parameter
    mlp_input_norm: Parameter
    mlp: FeedForward
    inner_size: int
    num_deviations: float | None
    mlp_norm: Parameter
    per_layer_gate: PerLayerGate


class Gemma3nModel(DecoderModel):
    """AltUp over sandwich-norm layers; the last layers read the KV of earlier ones."""

    gguf_names: ClassVar[Mapping[str, str]] = {
        **SANDWICH_NORM_NAMES,
        **PER_LAYER_NAMES,
        "altup.router_norm": "altup_router_norm",
        "altup.modality_router": "altup_router",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
    }

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(_read_config(fields), rank, dtypes)
        self.final_cap = read_float_or_none(fields, "final_logit_softcapping", 30.0)
        self.num_streams = read_int(fields, "altup_num_inputs", 4)
        self.active = read_int(fields, "altup_active_idx", 0, at_least=0)
        self._is_output_scaled = read_bool(fields, "altup_correct_scale", default=True)
        self._laurel_rank = read_int(fields, "laurel_rank", 64)
        self._size_per_layer = read_int(fields, "hidden_size_per_layer_input", 256)
        table_size = read_int(fields, "vocab_size_per_layer_input", 262_144)
        self.per_layer_inputs = PerLayerInputs.build(self, table_size, self._size_per_layer)
        self.projections = self._build_stream_maps("altup_projections", "altup_proj")
        self.unprojections = self._build_stream_maps(
            "altup_unembed_projections", "altup_unembd_proj"
        )
        sparsities = _read_sparsities(fields, len(self.config.layers))
        self.layers = [self._build_layer(i, share) for i, share in enumerate(sparsities)]
        self.unused_tensors = name_unused_kv(self.config.layers)

    def _build_stream_maps(self, module: str, gguf_module: str) -> list[Parameter]:
        """One [hidden_size, hidden_size] for each stream but the first; GGUF files stack them."""
        count, size = self.num_streams - 1, self.config.hidden_size
        maps = []
        for i in range(count):
            name = f"model.{module}.{i}"
            source = Source(f"{name}.weight", (size, size))
            steps = (Slice(0, i, i + 1), Reshape((size, size)))
            stacked = Source(f"{gguf_module}.weight", (count, size, size), steps)
            maps.append(
                self.build.add(
                    Parameter(name, (size, size), self.norm.dtype, (source,), (stacked,))
                )
            )
        return maps

    def _build_layer(self, index: int, sparsity: float) -> Gemma3nLayer:
        name, layer = f"model.layers.{index}", self.config.layers[index]
        norm, is_shared = self.build.norm, layer.shares_kv_with is not None
        modules = ("q_proj",) if is_shared else ("q_proj", "k_proj", "v_proj")
        k_norm = None if is_shared else norm(f"{name}.self_attn.k_norm", layer.head_size)
        return Gemma3nLayer(
            altup=self._build_altup(f"{name}.altup"),
            input_norm=self.build_norm(f"{name}.input_layernorm"),
            laurel=self._build_laurel(f"{name}.laurel"),
            attention=self.build_attention(index, modules, Attention(scale=1.0)),
            q_norm=norm(f"{name}.self_attn.q_norm", layer.head_size),
            k_norm=k_norm,
            attention_norm=self.build_norm(f"{name}.post_attention_layernorm"),
            mlp_input_norm=self.build_norm(f"{name}.pre_feedforward_layernorm"),
            mlp=self.build_feed_forward(index),
            inner_size=layer.intermediate_size,
            num_deviations=NormalDist().inv_cdf(sparsity) if sparsity else None,
            mlp_norm=self.build_norm(f"{name}.post_feedforward_layernorm"),
            per_layer_gate=PerLayerGate.build(self, index, self._size_per_layer),
        )

    def _build_laurel(self, name: str) -> Laurel:
        size, rank, whole = self.config.hidden_size, self._laurel_rank, self.build.whole
        return Laurel(
            left=whole(f"{name}.linear_left.weight", (rank, size)),
            right=whole(f"{name}.linear_right.weight", (size, rank)),
            norm=self.build_norm(f"{name}.post_laurel_norm"),
            eps=self.config.norm_eps,
        )

    def _build_altup(self, name: str) -> AltUp:
        size, count, whole = self.config.hidden_size, self.num_streams, self.build.whole
        return AltUp(
            active=self.active,
            router_norm=self.build_norm(f"{name}.router_norm"),
            router=whole(f"{name}.modality_router.weight", (count, size)),
            prediction=whole(f"{name}.prediction_coefs.weight", (count * count, count)),
            correction=whole(f"{name}.correction_coefs.weight", (count, count)),
            output_scale=whole(f"{name}.correct_output_scale", (size,)),
            is_output_scaled=self._is_output_scaled,
            eps=self.config.norm_eps,
        )

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        x = ops.scale(x, self.config.hidden_size**0.5)
        layer_inputs = self.per_layer_inputs.compute(ops, batch.token_ids, x)
        others = (ops.linear(x, projection) for projection in self.projections)
        streams = (x, *(ops.match_rms(other, x, _STREAM_FLOOR) for other in others))
        for layer, layer_input in zip(self.layers, layer_inputs, strict=True):
            streams = self._run_layer(ops, layer, streams, layer_input, batch.positions)
        rows = [ops.select_rows(stream, batch.logits_rows) for stream in streams]
        logits = self.unembed(ops, self._join(ops, rows))
        return logits if self.final_cap is None else ops.soft_cap(logits, self.final_cap)

    def _run_layer(
        self, ops: Ops, layer: Gemma3nLayer, streams: _Streams, layer_input: Value, positions: Value
    ) -> _Streams:
        eps = self.config.norm_eps
        predicted = layer.altup.predict(ops, streams)
        x = predicted[self.active]
        h = ops.rms_norm(x, layer.input_norm, eps)
        a = ops.rms_norm(self._attend(ops, layer, h, positions), layer.attention_norm, eps)
        x = ops.add(ops.add(x, a), layer.laurel.compute(ops, h))
        x = ops.scale(x, 1.0 / math.sqrt(2.0))
        h = self._feed_forward(ops, layer, ops.rms_norm(x, layer.mlp_input_norm, eps))
        x = ops.add(x, ops.rms_norm(h, layer.mlp_norm, eps))
        first, *others = corrected = layer.altup.correct(ops, predicted, x)
        h = layer.per_layer_gate.compute(ops, layer.altup.output(ops, corrected), layer_input)
        return (first, *(ops.add(other, h) for other in others))

    def _attend(self, ops: Ops, layer: Gemma3nLayer, h: Value, positions: Value) -> Value:
        eps, attention = self.config.norm_eps, layer.attention
        if layer.k_norm is None:
            q = ops.rms_norm(attention.project_query(ops, h), layer.q_norm, eps)
            return attention.attend_shared(ops, attention.rotate_query(ops, q, positions))
        q, k, v = attention.project(ops, h)
        q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
        q, k = attention.rotate(ops, q, k, positions)
        return attention.attend(ops, q, k, ops.rms_norm(v, None, eps))

    def _feed_forward(self, ops: Ops, layer: Gemma3nLayer, h: Value) -> Value:
        if layer.num_deviations is None:
            return layer.mlp.compute(ops, h)
        share = layer.mlp.gate_up.weight.shape[0] // 2
        gate, up = ops.split(ops.linear(h, *layer.mlp.gate_up), (share, share))
        gate = self._keep_top(ops, gate, layer.inner_size, layer.num_deviations)
        inner = ops.multiply(ops.activation(gate, layer.mlp.activation), up)
        return ops.all_reduce(ops.linear(inner, *layer.mlp.down))

    def _keep_top(self, ops: Ops, gate: Value, inner_size: int, num_deviations: float) -> Value:
        """This rank's share of the gates; those of all ranks have a say in what is kept."""
        start, stop = self.rank.share(inner_size)
        gates = ops.gaussian_top(ops.all_gather(gate), num_deviations)
        sizes = (start, stop - start, inner_size - stop)
        own, *_ = ops.split(gates, tuple(s for s in sizes if s))[1 if start else 0 :]
        return own

    def _join(self, ops: Ops, streams: Sequence[Value]) -> Value:
        """The mean of all streams at the first one's magnitude, normalised."""
        first, *others = streams
        total = first
        for other, unprojection in zip(others, self.unprojections, strict=True):
            projected = ops.match_rms(ops.linear(other, unprojection), first, _STREAM_FLOOR)
            total = ops.add(total, projected)
        return ops.rms_norm(ops.scale(total, 1.0 / len(streams)), self.norm, self.config.norm_eps)


def _read_config(fields: Mapping[str, Any]) -> DecoderConfig:
    types = read_pattern(fields, 5)
    layers = read_local_and_global_layers(fields, types, read_window(fields, 512))
    num_shared = read_int(fields, "num_kv_shared_layers", 15, at_least=0)
    layers = share_kv(layers, types, num_shared)
    return read_gemma_config(fields, layers, ("final_logit_softcapping",))


def _read_sparsities(fields: Mapping[str, Any], num_layers: int) -> tuple[float, ...]:
    """Per layer, the share of gates that are left out: by default 95% in the first ten."""
    values = fields.get("activation_sparsity_pattern")
    if values is None:
        num_sparse = 10 if num_layers > 10 else 0
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    is_list = isinstance(values, list) and len(values) == num_layers
    if not is_list or not all(isinstance(v, int | float) and 0 <= v < 1 for v in values):
        raise UnsupportedModelError(
            f"activation_sparsity_pattern should have a share from 0 to below 1 for each of "
            f"{num_layers} layers, not {values!r:.80}"
        )
    return tuple(float(value) for value in values)
