"""The Gemma families: what their configs say, where their tensors are, and what they refuse."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES

from kvloom.dtypes import DType
from kvloom.errors import UnsupportedModelError, WeightsError
from kvloom.models.base import Model, ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import Rope
from kvloom.ops.reference import ReferenceBackend
from kvloom.weights.loader import load_weights
from memory_checkpoint import MemoryCheckpoint
from tiny_hybrids import HYBRID_CASES
from tiny_models import TinyRunner, build_loaded, make_token_ids, make_weights, tensor_shapes

CONFIGS = Path(__file__).parent.parent / "data" / "model_configs"
BACKEND = ReferenceBackend()
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA2, GEMMA3, GEMMA3N, GEMMA4 = (
    HYBRID_CASES[case] for case in ("gemma2", "gemma3_pattern", "gemma3n", "gemma4")
)


def build(config: dict[str, Any], **changes: Any) -> Model:
    dtypes = ModelDTypes(DType.BFLOAT16, DType.BFLOAT16)
    return build_model({**config, **changes}, TensorParallelRank(), dtypes)


def published(name: str) -> Model:
    return build(json.loads((CONFIGS / f"{name}.json").read_text()))


def windows(model: Model) -> list[int | None]:
    return [layer.sliding_window_size for layer in model.get_kv_spec().layers]


def ropes(model: Model) -> list[Rope]:
    return [layer.rope for layer in model.config.layers]  # type: ignore[attr-defined]


# --- published configs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "heads", "counts"),
    [
        ("gemma-2-9b", (8, 256), {4096: 21, None: 21}),
        ("gemma-3-270m", (1, 256), {512: 15, None: 3}),
        ("gemma-3-27b-text", (16, 128), {1024: 52, None: 10}),  # layers 5, 11, ... 59 are full
        ("gemma-3n-e4b-text", (2, 256), {512: 28, None: 7}),
        ("mistral-7b-v0.1", (8, 128), {4096: 32}),
    ],
)
def test_layers_of_published_models(
    name: str, heads: tuple[int, int], counts: dict[int | None, int]
) -> None:
    layers = published(name).get_kv_spec().layers
    assert {(layer.num_kv_heads, layer.head_size) for layer in layers} == {heads}
    assert Counter(layer.sliding_window_size for layer in layers) == counts


def test_the_last_layers_of_gemma_3n_read_what_the_last_ones_before_them_stored() -> None:
    layers = published("gemma-3n-e4b-text").get_kv_spec().layers
    assert {layer.shares_kv_with for layer in layers[:20]} == {None}
    for layer in layers[20:]:
        target = 18 if layer.sliding_window_size else 19
        assert layer.shares_kv_with == f"layers.{target}.self_attn"


def test_published_parameter_counts() -> None:
    """By hand from the published shapes: embedding, layers, final norm."""
    attention, mlp = 640 * 256 * (4 + 1 + 1 + 4), 3 * 640 * 2048
    small = 262144 * 640 + 18 * (attention + mlp + 4 * 640 + 2 * 256) + 640
    attention, mlp = 3584 * 256 * (16 + 8 + 8 + 16), 3 * 3584 * 14336
    large = 256000 * 3584 + 42 * (attention + mlp + 4 * 3584) + 3584
    for name, count in (("gemma-3-270m", small), ("gemma-2-9b", large)):
        num_bytes = sum(parameter.num_bytes for parameter in published(name).parameters)
        assert num_bytes == 2 * count


def test_the_size_of_gemma_3n() -> None:
    """By hand from the published shapes; streams, low ranks and inputs per layer included."""
    hidden, inner, num_layers, small = 2048, 16384, 35, 256
    query_and_out, key_and_value = 2 * hidden * 8 * 256 + 256, 2 * hidden * 2 * 256 + 256
    altup = 2 * hidden + 4 * hidden + 4 * 16 + 4 * 4
    laurel = 2 * hidden * 64 + hidden
    per_layer_gate = 2 * hidden * small + hidden
    layer = query_and_out + 3 * hidden * inner + altup + laurel + per_layer_gate + 4 * hidden
    table = (262144 + hidden) * num_layers * small + small
    streams = 2 * 3 * hidden * hidden
    total = 262400 * hidden + num_layers * layer + 20 * key_and_value + table + streams + hidden
    model = published("gemma-3n-e4b-text")
    assert sum(parameter.num_bytes for parameter in model.parameters) == 2 * total


# --- attention kinds and ropes ----------------------------------------------------------------


def test_patterns_of_layers() -> None:
    assert windows(build(GEMMA2)) == [7, None, 7, None]
    assert windows(build(GEMMA2, sliding_window=None)) == [None] * 4
    assert windows(build(GEMMA3, num_hidden_layers=6)) == [7, 7, None] * 2
    without = {k: v for k, v in GEMMA3.items() if k != "sliding_window_pattern"}
    assert windows(build(without, num_hidden_layers=7)) == [7] * 5 + [None, 7]
    types = [FULL, SLIDING, FULL, FULL]
    assert windows(build(GEMMA3, layer_types=types)) == [None, 7, None, None]
    no_window = {k: v for k, v in GEMMA2.items() if k != "sliding_window"}
    assert windows(build(no_window))[0] == 4096


def test_the_last_layer_of_gemma_4_is_full() -> None:
    assert windows(build(GEMMA4, layer_types=[SLIDING] * 6)) == [7] * 5 + [None]


def test_full_layers_alone_are_scaled() -> None:
    def plain(theta: float) -> list[float]:
        return [theta ** (-2 * i / 16) for i in range(8)]

    scaling = {"rope_type": "linear", "factor": 4.0}
    bases = {"rope_theta": 500.0, "rope_local_base_freq": 20.0}
    old = ropes(build(GEMMA3, rope_scaling=scaling, **bases))
    settings = {
        FULL: {**scaling, "rope_theta": 500.0},
        SLIDING: {"rope_type": "default", "rope_theta": 20.0},
    }
    unset = dict.fromkeys(bases)
    assert old == ropes(build(GEMMA3, rope_parameters=settings, **unset))
    assert old[0].inv_freq == pytest.approx(plain(20.0))
    assert old[2].inv_freq == pytest.approx([f / 4.0 for f in plain(500.0)])
    defaults = ropes(build(GEMMA3, **unset))
    assert defaults[0].inv_freq == pytest.approx(plain(1e4))
    assert defaults[2].inv_freq == pytest.approx(plain(1e6))


def test_images_that_are_seen_both_ways_change_no_text() -> None:
    spec = build(GEMMA4).get_kv_spec()
    assert build(GEMMA4, use_bidirectional_attention="vision").get_kv_spec() == spec


def test_heads_of_gemma_4_differ_by_layer() -> None:
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    layers = build(GEMMA4, **changes).get_kv_spec().layers
    heads = [(layer.num_kv_heads, layer.head_size) for layer in layers]
    assert heads == [(2, 16), (2, 16), (1, 32)] * 2
    # Newer configs say the same layer by layer.
    own = {"head_dim": 32, "num_key_value_heads": 1}
    by_layer = build(GEMMA4, per_layer_config={"2": own, "5": own}).get_kv_spec().layers
    assert by_layer == layers
    # A quarter of the larger heads' pairs turn.
    turning = ropes(build(GEMMA4))[2].inv_freq
    assert turning == pytest.approx([500.0 ** (-2 * i / 32) for i in range(4)] + [0.0] * 12)


# --- weights ----------------------------------------------------------------------------------


def in_gguf(model: Model) -> set[str]:
    names = {tensor.name for tensor in model.gguf_tensors.values()}
    own = {s.name for p in model.parameters for s in p.gguf_sources or ()}
    return names | own


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("gemma2", MODEL_ARCH.GEMMA2),
        ("gemma3_pattern", MODEL_ARCH.GEMMA3),
        ("gemma3n", MODEL_ARCH.GEMMA3N),
        ("gemma4_shared", MODEL_ARCH.GEMMA4),
        ("gemma4_experts", MODEL_ARCH.GEMMA4),
    ],
)
def test_gguf_names_are_those_of_the_format(case: str, architecture: MODEL_ARCH) -> None:
    """The names that the gguf package lists for an architecture."""
    listed = [TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[architecture]]
    num_layers = HYBRID_CASES[case]["num_hidden_layers"]
    known = {name.format(bid=i) for name in listed for i in range(num_layers)}
    found = {name.rpartition(".")[0] for name in in_gguf(build(HYBRID_CASES[case]))}
    assert found <= known
    if case in ("gemma2", "gemma3_pattern"):
        assert known - found <= {"output"}  # the head is tied


@pytest.mark.parametrize("case", ["gemma2", "gemma3_pattern"])
def test_norms_weigh_by_one_more_than_folders_say_and_as_files_say(case: str) -> None:
    config = HYBRID_CASES[case]
    weights = make_weights(tensor_shapes(config))
    folder = build_loaded(config, BACKEND)
    by_gguf_name = {
        (s.name if p.gguf_sources is None else p.gguf_sources[0].name): weights[s.name]
        + (1 if "norm" in s.name else 0)
        for p in folder.parameters
        for s in p.sources
    }
    names = {hf: tensor.name for hf, tensor in folder.gguf_tensors.items()}
    tensors = {names.get(name, name): array for name, array in by_gguf_name.items()}
    file = build_model(config, TensorParallelRank(), ModelDTypes(DType.FLOAT32, DType.FLOAT32))
    load_weights(file, MemoryCheckpoint(tensors, metadata={}), BACKEND.pack)
    for ours, theirs in zip(file.parameters, folder.parameters, strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)
        if "norm" in ours.name:
            source = ours.sources[0].name
            np.testing.assert_array_equal(ours.value, weights[source] + np.float32(1))


@pytest.mark.parametrize("case", ["gemma3n", "gemma4_shared"])
def test_kv_weights_of_layers_that_share_kv_are_not_missed_nor_read(case: str) -> None:
    """Published checkpoints have them."""
    config = HYBRID_CASES[case]
    model = build_loaded(config, BACKEND)
    weights = make_weights(tensor_shapes(config))
    unread = {
        f"model.layers.5.self_attn.{module}.weight": np.zeros(1, np.float32)
        for module in ("k_proj", "v_proj", "k_norm")
    }
    assert not unread.keys() & weights.keys()
    load_weights(model, MemoryCheckpoint({**weights, **unread}), BACKEND.pack)
    model.unused_tensors = ()
    with pytest.raises(WeightsError, match=r"no use for tensor model.layers.5.self_attn.k_norm"):
        load_weights(model, MemoryCheckpoint({**weights, **unread}), BACKEND.pack)


# --- what changes the computation shows -------------------------------------------------------

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("gemma2", {"sliding_window": 8}),
    "score cap": ("gemma2", {"attn_logit_softcapping": 3.0}),
    "logit cap": ("gemma2", {"final_logit_softcapping": 6.0}),
    "query scale": ("gemma2", {"query_pre_attn_scalar": 16}),
    "local base": ("gemma3_pattern", {"rope_local_base_freq": 30.0}),
    "global base": ("gemma3_pattern", {"rope_theta": 600.0}),
    "sparsity": ("gemma3n", {"activation_sparsity_pattern": [0.0] * 6}),
    "active stream": ("gemma3n", {"altup_active_idx": 1}),
    "output scale": ("gemma3n", {"altup_correct_scale": False}),
    "experts": ("gemma4_experts", {"top_k_experts": 3}),
    "mistral's window": ("mistral_window", {"sliding_window": 8}),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_field_has_its_part_in_the_logits(kind: str) -> None:
    case, changes = CHANGES[kind]
    ids = make_token_ids(case)
    logits = [
        TinyRunner(build_loaded(config, BACKEND), BACKEND).step(ids)
        for config in (HYBRID_CASES[case], HYBRID_CASES[case] | changes)
    ]
    assert np.abs(logits[0] - logits[1]).max() > 0.01


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "layer types": (GEMMA2, {"layer_types": [FULL] * 3}, "layer_types should name"),
    "chunks": (GEMMA3, {"layer_types": ["chunked_attention"] * 4}, "layer_types should name"),
    "score cap of gemma 3": (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "both ways": (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "cap as text": (GEMMA2, {"final_logit_softcapping": "30"}, "final_logit_softcapping should be"),
    "activation": (GEMMA3, {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
    "flat rope": (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters should have"),
    "inner sizes": (GEMMA3N, {"intermediate_size": [40] * 5}, "one value per layer, 6 in all"),
    "sparsities": (GEMMA3N, {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
    "all sparse": (GEMMA3N, {"activation_sparsity_pattern": [1.0] * 6}, "from 0 to below 1"),
    "all shared": (GEMMA3N, {"num_kv_shared_layers": 6}, "leaves no layer that stores the KV"),
    "none of a kind": (GEMMA3N, {"num_kv_shared_layers": 5}, "the KV of full_attention"),
    "all both ways": (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_att"),
    "no experts": (GEMMA4, {"enable_moe_block": True}, "num_experts should be"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_computed_is_refused(kind: str) -> None:
    config, changes, message = REFUSALS[kind]
    build(config)  # the twin that works
    with pytest.raises(UnsupportedModelError, match=message):
        build(config, **changes)
