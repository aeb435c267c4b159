"""What beam search is tried on: for tests, and for `scripts/golden_beams`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from tiny_folder import make_tiny_folder
from tiny_hybrids import HYBRID_CASES

_EOS = 257
CHAT = [{"role": "user", "content": "What is the capital of France?"}]

# Config fields. The second model likes one of its end-of-sequence tokens.
BEAM_MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "ends": {"eos_token_id": [154, _EOS]},
    "windows": HYBRID_CASES["gemma3_pattern"] | {"eos_token_id": _EOS},
}


class Case(NamedTuple):
    """A search; the end-of-sequence tokens are the model's."""

    prompt_token_ids: list[int]
    width: int
    max_tokens: int
    length_penalty: float
    eos_token_ids: list[int]


def make_beam_folder(name: str, folder: Path) -> Path:
    """The model of that name."""
    changes = BEAM_MODELS[name] | {"vocab_size": 258, "max_position_embeddings": 256}
    return make_tiny_folder(folder, **changes)


def tiny_cases(name: str) -> list[Case]:
    """Prompts that end at a block's edge and elsewhere; widths and penalties of each kind."""
    rng = random.Random(name)
    eos = BEAM_MODELS[name].get("eos_token_id", _EOS)
    eos_token_ids = eos if isinstance(eos, list) else [eos]
    return [
        Case([rng.randrange(256) for _ in range(length)], width, 12, penalty, eos_token_ids)
        for length, width, penalty in [(3, 3, 1.0), (16, 2, 0.0), (21, 5, 2.0), (32, 8, -1.0)]
    ]
