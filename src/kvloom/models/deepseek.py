"""DeepSeek V2 and V3 (model types "deepseek_v2", "deepseek_v3"): latent attention, experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvloom.dtypes import DType
from kvloom.errors import UnsupportedModelError
from kvloom.kv.spec import KVSpec, LayerSpec
from kvloom.models.base import ModelDTypes
from kvloom.models.decoder import (
    DecoderConfig,
    DecoderModel,
    LayerConfig,
    read_decoder_config,
)
from kvloom.models.experts import (
    ExpertSizes,
    ExpertSources,
    MixtureOfExperts,
    build_experts,
    check_routing,
)
from kvloom.models.fields import read_bool, read_float, read_int
from kvloom.models.latent import LatentAttention, LatentSizes, read_scale
from kvloom.models.layers import Linear, Rows, keep
from kvloom.models.modules import FeedForward
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.rope import RopeFields, build_rope
from kvloom.ops.base import Attention, Batch, Experts, Ops, Parameter, Routing, Value
from kvloom.ops.source import Reshape, Slice, Source, SwapAxes


@dataclass(frozen=True, slots=True)
class DeepseekLayer:
    """Latent attention, then a dense feed-forward or experts."""

    input_norm: Parameter
    attention: LatentAttention
    mlp_norm: Parameter
    mlp: FeedForward | MixtureOfExperts


class DeepseekModel(DecoderModel):
    """What V2 and V3 have in common: all but how experts are chosen.

    Attributes:
        defaults: of fields that a config may leave out.
    """

    gguf_names: ClassVar[Mapping[str, str]] = {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    }
    defaults: ClassVar[Mapping[str, Any]]

    def __init__(
        self, fields: Mapping[str, Any], rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        fields = {**self.defaults, **fields}
        self.sizes = LatentSizes.read(fields)
        super().__init__(self.read_config(fields), rank, dtypes)
        self._scoring = Attention(read_scale(fields, self.sizes))
        self._routing = self.read_routing(fields)
        expert_size = read_int(fields, "moe_intermediate_size")
        self._shared_size = expert_size * read_int(fields, "n_shared_experts")
        self._expert_sizes = ExpertSizes(
            read_int(fields, "n_routed_experts"),
            self.config.hidden_size,
            expert_size,
            *rank.share(expert_size),
        )
        check_routing(self._routing, self._expert_sizes.num_experts)
        num_layers = len(self.config.layers)
        num_dense = read_int(fields, "first_k_dense_replace", at_least=0)
        # Layers that predict further tokens follow the last one in the checkpoint.
        num_predicting = read_int(fields, "num_nextn_predict_layers", 0, at_least=0)
        self.unused_tensors = tuple(
            f"model.layers.{num_layers + i}." for i in range(num_predicting)
        )
        self.layers = [
            DeepseekLayer(
                input_norm=self.build_norm(f"model.layers.{i}.input_layernorm"),
                attention=self._build_attention(i),
                mlp_norm=self.build_norm(f"model.layers.{i}.post_attention_layernorm"),
                mlp=self.build_feed_forward(i) if i < num_dense else self._build_mixture(i),
            )
            for i in range(num_layers)
        ]

    @staticmethod
    @abstractmethod
    def read_routing(fields: Mapping[str, Any]) -> Routing:
        """How this family chooses experts.

        Raises:
            UnsupportedModelError: a way that is not computed.
        """

    def read_config(self, fields: Mapping[str, Any]) -> DecoderConfig:
        """From Hugging Face's fields. All query heads read the one latent row of a token."""
        _check_fixed(fields, "moe_layer_freq", 1)
        sizes = self.sizes
        rope = build_rope(RopeFields.read(fields), sizes.rotated)
        layer = LayerConfig(
            num_kv_heads=1,
            head_size=sizes.row,
            intermediate_size=read_int(fields, "intermediate_size"),
            rope=replace(rope, is_interleaved=read_bool(fields, "rope_interleave")),
        )
        config = read_decoder_config(fields, [layer] * read_int(fields, "num_hidden_layers"))
        return replace(config, has_out_bias=read_bool(fields, "attention_bias"))

    def get_kv_spec(self) -> KVSpec:
        """One LayerSpec per layer: one latent row, on every rank."""
        return KVSpec(
            [
                LayerSpec(
                    name=kv.name,
                    num_kv_heads=1,
                    head_size=self.sizes.row,
                    dtype=self._kv_dtype,
                    head_size_v=self.sizes.latent,
                    is_latent=True,
                )
                for kv in self.attention_layers
            ]
        )

    def _build_attention(self, index: int) -> LatentAttention:
        name, sizes, heads = f"model.layers.{index}.self_attn", self.sizes, self.heads[index]
        config, build = self.config, self.build
        rope = config.layers[index].rope
        assert rope is not None  # every layer of this family rotates
        has_bias, hidden = config.has_out_bias, config.hidden_size
        query_down = query_norm = None
        if sizes.query_latent is not None:
            query_down = self._build_down(f"{name}.q_a_proj", sizes.query_latent)
            query_norm = build.norm(f"{name}.q_a_layernorm", sizes.query_latent)
        run = (heads.first_head, heads.first_head + heads.num_heads)
        key_map, value_map = self._build_maps(index, run)
        return LatentAttention(
            kv=self.attention_layers[index],
            sizes=sizes,
            num_heads=heads.num_heads,
            rope=rope,
            scoring=self._scoring,
            query_down=query_down,
            query_norm=query_norm,
            query=build.column_linear(
                f"{name}.q_proj",
                [
                    Rows(
                        f"{name}.{'q_b_proj' if query_down else 'q_proj'}",
                        config.num_heads * sizes.query,
                        *(head * sizes.query for head in run),
                    )
                ],
                sizes.query_latent or hidden,
                has_bias=False,
            ),
            down=self._build_down(f"{name}.kv_a_proj_with_mqa", sizes.row),
            norm=build.norm(f"{name}.kv_a_layernorm", sizes.latent),
            key_map=key_map,
            value_map=value_map,
            out=build.row_linear(
                f"{name}.o_proj",
                (hidden, config.num_heads * sizes.value),
                (run[0] * sizes.value, run[1] * sizes.value),
                has_bias=has_bias,
            ),
        )

    def _build_down(self, name: str, size: int) -> Linear:
        """Hidden states to a row of `size`, the same on every rank."""
        return self.build.column_linear(
            name,
            [Rows(name, size, 0, size)],
            self.config.hidden_size,
            has_bias=self.config.has_out_bias,
        )

    def _build_maps(self, index: int, run: tuple[int, int]) -> tuple[Parameter, Parameter]:
        """The key and value maps of heads [start, stop), which folders store as one matrix.

        GGUF files have them apart: [num_heads, latent, plain] and [num_heads, value, latent].
        """
        sizes, num_heads = self.sizes, self.config.num_heads
        name, num_own = f"model.layers.{index}.self_attn.kv_b_proj", run[1] - run[0]
        own = keep(0, num_heads, run)
        both = sizes.plain + sizes.value

        def source(first: int, stop: int) -> Source:
            by_head = Reshape((num_heads, both, sizes.latent))
            steps = (by_head, *own, Slice(1, first, stop))
            return Source(f"{name}.weight", (num_heads * both, sizes.latent), steps)

        keys, values = source(0, sizes.plain), source(sizes.plain, both)
        keys = replace(keys, steps=(*keys.steps, SwapAxes(1, 2)))
        key_shape, value_shape = (sizes.latent, sizes.plain), (sizes.value, sizes.latent)
        return (
            self.build.stack(
                f"{name}.key",
                (num_own, *key_shape),
                [keys],
                [Source(f"blk.{index}.attn_k_b.weight", (num_heads, *key_shape), own)],
            ),
            self.build.stack(
                f"{name}.value",
                (num_own, *value_shape),
                [values],
                [Source(f"blk.{index}.attn_v_b.weight", (num_heads, *value_shape), own)],
            ),
        )

    def _build_mixture(self, index: int) -> MixtureOfExperts:
        name, sizes = f"model.layers.{index}.mlp", self._expert_sizes
        return MixtureOfExperts(
            router=self.build.whole(f"{name}.gate.weight", (sizes.num_experts, sizes.hidden_size)),
            routing=self._routing,
            experts=self._build_experts(index, f"{name}.experts"),
            shared=self.build_feed_forward(index, "mlp.shared_experts", self._shared_size),
        )

    def _build_experts(self, index: int, name: str) -> Experts:
        """From matrices of their own for every expert."""
        sizes = self._expert_sizes
        inner, hidden = sizes.inner_size, sizes.hidden_size
        gate_up = [
            Source(f"{name}.{expert}.{module}.weight", (inner, hidden), sizes.keep(0))
            for expert in range(sizes.num_experts)
            for module in ("gate_proj", "up_proj")
        ]
        down = [
            Source(f"{name}.{expert}.down_proj.weight", (hidden, inner), sizes.keep(1))
            for expert in range(sizes.num_experts)
        ]
        sources = ExpertSources(gate_up, down)
        return build_experts(self.build, index, sizes, sources, self.config.activation)

    def forward(self, ops: Ops, batch: Batch) -> Value:
        """Logits [num_rows, vocab_size]."""
        eps = self.config.norm_eps
        x = self.embed(ops, batch.token_ids)  # [num_tokens, hidden_size]
        for layer in self.layers:
            h = ops.rms_norm(x, layer.input_norm, eps)
            x = ops.add(x, layer.attention.compute(ops, h, batch.positions))
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = ops.add(x, layer.mlp.compute(ops, h))
        return self.logits(ops, x, batch.logits_rows)


# What both families' configs may leave out.
_COMMON = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}


class DeepseekV2Model(DeepseekModel):
    """Experts by the softmax over all of them, perhaps within the groups that have the best."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_COMMON,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
    }

    @staticmethod
    def read_routing(fields: Mapping[str, Any]) -> Routing:
        """By `topk_method`; the weights are not normalised.

        Raises:
            UnsupportedModelError: another method, or weights that are.
        """
        _check_fixed(fields, "scoring_func", "softmax")
        _check_fixed(fields, "norm_topk_prob", False)
        method = fields.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedModelError(
                f"topk_method {method!r} is not supported; kvloom knows greedy and "
                "group_limited_greedy for model_type 'deepseek_v2'"
            )
        has_groups = method == "group_limited_greedy"
        return Routing(
            read_int(fields, "num_experts_per_tok"),
            score="softmax",
            factor=read_float(fields, "routed_scaling_factor", 1.0),
            num_groups=read_int(fields, "n_group") if has_groups else 1,
            num_chosen_groups=read_int(fields, "topk_group") if has_groups else 1,
        )


class DeepseekV3Model(DeepseekModel):
    """Experts by the sigmoid of each and a bias, within the groups whose two best are best."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_COMMON,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
    }

    @staticmethod
    def read_routing(fields: Mapping[str, Any]) -> Routing:
        """By Hugging Face's fields.

        Raises:
            UnsupportedModelError: another method.
        """
        _check_fixed(fields, "scoring_func", "sigmoid")
        _check_fixed(fields, "topk_method", "noaux_tc")
        return Routing(
            read_int(fields, "num_experts_per_tok", 8),
            score="sigmoid",
            is_normalised=read_bool(fields, "norm_topk_prob", default=True),
            factor=read_float(fields, "routed_scaling_factor", 2.5),
            num_groups=read_int(fields, "n_group", 8),
            num_chosen_groups=read_int(fields, "topk_group", 4),
            group_score="sum_of_two",
        )

    def _build_mixture(self, index: int) -> MixtureOfExperts:
        shape = (self._expert_sizes.num_experts,)
        name = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
        bias = Parameter(
            name,
            shape,
            DType.FLOAT32,
            (Source(name, shape),),
            (Source(f"blk.{index}.exp_probs_b.bias", shape),),
        )
        return replace(super()._build_mixture(index), choice_bias=self.build.add(bias))


def _check_fixed(fields: Mapping[str, Any], name: str, value: Any) -> None:
    """Refuse a field that has another value than the one this family computes."""
    if fields.get(name) not in (None, value):
        raise UnsupportedModelError(
            f"the config sets {name} to {fields[name]!r}; kvloom computes {value!r} for "
            f"model_type {fields.get('model_type')!r}"
        )
