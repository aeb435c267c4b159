"""The decoder that Llama-like families have in common: its config, its parameters, its ends.

A family's file reads its config into a DecoderConfig and writes the layers' forward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.errors import UnsupportedModelError
from kvloom.kv.spec import KVSpec, LayerSpec
from kvloom.models.base import GGUFTensor, Model, ModelDTypes
from kvloom.models.fields import read_bool, read_float, read_int
from kvloom.models.layers import Linear, ParameterBuilder, Rows
from kvloom.models.parallel import HeadShare, TensorParallelRank, share_heads
from kvloom.models.rope import RopeFields, build_rope
from kvloom.ops.base import Activation, KVLayer, Ops, Parameter, Rope, Value

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
class DecoderConfig:
    """The config of a model, before it is cut into ranks.

    Attributes:
        windows: per layer, the keys a query sees, its own included; None sees all.
        permutes_gguf_heads: whether this family's GGUF files interleave the rows of q and k.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    activation: Activation
    rope: Rope
    max_model_len: int
    has_tied_head: bool
    windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    permutes_gguf_heads: bool = False


def read_decoder_config(
    config: Mapping[str, Any], default_head_size: int | None = None
) -> DecoderConfig:
    """The Hugging Face fields that all families share; a family replaces what is its own.

    Raises:
        UnsupportedModelError: a field is missing, or has a value that this code does not compute.
    """
    _check_neutral(config)
    num_heads = read_int(config, "num_attention_heads")
    hidden_size = read_int(config, "hidden_size")
    num_kv_heads = read_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly; check the config"
        )
    head_size = read_int(config, "head_dim", default_head_size or hidden_size // num_heads)
    rope_fields = RopeFields.read(config)
    return DecoderConfig(
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        activation=_read_activation(config),
        rope=build_rope(rope_fields, head_size),
        max_model_len=rope_fields.max_model_len,
        has_tied_head=read_bool(config, "tie_word_embeddings"),
        windows=(None,) * read_int(config, "num_hidden_layers"),
    )


def read_window(config: Mapping[str, Any]) -> int | None:
    """The keys a query sees; null means all, and a config without the field 4096."""
    if config.get("sliding_window", 4096) is None:
        return None
    return read_int(config, "sliding_window", 4096)


def read_layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows per layer of the Qwen families: `layer_types`, else from `max_window_layers` on.

    Raises:
        UnsupportedModelError: a layer type that is neither full nor sliding attention.
    """
    num_layers = read_int(config, "num_hidden_layers")
    window = read_window(config) if read_bool(config, "use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = read_int(config, "max_window_layers", 28, at_least=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise UnsupportedModelError(
            f"layer_types should name full_attention or sliding_attention for each of {num_layers} "
            f"layers, not {types!r:.80}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_neutral(config: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        if config.get(name) not in neutral:
            raise UnsupportedModelError(
                f"the config sets {name} to {config[name]!r}, which kvloom does not compute for "
                f"model_type {config.get('model_type')!r}"
            )


def _read_activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {name!r} is not supported; kvloom knows {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Parameters of one layer, and its KV."""

    kv: KVLayer
    input_norm: Parameter
    qkv: Linear
    out: Linear
    mlp_norm: Parameter
    gate_up: Linear
    down: Linear


class DecoderModel(Model):
    """Embedding, layers and head, cut for one rank. Families add `forward`."""

    def __init__(
        self, config: DecoderConfig, rank: TensorParallelRank, dtypes: ModelDTypes
    ) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.vocab_size
        self.heads = share_heads(config.num_heads, config.num_kv_heads, rank)
        self.scale = config.head_size**-0.5
        self._kv_dtype = dtypes.kv
        self._builder = build = ParameterBuilder(rank, dtypes.weights)
        table = (config.vocab_size, config.hidden_size)
        self.first_vocab_row, _ = rank.share(config.vocab_size)
        self.embedding = build.embedding("model.embed_tokens", *table)
        self.layers = [
            _build_layer(build, config, self.heads, i) for i in range(len(config.windows))
        ]
        self.norm = build.norm("model.norm", config.hidden_size)
        # Many checkpoints store a tied head as well; it is the embedding once more.
        is_tied = config.has_tied_head
        self.head = self.embedding if is_tied else build.embedding("lm_head", *table)
        self.ignored_tensors = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self.parameters = build.parameters
        self.attention_layers = [layer.kv for layer in self.layers]

    @staticmethod
    @abstractmethod
    def read_config(config: Mapping[str, Any]) -> DecoderConfig:
        """The family's DecoderConfig from the fields of a Hugging Face config.json.

        Raises:
            UnsupportedModelError: a field is missing, or has a value this family does not compute.
        """

    @property
    def gguf_tensors(self) -> dict[str, GGUFTensor]:
        """The GGUF tensor of each source, by its Hugging Face name."""
        config = self.config
        permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        return self._builder.gguf_tensors(permuted if config.permutes_gguf_heads else {})

    def get_kv_spec(self) -> KVSpec:
        """One LayerSpec per layer."""
        config = self.config
        return KVSpec(
            [
                LayerSpec(
                    name=layer.kv.name,
                    num_kv_heads=self.heads.num_kv_heads,
                    head_size=config.head_size,
                    dtype=self._kv_dtype,
                    sliding_window_size=window,
                    num_global_kv_heads=config.num_kv_heads,
                )
                for layer, window in zip(self.layers, config.windows, strict=True)
            ]
        )

    def embed(self, ops: Ops, token_ids: Value) -> Value:
        """[num_tokens, hidden_size]: each rank looks up its part of the vocabulary."""
        return ops.all_reduce(ops.embedding(token_ids, self.embedding, self.first_vocab_row))

    def split_heads(self, ops: Ops, qkv: Value) -> tuple[Value, Value, Value]:
        """This rank's q, k, v: each [num_tokens, its heads, head_size]."""
        heads = self.heads
        return ops.split_heads(qkv, heads.num_heads, heads.num_kv_heads, self.config.head_size)

    def feed_forward(self, ops: Ops, layer: DecoderLayer, x: Value) -> Value:
        """X + down(activation(gate(norm x)) * up(norm x)): [num_tokens, hidden_size]."""
        h = ops.rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps)
        h = ops.gated_activation(ops.linear(h, *layer.gate_up), self.config.activation)
        return ops.add(x, ops.all_reduce(ops.linear(h, *layer.down)))

    def logits(self, ops: Ops, x: Value, rows: Value) -> Value:
        """[num_rows, vocab_size] of the named tokens: each rank computes its part."""
        x = ops.rms_norm(ops.select_rows(x, rows), self.norm, self.config.rms_norm_eps)
        return ops.all_gather(ops.linear(x, self.head))


def _build_layer(
    build: ParameterBuilder, config: DecoderConfig, heads: HeadShare, index: int
) -> DecoderLayer:
    name = f"model.layers.{index}"
    size, hidden = config.head_size, config.hidden_size

    def head_rows(module: str, total: int, first: int, count: int) -> Rows:
        module = f"{name}.self_attn.{module}"
        return Rows(module, total * size, first * size, (first + count) * size)

    kv_rows = (config.num_kv_heads, heads.first_kv_head, heads.num_kv_heads)
    mlp_share = build.rank.share(config.intermediate_size)
    return DecoderLayer(
        kv=KVLayer(f"layers.{index}.self_attn"),
        input_norm=build.norm(f"{name}.input_layernorm", hidden),
        qkv=build.column_linear(
            f"{name}.self_attn.qkv",
            [
                head_rows("q_proj", config.num_heads, heads.first_head, heads.num_heads),
                head_rows("k_proj", *kv_rows),
                head_rows("v_proj", *kv_rows),
            ],
            hidden,
            has_bias=config.has_qkv_bias,
        ),
        out=build.row_linear(
            f"{name}.self_attn.o_proj",
            (hidden, config.num_heads * size),
            (heads.first_head * size, (heads.first_head + heads.num_heads) * size),
            has_bias=config.has_out_bias,
        ),
        mlp_norm=build.norm(f"{name}.post_attention_layernorm", hidden),
        gate_up=build.column_linear(
            f"{name}.mlp.gate_up",
            [
                Rows(f"{name}.mlp.{module}", config.intermediate_size, *mlp_share)
                for module in ("gate_proj", "up_proj")
            ],
            hidden,
            has_bias=config.has_mlp_bias,
        ),
        down=build.row_linear(
            f"{name}.mlp.down_proj",
            (hidden, config.intermediate_size),
            mlp_share,
            has_bias=config.has_mlp_bias,
        ),
    )
