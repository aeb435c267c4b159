"""Placing BOS and EOS around a text."""

from __future__ import annotations

import tokenizers
from tokenizers import processors

from kvloom.errors import UnsupportedModelError


def add_template(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put the tokens `bos` and `eos` around every text; None places nothing.

    Raises:
        UnsupportedModelError: one of them is not in the vocabulary.
    """
    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        backend.post_processor = processors.Sequence([])
        return
    for token in tokens:
        if backend.token_to_id(token) is None:
            raise UnsupportedModelError(
                f"the tokenizer should place {token!r}, which is not in its vocabulary; correct "
                "tokenizer_config.json, or fetch the model again"
            )
    pieces = [piece for piece in (bos, "$A", eos) if piece is not None]
    ids = [(token, backend.token_to_id(token)) for token in tokens]
    backend.post_processor = processors.TemplateProcessing(
        single=pieces, pair=[*pieces, "$B"], special_tokens=ids
    )
