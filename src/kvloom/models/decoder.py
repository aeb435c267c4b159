"""What decoder families have in common: config, embedding, head, and how layers are put together.

A family's file reads a Hugging Face config into a DecoderConfig, lists the parameters of its layers
and writes their forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvloom.errors import UnsupportedModelError
from kvloom.kv.spec import KVSpec, LayerSpec
from kvloom.models.base import GGUFTensor, Model, ModelDTypes
from kvloom.models.fields import read_bool, read_float, read_int, read_ints
from kvloom.models.layers import ParameterBuilder, Rows
from kvloom.models.modules import FeedForward, SelfAttention
from kvloom.models.parallel import TensorParallelRank, share_heads
from kvloom.models.rope import RopeFields, build_rope, read_max_model_len
from kvloom.ops.base import Activation, Attention, KVLayer, Ops, Parameter, Rope, Value

FULL, SLIDING = "full_attention", "sliding_attention"

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields of related models that change the computation, with the values that leave it alone.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "logits_scaling": (None, 1),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from one layer of a model to the next.

    Attributes:
        num_kv_heads: of the whole model.
        intermediate_size: inner size of the feed-forward.
        rope: None leaves queries and keys as they are.
        window: keys a query sees, its own included; None sees all.
        chunk_size: size of the aligned chunk a query sees; None without chunks.
        shares_kv_with: index of the earlier layer whose KV this one reads; None stores its own.
    """

    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rope: Rope | None
    window: int | None = None
    chunk_size: int | None = None
    shares_kv_with: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The config of a model, before it is cut into ranks.

    Attributes:
        layers: one by one, in order of execution.
        permutes_gguf_heads: whether this family's GGUF files interleave the rows of q and k.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    norm_eps: float
    activation: Activation
    max_model_len: int
    has_tied_head: bool
    layers: tuple[LayerConfig, ...]
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    permutes_gguf_heads: bool = False


def read_decoder_config(
    fields: Mapping[str, Any], layers: Sequence[LayerConfig], computes: Collection[str] = ()
) -> DecoderConfig:
    """The Hugging Face fields that all families share; a family replaces what is its own.

    Args:
        fields: of the config.json.
        layers: see `read_layers`.
        computes: fields among those that other families leave out, which this family honours.

    Raises:
        UnsupportedModelError: a field is missing, or has a value that this code does not compute.
    """
    _check_neutral(fields, computes)
    return DecoderConfig(
        vocab_size=read_int(fields, "vocab_size"),
        hidden_size=read_int(fields, "hidden_size"),
        num_heads=read_int(fields, "num_attention_heads"),
        norm_eps=read_float(fields, "rms_norm_eps", 1e-6),
        activation=read_activation(fields, "hidden_act"),
        max_model_len=read_max_model_len(fields),
        has_tied_head=read_bool(fields, "tie_word_embeddings"),
        layers=tuple(layers),
    )


def read_layers(
    fields: Mapping[str, Any],
    default_head_size: int | None = None,
    rope_of: Callable[[int], Rope] | None = None,
) -> list[LayerConfig]:
    """Layers that are alike; a family replaces what is not.

    Args:
        fields: of the config.json.
        default_head_size: where the config has no head_dim; hidden size by heads if None.
        rope_of: the rope of a head size; None reads the config's one.

    Raises:
        UnsupportedModelError: a field is missing, or has a value that this code does not compute.
    """
    num_heads = read_int(fields, "num_attention_heads")
    num_kv_heads = read_int(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly; check the config"
        )
    if default_head_size is None:
        default_head_size = max(read_int(fields, "hidden_size") // num_heads, 1)
    head_size = read_int(fields, "head_dim", default_head_size)
    rope = rope_of(head_size) if rope_of else build_rope(RopeFields.read(fields), head_size)
    sizes = read_ints(fields, "intermediate_size", read_int(fields, "num_hidden_layers"))
    return [
        LayerConfig(
            num_kv_heads=num_kv_heads, head_size=head_size, intermediate_size=size, rope=rope
        )
        for size in sizes
    ]


def read_window(fields: Mapping[str, Any], default: int = 4096) -> int | None:
    """The keys a query sees; null means all, and a config without the field `default`."""
    if fields.get("sliding_window", default) is None:
        return None
    return read_int(fields, "sliding_window", default)


def read_layer_types(
    fields: Mapping[str, Any], allowed: Collection[str] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    """The attention kind of every layer, by `layer_types`; None without that field.

    Raises:
        UnsupportedModelError: a kind that is not allowed, or not one for each layer.
    """
    num_layers = read_int(fields, "num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        return None
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(not isinstance(kind, str) or kind not in allowed for kind in types):
        raise UnsupportedModelError(
            f"layer_types should name {' or '.join(allowed)} for each of {num_layers} "
            f"layers, not {types!r:.80}"
        )
    return tuple(types)


def read_activation(fields: Mapping[str, Any], name: str, default: str = "silu") -> Activation:
    """The activation that the field `name` names.

    Raises:
        UnsupportedModelError: one that this code does not compute.
    """
    activation = fields.get(name, default)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{name} {activation!r} is not supported; kvloom knows {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[activation]


def _check_neutral(fields: Mapping[str, Any], computes: Collection[str]) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        if name not in computes and fields.get(name) not in neutral:
            raise UnsupportedModelError(
                f"the config sets {name} to {fields[name]!r}, which kvloom does not compute for "
                f"model_type {fields.get('model_type')!r}"
            )


class DecoderModel(Model):
    """Embedding, final norm and head, cut for one rank. Families add layers and `forward`.

    Attributes:
        gguf_names: a module's path below its layer, or in the whole model -> its GGUF name, where
            it differs from, or adds to, `kvloom.models.layers.GGUF_NAMES`.
        fused_modules: a linear operation with parts of several modules, "qkv" or "gate_up" -> the
            one module that has all of them in the family's checkpoints.
        build: declares parameters; families use it for what is their own.
    """

    gguf_names: ClassVar[Mapping[str, str]] = {}
    fused_modules: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, config: DecoderConfig, rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.vocab_size
        self.rank = rank
        self.heads = [
            share_heads(config.num_heads, layer.num_kv_heads, rank) for layer in config.layers
        ]
        self.attention_layers = [
            KVLayer(f"layers.{i}.self_attn") for i in range(len(config.layers))
        ]
        self._kv_dtype = dtypes.kv
        self.build = build = ParameterBuilder(
            rank, dtypes.weights, self.gguf_names, self.fused_modules
        )
        table = (config.vocab_size, config.hidden_size)
        self.first_vocab_row, _ = rank.share(config.vocab_size)
        self.embedding = build.embedding("model.embed_tokens", *table)
        self.norm = self.build_norm("model.norm")
        # Many checkpoints store a tied head as well; it is the embedding once more.
        is_tied = config.has_tied_head
        self.head = self.embedding if is_tied else build.embedding("lm_head", *table)
        self.ignored_tensors = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self.parameters = build.parameters

    # --- what the engine asks ---------------------------------------------------------------

    @property
    def gguf_tensors(self) -> dict[str, GGUFTensor]:
        """The GGUF tensor of each source, by its Hugging Face name."""
        config = self.config
        permuted = {"q_proj": config.num_heads, "k_proj": config.layers[0].num_kv_heads}
        return self.build.gguf_tensors(permuted if config.permutes_gguf_heads else {})

    def get_kv_spec(self) -> KVSpec:
        """One LayerSpec per layer."""
        names = [kv.name for kv in self.attention_layers]
        return KVSpec(
            [
                LayerSpec(
                    name=name,
                    num_kv_heads=heads.num_kv_heads,
                    head_size=layer.head_size,
                    dtype=self._kv_dtype,
                    sliding_window_size=layer.window,
                    chunk_size=layer.chunk_size,
                    shares_kv_with=(
                        None if layer.shares_kv_with is None else names[layer.shares_kv_with]
                    ),
                    num_global_kv_heads=layer.num_kv_heads,
                )
                for name, heads, layer in zip(names, self.heads, self.config.layers, strict=True)
            ]
        )

    # --- what families build their layers of ------------------------------------------------

    def build_norm(self, name: str) -> Parameter:
        """The weight [hidden_size] of a norm; families whose norms weigh by 1 + w say so here."""
        return self.build.norm(name, self.config.hidden_size)

    def build_attention(
        self,
        index: int,
        modules: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        scoring: Attention | None = None,
    ) -> SelfAttention:
        """The attention of a layer.

        Args:
            index: of the layer.
            modules: whose output rows are computed together: q_proj, then KV projections if any.
            scoring: None scales by head_size ** -0.5.
        """
        config, layer, heads = self.config, self.config.layers[index], self.heads[index]
        name, size = f"model.layers.{index}.self_attn", layer.head_size
        query = (config.num_heads, heads.first_head, heads.num_heads)
        stored = (layer.num_kv_heads, heads.first_kv_head, heads.num_kv_heads)

        def head_rows(module: str, total: int, first: int, count: int) -> Rows:
            return Rows(f"{name}.{module}", total * size, first * size, (first + count) * size)

        return SelfAttention(
            kv=self.attention_layers[index],
            heads=heads,
            head_size=size,
            rope=layer.rope,
            scoring=scoring or Attention(scale=size**-0.5),
            qkv=self.build.column_linear(
                f"{name}.qkv",
                [head_rows(m, *(query if m == modules[0] else stored)) for m in modules],
                config.hidden_size,
                has_bias=config.has_qkv_bias,
            ),
            out=self.build.row_linear(
                f"{name}.o_proj",
                (config.hidden_size, config.num_heads * size),
                (heads.first_head * size, (heads.first_head + heads.num_heads) * size),
                has_bias=config.has_out_bias,
            ),
        )

    def build_feed_forward(
        self, index: int, path: str = "mlp", size: int | None = None
    ) -> FeedForward:
        """A dense feed-forward of a layer.

        Args:
            index: of the layer.
            path: of the module, below the layer.
            size: its inner size; None is the layer's.
        """
        config, name = self.config, f"model.layers.{index}.{path}"
        size = size or config.layers[index].intermediate_size
        share = self.rank.share(size)
        return FeedForward(
            gate_up=self.build.column_linear(
                f"{name}.gate_up",
                [Rows(f"{name}.{module}", size, *share) for module in ("gate_proj", "up_proj")],
                config.hidden_size,
                has_bias=config.has_mlp_bias,
            ),
            down=self.build.row_linear(
                f"{name}.down_proj",
                (config.hidden_size, size),
                share,
                has_bias=config.has_mlp_bias,
            ),
            activation=config.activation,
        )

    # --- the ends of the forward pass -------------------------------------------------------

    def embed(self, ops: Ops, token_ids: Value) -> Value:
        """[num_tokens, hidden_size]: each rank looks up its part of the vocabulary."""
        return ops.all_reduce(ops.embedding(token_ids, self.embedding, self.first_vocab_row))

    def logits(self, ops: Ops, x: Value, rows: Value) -> Value:
        """[num_rows, vocab_size] of the named tokens, after the final RMS norm."""
        h = ops.rms_norm(ops.select_rows(x, rows), self.norm, self.config.norm_eps)
        return self.unembed(ops, h)

    def unembed(self, ops: Ops, h: Value) -> Value:
        """[num_rows, vocab_size] of h [num_rows, hidden_size]: each rank computes its part."""
        return ops.all_gather(ops.linear(h, self.head))
