"""Placing BOS and EOS around a text."""

from __future__ import annotations

import tokenizers
from tokenizers import processors


def add_template(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put the tokens `bos` and `eos` around every text; None places nothing."""
    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        backend.post_processor = processors.Sequence([])
        return
    pieces = [piece for piece in (bos, "$A", eos) if piece is not None]
    ids = [(token, backend.token_to_id(token)) for token in tokens]
    backend.post_processor = processors.TemplateProcessing(
        single=pieces, pair=[*pieces, "$B"], special_tokens=ids
    )
