"""How byte-level vocabularies cut a text before merging: the values of tokenizer.ggml.pre."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """One way to cut.

    Attributes:
        pattern: what is kept together, as a regular expression; None is GPT-2's.
        takes_whole_words: a piece that is a token is taken without applying merges.
        adds_bos: whether BOS is added where the file does not say.
    """

    pattern: str | None = None
    takes_whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    takes_whole_words=True,
    adds_bos=True,
)
_QWEN2 = Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    takes_whole_words=True,
    adds_bos=True,
)

SPLITS = {
    "gpt-2": Split(),
    # SmolLM2 was trained with every digit cut off first. transformers does not do that for a GGUF
    # file, and equal ids in both are worth more than the few strings this changes.
    "smollm": Split(),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
