"""Tokenizers of GGUF files: vocabulary, merges and scores stand in the metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from kvloom.errors import UnsupportedModelError
from kvloom.tokenizer.bytes import byte_alphabet
from kvloom.tokenizer.post_processor import add_template
from kvloom.tokenizer.splits import SPLITS, Split
from kvloom.tokenizer.tokenizer import SpecialTokens, Tokenizer

Metadata = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece writes a space
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# What each key has to be where it is there: the types, and whether it is a list of them.
_KINDS: dict[str, tuple[tuple[type, ...], bool]] = {
    **dict.fromkeys(_SPECIAL_KEYS.values(), ((int,), False)),
    "tokenizer.ggml.pre": ((str,), False),
    "tokenizer.ggml.tokens": ((str,), True),
    "tokenizer.ggml.token_type": ((int,), True),
    "tokenizer.ggml.scores": ((float, int), True),
    "tokenizer.ggml.merges": ((str,), True),
    "tokenizer.ggml.add_bos_token": ((bool,), False),
    "tokenizer.ggml.add_eos_token": ((bool,), False),
    "tokenizer.ggml.add_space_prefix": ((bool,), False),
    "tokenizer.chat_template": ((str,), False),
}


def tokenizer_from_gguf(metadata: Metadata, eos_token_ids: frozenset[int]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    Raises:
        UnsupportedModelError: no tokenizer, a kind that is not known, or a damaged one.
    """
    _check_kinds(metadata)
    if "tokenizer.ggml.tokens" not in metadata:
        raise UnsupportedModelError(
            "the GGUF file carries no tokenizer (tokenizer.ggml.tokens); use a whole model file"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        split = _split_of(metadata)
        backend, adds_bos = _byte_level(metadata, tokens, split), split.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens), True
    else:
        raise UnsupportedModelError(
            f"GGUF tokenizer {kind!r} is not supported; those that are: 'gpt2', 'llama'"
        )
    texts = _special_texts(metadata, tokens)
    _add_tokens(backend, metadata, tokens, texts.values())
    add_template(
        backend,
        bos=texts.get("bos_token") if _flag(metadata, "add_bos_token", adds_bos) else None,
        eos=texts.get("eos_token") if _flag(metadata, "add_eos_token", False) else None,
    )
    special = SpecialTokens(texts, metadata.get(_SPECIAL_KEYS["bos_token"]), eos_token_ids)
    return Tokenizer(backend, special, metadata.get("tokenizer.chat_template"))


def _check_kinds(metadata: Metadata) -> None:
    for key in _KINDS.keys() & metadata.keys():
        types, is_list = _KINDS[key]
        value = metadata[key]
        items = value if is_list else [value]
        if isinstance(value, list) != is_list or not set(map(type, items)) <= set(types):
            wanted = ("a list of " if is_list else "") + types[0].__name__
            raise UnsupportedModelError(
                f"GGUF metadata {key} = {value!r:.80} should be {wanted}; convert the model again"
            )


def _special_texts(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    texts = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise UnsupportedModelError(
                f"GGUF metadata {key} = {token_id} is outside the vocabulary of {len(tokens)} "
                "tokens; convert the model again"
            )
        texts[name] = tokens[token_id]
    return texts


def _flag(metadata: Metadata, name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))


def _split_of(metadata: Metadata) -> Split:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in SPLITS:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"those that are: {', '.join(SPLITS)}"
        )
    return SPLITS[name]


def _byte_level(metadata: Metadata, tokens: Sequence[str], split: Split) -> tokenizers.Tokenizer:
    """BPE over bytes, each written as a printable character."""
    alphabet = byte_alphabet()
    vocab = {_spell(token, alphabet): token_id for token_id, token in enumerate(tokens)}
    merges = _stored_merges(metadata) or []
    backend = _merging(vocab, merges, ignore_merges=split.takes_whole_words)
    if split.pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merging(
    vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # noqa: BLE001 - all the library raises for a merge of no tokens
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is damaged ({error}); convert the model again"
        ) from None


def _spell(token: str, alphabet: Sequence[str]) -> str:
    """A token in the byte alphabet; special tokens may be stored as plain text."""
    if set(token) <= set(alphabet):
        return token
    return "".join(alphabet[byte] for byte in token.encode("utf-8"))


def _stored_merges(metadata: Metadata) -> list[tuple[str, str]] | None:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        return None
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _sentencepiece(metadata: Metadata, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """BPE over characters with a fallback to bytes, the way SentencePiece merges."""
    scores: Sequence[float] = metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    if str(metadata.get("general.architecture")).startswith("gemma"):
        # Gemma's files write runs of spaces as such, and their scores do not follow the order of
        # merges; the order of tokens does.
        tokens = [_SPACE * len(t) if t.isspace() and " " in t else t for t in tokens]
        scores = range(0, -len(tokens), -1)
    if len(scores) != len(tokens):
        raise UnsupportedModelError(
            f"GGUF metadata tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} "
            "tokens; convert the model again"
        )
    merges = _stored_merges(metadata) or _merges_by_score(tokens, scores)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = _special_texts(metadata, tokens).get("unk_token")
    backend = _merging(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    has_prefix = _flag(metadata, "add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if has_prefix else "never", split=False
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens, best score first, then longest left part first."""
    known = set(tokens)
    cuts = [
        (-score, -cut, token)
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    cuts.sort(key=lambda cut: cut[:2])
    return [(token[:-minus], token[-minus:]) for _, minus, token in cuts]


def _add_tokens(
    backend: tokenizers.Tokenizer, metadata: Metadata, tokens: Sequence[str], named: Iterable[str]
) -> None:
    """Make control, user-defined and `named` tokens stay whole where a text contains them."""
    special = dict.fromkeys(named)
    user_defined = []
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if kind == _CONTROL:
            special[token] = None
        elif kind == _USER_DEFINED:
            user_defined.append(token)
    # One that the vocabulary spells differently (bytes outside the byte alphabet, runs of spaces)
    # is merged like any other; adding it would make a new id.
    for texts, is_special in ((special, True), (user_defined, False)):
        backend.add_tokens(
            [
                AddedToken(text, normalized=False, special=is_special)
                for text in texts
                if backend.token_to_id(text) is not None
            ]
        )
