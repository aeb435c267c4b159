"""A model's tokens as llguidance knows them: by their bytes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TextTokenizer(Protocol):
    """What is asked of a `kvloom.tokenizer.Tokenizer`."""

    @property
    def bos_token_id(self) -> int | None:
        """Begins a sequence."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Each of them ends a sequence."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Those that are no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the bytes of a text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""


def make_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> LLTokenizer:
    """What llguidance sees of a tokenizer: the bytes of every token that has a row of logits."""
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_token_ids))


class _Vocabulary:
    """What llguidance asks of a tokenizer: attributes of these names, and how it writes a text."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_token_ids | tokenizer.eos_token_ids
        self.special_token_ids = sorted(i for i in self._special if i < vocab_size)
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of a text that must follow. They are these bytes, or the mask would be wrong.

        A tokenizer may add a space before a text, or take a part of it for a special token.
        """
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        is_text = self._special.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
        if is_text and b"".join(self.tokens[i] for i in ids) == text:
            return ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        ids = []
        while text:
            length = next((n for n in range(len(text), 0, -1) if text[:n] in self._text_ids), 0)
            if length == 0:  # no token begins like this: llguidance finds that out, too
                break
            ids.append(self._text_ids[text[:length]])
            text = text[length:]
        return ids

    @cached_property
    def _text_ids(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self.tokens) if i not in self._special}
