"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.step import TokenLogprobs
from kvloom.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no -inf


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice, or of a part of it."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, *pair) for pair in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id)
    return {
        "token": token_text(text),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(text),
    }


def token_text(text: bytes) -> str:
    r"""A token's text; one that holds parts of characters is written as bytes:\xe4\xbd."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


class LegacyLogprobs:
    """Builds the `logprobs` of a choice of /v1/completions, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def add_unscored(self, token_id: int) -> dict[str, Any]:
        """The first prompt token: nothing comes before it that could predict it."""
        return self._columns([(self._text(token_id), None, None)])

    def add(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The tokens of `entries`; the chosen token is always among the top ones."""
        rows = []
        for entry in entries:
            top = {self._text(token_id): max(lp, _LOWEST) for token_id, lp in entry.top}
            logprob = max(entry.logprob, _LOWEST)
            text = self._text(entry.token_id)
            top.setdefault(text, logprob)
            rows.append((text, logprob, top))
        return self._columns(rows)

    def _columns(self, rows: Sequence[tuple[str, float | None, Any]]) -> dict[str, Any]:
        offsets = []
        for text, _, _ in rows:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [text for text, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [top for _, _, top in rows],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The columns of `first`, then those of `second`."""
    return {name: first[name] + second[name] for name in first}
