"""gpt-oss (model_type "gpt_oss"): windows in every other layer, sinks, experts with biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvloom.errors import UnsupportedModelError
from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    DecoderModel,
    LayerConfig,
    read_decoder_config,
    read_layer_types,
    read_layers,
    read_window,
)
from kvloom.models.experts import ExpertSizes, ExpertSources, build_experts, check_routing
from kvloom.models.fields import read_bool, read_float, read_int
from kvloom.models.layers import Linear, keep
from kvloom.models.modules import SelfAttention
from kvloom.models.parallel import TensorParallelRank
from kvloom.ops.base import Attention, Batch, Experts, Ops, Parameter, Routing, Value
from kvloom.ops.source import Slice, Source, Step, SwapAxes

# Of fields that a config may leave out, where other families have other defaults.
_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}
# Where there are no rope settings at all.
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
# What the activation "swiglu_clamped" computes with.
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


@dataclass(frozen=True, slots=True)
class GptOssLayer:
    """Attention, then experts, each after a norm.

    Attributes:
        router: [num_experts, hidden_size], with a bias.
    """

    input_norm: Parameter
    attention: SelfAttention
    mlp_norm: Parameter
    router: Linear
    experts: Experts


class GptOssModel(DecoderModel):
    """Pre-norm decoder: attention with a sink per head, a few experts per token."""

    gguf_names: ClassVar[Mapping[str, str]] = {
        "self_attn.sinks": "attn_sinks",
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    }

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        super().__init__(self.read_config(fields), rank, dtypes)
        self._dtype = dtypes.weights
        inner_size = self.config.layers[0].intermediate_size
        self._sizes = ExpertSizes(
            read_int(fields, "num_local_experts", 128),
            self.config.hidden_size,
            inner_size,
            *rank.share(inner_size),
        )
        self.routing = Routing(read_int(fields, "num_experts_per_tok", 4), "softmax_of_chosen")
        check_routing(self.routing, self._sizes.num_experts)
        self.layers = [self._build_layer(i) for i in range(len(self.config.layers))]

    @staticmethod
    def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields.

        Raises:
            UnsupportedModelError: quantised experts, or another activation.
        """
        if fields.get("quantization_config") is not None:
            raise UnsupportedModelError(
                "the checkpoint's experts are quantised, as quantization_config "
                f"{fields['quantization_config']!r:.80} says; use a GGUF file of the model, or a "
                "bfloat16 checkpoint"
            )
        for name, value in _SWIGLU.items():
            if read_float(fields, name, value) != value:
                raise UnsupportedModelError(
                    f"the config's {name} should be {value}, as in gpt-oss, not {fields[name]}"
                )
        has_rope = fields.get("rope_scaling") or fields.get("rope_parameters")
        fields = {**_DEFAULTS, **({} if has_rope else {"rope_scaling": _DEFAULT_ROPE}), **fields}
        has_attention_bias = read_bool(fields, "attention_bias", default=True)
        return replace(
            read_decoder_config(fields, _read_layers(fields)),
            has_qkv_bias=has_attention_bias,
            has_out_bias=has_attention_bias,
        )

    def _build_layer(self, index: int) -> GptOssLayer:
        name, sizes = f"model.layers.{index}", self._sizes
        router = f"{name}.mlp.router"
        return GptOssLayer(
            input_norm=self.build_norm(f"{name}.input_layernorm"),
            attention=self.build_attention(index, scoring=self._build_scoring(index)),
            mlp_norm=self.build_norm(f"{name}.post_attention_layernorm"),
            router=Linear(
                self.build.whole(f"{router}.weight", (sizes.num_experts, sizes.hidden_size)),
                self.build.whole(f"{router}.bias", (sizes.num_experts,)),
            ),
            experts=self._build_experts(index, f"{name}.mlp.experts"),
        )

    def _build_scoring(self, index: int) -> Attention:
        name, heads = f"model.layers.{index}.self_attn.sinks", self.heads[index]
        num_heads, first = self.config.num_heads, heads.first_head
        kept = keep(0, num_heads, (first, first + heads.num_heads))
        source = Source(name, (num_heads,), kept)
        sinks = self.build.add(Parameter(name, (heads.num_heads,), self._dtype, (source,)))
        return Attention(scale=self.config.layers[index].head_size ** -0.5, sinks=sinks)

    def _build_experts(self, index: int, name: str) -> Experts:
        """Matrices are stored [in, out]; columns of gate and up take turns."""
        sizes = self._sizes
        num_experts, inner, hidden = sizes.num_experts, sizes.inner_size, sizes.hidden_size
        gate_up_shape, down_shape = (num_experts, hidden, 2 * inner), (num_experts, inner, hidden)
        gate_up = self._take_turns(f"{name}.gate_up_proj", gate_up_shape, (SwapAxes(1, 2),))
        down = Source(f"{name}.down_proj", down_shape, (SwapAxes(1, 2), *sizes.keep(2)))
        experts = build_experts(
            self.build, index, sizes, ExpertSources(gate_up, [down]), "swiglu_clamped"
        )
        gate_up_bias = self.build.stack(
            f"{name}.gate_up_bias",
            (num_experts, 2 * (sizes.stop - sizes.start)),
            self._take_turns(f"{name}.gate_up_proj_bias", (num_experts, 2 * inner)),
            [
                Source(f"blk.{index}.ffn_{kind}_exps.bias", (num_experts, inner), sizes.keep(1))
                for kind in ("gate", "up")
            ],
        )
        down_bias = self.build.stack(
            f"{name}.down_bias",
            (num_experts, hidden),
            [Source(f"{name}.down_proj_bias", (num_experts, hidden))],
            [Source(f"blk.{index}.ffn_down_exps.bias", (num_experts, hidden))],
        )
        # Loaded everywhere and added by the first rank alone, as the ranks' outputs are summed.
        is_first = self.rank.rank == 0
        return replace(
            experts, gate_up_bias=gate_up_bias, down_bias=down_bias if is_first else None
        )

    def _take_turns(
        self, name: str, shape: tuple[int, ...], steps: tuple[Step, ...] = ()
    ) -> Sequence[Source]:
        """Gate and up, which take turns along axis 1 once the steps are done."""
        stop = 2 * self._sizes.inner_size
        return [
            Source(name, shape, (*steps, Slice(1, first, stop, 2), *self._sizes.keep(1)))
            for first in (0, 1)
        ]

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, eps)
            q, k, v = layer.attention.project(ops, h)
            q, k = layer.attention.rotate(ops, q, k, batch.positions)
            x = ops.add(x, layer.attention.attend(ops, q, k, v))
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            routes = ops.route(ops.linear(h, *layer.router), self.routing)
            x = ops.add(x, ops.all_reduce(ops.experts(h, routes, layer.experts)))
        return self.logits(ops, x, batch.logits_rows)


def _read_layers(fields: Mapping[str, Any]) -> list[LayerConfig]:
    layers = read_layers(fields)
    window = read_window(fields, 128)
    types = read_layer_types(fields)
    if types is None:
        types = tuple(FULL if i % 2 else SLIDING for i in range(len(layers)))
    return [
        replace(layer, window=window if kind == SLIDING else None)
        for layer, kind in zip(layers, types, strict=True)
    ]
