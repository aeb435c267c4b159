"""The tokenizer the engine uses, over a `tokenizers.Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from kvloom.errors import ConfigError, RequestError, UnsupportedModelError
from kvloom.tokenizer.chat import ChatTemplate

# Stands before the tokens when they are decoded and is cut off again: it is text for every decoder,
# and hides the beginning from those that drop the first space of a text.
_BEFORE = "."


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens with a meaning of their own.

    Attributes:
        texts: by the name chat templates know them: bos_token, eos_token, ...
        bos_token_id: begins a sequence; None where the model has none.
        eos_token_ids: each of them ends a sequence.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        bos_token_id: begins a sequence; None where the model has none.
        eos_token_ids: each of them ends a sequence.
        vocab_size: ids are below it; a model may have more rows, as padding.
        has_chat_template: whether `render_chat` works.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: SpecialTokens,
        chat_template: str | None = None,
    ) -> None:
        """`backend` places the special tokens of `encode(..., add_special_tokens=True)`.

        Raises:
            UnsupportedModelError: `backend` cannot turn tokens into text.
        """
        if backend.decoder is None:
            raise UnsupportedModelError(
                "the tokenizer has no decoder, so its tokens cannot become text; save it anew "
                "with one (tokenizers.Tokenizer.decoder)"
            )
        self._backend = backend
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._chat_template = (
            None if chat_template is None else ChatTemplate(chat_template, special_tokens.texts)
        )
        self.bos_token_id = special_tokens.bos_token_id
        self.eos_token_ids = special_tokens.eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.has_chat_template = self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` adds what the model wants around a plain text, such as BOS.

        Raises:
            RequestError: `text` is not valid Unicode (it holds half of a surrogate pair).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt", f"character {error.start} is half of a surrogate pair; send valid Unicode"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids` as it stands within a longer text: a leading space stays.

        Characters whose bytes are not complete become U+FFFD. Ids without a token have no text: a
        model whose vocabulary is padded may sample them.

        Args:
            ids: any run of a sequence.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: one space between two special tokens that are neighbours
                and are kept.
        """
        pieces = [_BEFORE]
        is_after_special = False
        for token_id in ids:
            is_special = token_id in self._special_ids
            if is_special and skip_special_tokens:
                continue
            if is_special and is_after_special and spaces_between_special_tokens:
                pieces.append(" ")
            pieces.append(self._token(token_id))
            is_after_special = is_special
        return str(self._backend.decoder.decode(pieces)).removeprefix(_BEFORE)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text the model was trained to see for `messages`.

        It holds every special token already: encode it with `add_special_tokens=False`.

        Raises:
            ConfigError: the model has no chat template.
            RequestError: the template refuses the messages.
        """
        if self._chat_template is None:
            raise ConfigError("the model has no chat template; use generate with a plain prompt")
        return self._chat_template.render(messages, add_generation_prompt)

    def _token(self, token_id: int) -> str:
        # The library raises OverflowError for what is not a 32-bit number.
        known = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return known or ""
