"""The tokenizer the engine uses, over a `tokenizers.Tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tokenizers

from kvloom.errors import ConfigError, UnsupportedModelError
from kvloom.request import check_unicode
from kvloom.tokenizer.bytes import BYTE_OF_CHARACTER as _BYTES
from kvloom.tokenizer.chat import ChatOptions, ChatTemplate

# Stands before the tokens when they are decoded and is cut off again: it is text for every decoder,
# and hides the beginning from those that drop the first space of a text.
_BEFORE = "."
_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet

# The steps of decoders that join the texts of tokens, but for the bytes of a character.
_JOINING = {
    ("ByteLevel",),
    ("Metaspace",),
    ("Replace", "ByteFallback", "Fuse"),
    ("Replace", "ByteFallback", "Fuse", "Strip"),
}


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
        special_token_ids: those that are no text.
        vocab_size: ids are below it; a model may have more rows, as padding.
        chat_template: how a conversation becomes a prompt; None where the model has none.
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
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._joins_texts = _joins_texts(backend.decoder)
        self._plain_texts = {
            skips: _PlainTexts(partial(self._plain_text, skip_special_tokens=skips))
            for skips in (False, True)
        }
        self._is_byte_level = "ByteLevel" in str(backend.decoder)
        self.chat_template = (
            None if chat_template is None else ChatTemplate(chat_template, special_tokens.texts)
        )
        self.bos_token_id = special_tokens.bos_token_id
        self.eos_token_ids = special_tokens.eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.has_chat_template = self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` adds what the model wants around a plain text, such as BOS.

        Raises:
            RequestError: `text` is not valid Unicode (it holds half of a surrogate pair).
        """
        check_unicode("prompt", text)
        # Unlike `encode`, a batch lets other threads run meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

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
            is_special = token_id in self.special_token_ids
            if is_special and skip_special_tokens:
                continue
            if is_special and is_after_special and spaces_between_special_tokens:
                pieces.append(" ")
            pieces.append(self._token(token_id))
            is_after_special = is_special
        return str(self._backend.decoder.decode(pieces)).removeprefix(_BEFORE)

    def plain_texts(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """By token id, what a token adds behind whole characters, whatever tokens they are from.

        None where that depends on other tokens: parts of a character, special tokens that are kept,
        and all tokens of a decoder that does not simply join their texts. Filled as it is read.
        """
        return self._plain_texts[skip_special_tokens]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> str:
        """The prompt text the model was trained to see for `messages`.

        It holds every special token already: encode it with `add_special_tokens=False`.

        Raises:
            ConfigError: the model has no chat template.
            RequestError: the template refuses the messages or the options.
        """
        if self.chat_template is None:
            raise ConfigError("the model has no chat template; use generate with a plain prompt")
        return self.chat_template.render(messages, options or ChatOptions())

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the bytes of a text: maybe only a part of a character."""
        token = self._token(token_id)
        if self._is_byte_level and token_id not in self.special_token_ids:
            known = [_BYTES.get(character) for character in token]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
        elif len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">"):
            with suppress(ValueError):
                return bytes([int(token[3:5], 16)])
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _plain_text(self, token_id: int, skip_special_tokens: bool) -> str | None:
        is_kept_special = token_id in self.special_token_ids and not skip_special_tokens
        if is_kept_special or not self._joins_texts:
            return None
        text = self.decode([token_id], skip_special_tokens)
        return None if _REPLACEMENT in text else text

    def _token(self, token_id: int) -> str:
        # The library raises OverflowError for what is not a 32-bit number.
        known = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return known or ""


class _PlainTexts(dict[int, "str | None"]):
    """`Tokenizer.plain_texts`, each found out when it is first asked for."""

    def __init__(self, find: Callable[[int], str | None]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text


def _joins_texts(decoder: Any) -> bool:
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    # What is stripped from the end of a text belongs there as soon as another token follows.
    strips_end = any(step.get("stop") for step in steps)
    return tuple(step["type"] for step in steps) in _JOINING and not strips_end
