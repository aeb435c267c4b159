"""A model that says what it is told: after a text's last token comes a script, piece by piece.

Layers add nothing (their output projections are zero), so that logits follow from the last token
alone. Every piece of the script is a token of its own, and the head is made so that each piece is
by far the likeliest one after the piece before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tiny_folder import EOS, make_tiny_folder, make_tokenizer

_EOS_ID = 257
_FIRST_ID = 258


def make_scripted_folder(folder: Path, pieces: Sequence[str], template: str) -> Path:
    """After ":" (the last token of the prompts that `template` makes) come `pieces`, then EOS."""
    num_tokens = _FIRST_ID + len(pieces)
    make_tiny_folder(folder, vocab_size=num_tokens, hidden_size=64, max_position_embeddings=2048)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(pieces))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": EOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if "o_proj" in name or "down_proj" in name:
            values[:] = 0.0
        elif "norm" in name:
            values[:] = 1.0
    embeddings = np.random.default_rng(0).standard_normal((num_tokens, 64)).astype(np.float32)
    weights["model.embed_tokens.weight"] = embeddings
    head = np.zeros((num_tokens, 64), np.float32)
    chain = [tokenizer.token_to_id(":"), *range(_FIRST_ID, num_tokens), _EOS_ID]
    for token_id, next_id in pairwise(chain):
        head[next_id] = embeddings[token_id]
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors")
    return folder
