"""Prompts as text, of an exact number of tokens, never the same twice."""

from __future__ import annotations

import random
import re
from typing import Protocol

# One token each, nearly always: a few tokenizers merge some of them across the space between.
WORD = re.compile(r" [a-z]{3,}")
WORDS_AT_ONCE = 32
MAX_DRAWS = 20


class TextTokenizer(Protocol):
    """What is asked of a tokenizer."""

    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids."""

    def decode(self, ids: list[int]) -> str:
        """Text as it stands within a longer one."""


class PromptMaker:
    """Draws words that are one token each."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        texts = (tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size))
        self._num_special = len(tokenizer.encode("", add_special_tokens=True))  # BOS, for one
        self._words = [text for text in texts if WORD.fullmatch(text)]
        if len(self._words) < 100:
            raise ValueError("the tokenizer has too few tokens that are words with a space before")

    def make(self, num_prompts: int, num_tokens: int, seed: str) -> list[str]:
        """`num_prompts` texts of `num_tokens` tokens, counting those that every text begins with.

        The seed stands for all of them. The first words differ, so that no two prompts share a
        prefix beyond those tokens.
        """
        rng = random.Random(seed)
        first_words = rng.sample(self._words, num_prompts)
        return [self._lengthen(first, num_tokens, rng) for first in first_words]

    def _lengthen(self, text: str, num_tokens: int, rng: random.Random) -> str:
        """`text`, which is a word, and more words after it: `num_tokens` tokens in all."""
        num_made = self._num_special + 1
        while num_made < num_tokens:
            num_more = min(WORDS_AT_ONCE, num_tokens - num_made)
            num_made += num_more
            text = self._append(text, num_more, num_made, rng)
        return text

    def _append(self, text: str, num_words: int, num_tokens: int, rng: random.Random) -> str:
        """`text` and words after it that merge with nothing: `num_tokens` tokens in all."""
        for _ in range(MAX_DRAWS):
            longer = text + "".join(rng.choices(self._words, k=num_words))
            num_made = len(self._tokenizer.encode(longer, add_special_tokens=True))
            if num_made == num_tokens:
                return longer
        raise ValueError(f"a prompt made to have {num_tokens} tokens has {num_made}")
