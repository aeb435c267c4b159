"""Prompts as text, of an exact number of tokens, never the same twice."""

from __future__ import annotations

import random
import re
from typing import Protocol

# One token each, whatever stands beside it: the tokenizer splits before spaces.
WORD = re.compile(r" [a-z]{3,}")


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
        prompts = []
        for first in first_words:
            text = first + "".join(rng.choices(self._words, k=num_tokens - 1 - self._num_special))
            num_made = len(self._tokenizer.encode(text, add_special_tokens=True))
            if num_made != num_tokens:
                raise ValueError(f"a prompt made to have {num_tokens} tokens has {num_made}")
            prompts.append(text)
        return prompts
