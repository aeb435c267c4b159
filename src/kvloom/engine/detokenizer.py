"""Turns the tokens of one request into text as they come, and ends it at a stop string.

Two things hold text back, each no longer than it must: a character whose bytes are not all there
yet, and text that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvloom.request import SamplingParams

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_MAX_OPEN_BYTES = 3  # of a character that lacks its last; some decoders write U+FFFD for each
_MAX_WINDOW = 16
_NUM_CONTEXT = 8


class Decoder(Protocol):
    """The part of a tokenizer that detokenising needs."""

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    def plain_texts(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """By token id, what a token adds behind whole characters, whatever tokens they are from.

        None where that depends on other tokens.
        """


class IncrementalDetokenizer:
    """The text of one request, the same however its tokens are grouped into pushes.

    A stop string counts once its last character is generated: the one completed first ends the
    text where it begins, or behind it if the user keeps it; of two completed by the same character
    the longer wins. As in vLLM, a stop string completed by one of the first `min_tokens` tokens is
    text like any other. The prompt never takes part in a match; its last tokens only tell the
    decoder whether the first generated token starts a word.

    Attributes:
        num_tokens: tokens consumed, including the one that completed the stop string; those that
            came after it are not counted.
        stop_reason: the stop string that ended the text.
    """

    def __init__(
        self, decoder: Decoder, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._params = params
        self._pieces = _PieceDecoder(decoder, params, prompt_token_ids[-_NUM_CONTEXT:])
        self._held = ""  # what may be the beginning of a stop string
        self._released: list[str] = []

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_reason is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Take generated tokens; returns the text they release. After a stop it is empty."""
        released = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            released.append(self._release(self._pieces.push(token_id)))
        return "".join(released)

    def finish(self) -> str:
        """The generation ended: returns the text that was still held back."""
        if self.is_stopped:
            return ""
        released = self._release(self._pieces.finish())
        if self.is_stopped:
            return released
        held, self._held = self._held, ""
        self._released.append(held)
        return released + held

    def _release(self, new: str) -> str:
        """Add `new` to the text; returns what cannot become part of a stop string any more."""
        if not self._params.stop:
            self._released.append(new)
            return new
        text = self._held + new
        found = self._find_stop(text)
        if found is not None:
            self.stop_reason, begin = found
            is_kept = self._params.include_stop_str_in_output
            end = begin + len(self.stop_reason) if is_kept else begin
        else:
            end = len(text) - max(_overlap(text, stop) for stop in self._params.stop)
        self._held = text[end:]
        self._released.append(text[:end])
        return text[:end]

    def _find_stop(self, text: str) -> tuple[str, int] | None:
        """The stop string completed first within the new part of `text`, and where it begins."""
        if self.num_tokens <= self._params.min_tokens:
            return None
        found = []
        for stop in self._params.stop:
            # What was held contains no stop string that counts, so each must reach beyond it.
            begin = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if not found:
            return None
        _, begin, stop = min(found)
        return stop, begin


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _PieceDecoder:
    """Decodes token by token and never splits a character.

    Most tokens are plain: behind whole characters they add a text of their own, and the tokens
    before them matter no more. The text of others depends on the tokens before them, so a window of
    those is decoded as a whole, and what it says beyond the text already known is new:

        window   [ t t t t t | t t ]     | = num_closed: no character is open up to here
        text     [ known        | open ]  open = trailing U+FFFD that may become a character

    Tokens leave the window on the left, so a push costs the same at any length. Decoders with byte
    tokens (SentencePiece) turn a whole run of them into U+FFFD while its end is incomplete, also
    what was a character before: the window then starts anew behind it.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, context: Sequence[int]) -> None:
        self._decoder = decoder
        self._params = params
        self._plain_texts = decoder.plain_texts(params.skip_special_tokens)
        self._window = list(context)
        self._known = self._decode(self._window)
        self._open = ""
        self._num_closed = len(self._window)

    def push(self, token_id: int) -> str:
        """The text that became final by this token."""
        if not self._open:
            plain = self._plain_texts[token_id]
            if plain is not None:
                self._forget_closed(len(self._window))
                return plain
        self._window.append(token_id)
        text = self._decode(self._window)
        if text and text == self._known + self._open and not self._decode([token_id]):
            self._window.pop()  # a skipped special token: it would push the real context out
            return ""
        if not text.startswith(self._known):
            self._forget_closed(self._num_closed)
            text = self._decode(self._window)
        new = text[len(self._known) : len(text) - _num_open(text)]
        self._known += new
        self._open = text[len(self._known) :]
        self._shorten(is_closed=not text.endswith(_REPLACEMENT))
        return new

    def finish(self) -> str:
        """The text of a character that stays incomplete."""
        rest, self._open = self._open, ""
        return rest

    def _forget_closed(self, num_tokens: int) -> None:
        """Start the window anew behind its first `num_tokens`, whose text is final."""
        if num_tokens:
            del self._window[:num_tokens]
            self._known, self._num_closed = "", 0

    def _shorten(self, is_closed: bool) -> None:
        if is_closed:
            start, self._num_closed = self._num_closed, len(self._window)
        else:
            # Stray bytes, or tokens that end one character and begin the next, without end.
            start = len(self._window) - _NUM_CONTEXT
        if len(self._window) <= _MAX_WINDOW:
            return
        tail = self._decode(self._window[start:])
        if tail.endswith(self._open):
            del self._window[:start]
            self._num_closed = max(0, self._num_closed - start)
            self._known = tail[: len(tail) - len(self._open)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )


def _num_open(text: str) -> int:
    """How many characters at the end of `text` may still become another one."""
    num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
    return min(num_replaced, _MAX_OPEN_BYTES)
