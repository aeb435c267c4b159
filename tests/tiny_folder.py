"""A whole tiny model on disk: config, random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from kvloom import SamplingParams
from tiny_models import BASE, make_weights, tensor_shapes

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, then BOS (256) and EOS (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def make_tiny_folder(folder: Path, **changes: Any) -> Path:
    """A llama of 2 layers and 258 tokens; `changes` are config fields."""
    config = {
        "model_type": "llama",
        **BASE,
        "vocab_size": 258,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(make_weights(tensor_shapes(config)), folder / "model.safetensors")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE})
    )
    return folder


def greedy(**changes: object) -> SamplingParams:
    """Eight tokens, always the most likely ones."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes)
