"""What encode and decode promise, on small tokenizers made here."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvloom.errors import ConfigError, RequestError, UnsupportedModelError
from kvloom.tokenizer import Tokenizer
from kvloom.tokenizer.chat import ChatOptions
from kvloom.tokenizer.tokenizer import SpecialTokens

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> tokenizers.Tokenizer:
    """One token per byte, then <a> and <b> (special) and <c> (not special)."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(ALPHABET)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<a>", "<b>"])
    backend.add_tokens([AddedToken("<c>", normalized=False)])
    return backend


A, B, C = 256, 257, 258


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), SpecialTokens({"bos_token": "<a>"}, A, frozenset({A, B})))


def test_attributes(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (A, {A, B})
    assert tokenizer.vocab_size == 259
    assert not tokenizer.has_chat_template


def test_special_tokens_in_a_text_are_recognised(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<a><c>", add_special_tokens=False) == [A, C]


@pytest.mark.parametrize("text", ["", " ", "  a  b ", "\n\t\r", "naïve 😀 日本", "\x00\x1f\ufeff"])
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_decoding_piece_by_piece_is_decoding_the_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("  two  spaces. ", add_special_tokens=False)
    assert "".join(tokenizer.decode([one]) for one in ids) == "  two  spaces. "


def test_incomplete_characters_become_replacements(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    assert "\ufffd" in tokenizer.decode(ids[:3])
    assert tokenizer.decode(ids) == "😀"


@pytest.mark.parametrize(
    ("skips", "has_spaces", "expected"),
    [
        (True, True, "x<c>y"),
        (True, False, "x<c>y"),
        (False, False, "<a><b>x<a><c>y<b>"),
        (False, True, "<a> <b>x<a><c>y<b>"),
    ],
)
def test_special_tokens_in_decoding(
    tokenizer: Tokenizer, skips: bool, has_spaces: bool, expected: str
) -> None:
    ids = tokenizer.encode("<a><b>x<a><c>y<b>", add_special_tokens=False)
    assert tokenizer.decode(ids, skips, has_spaces) == expected


@pytest.mark.parametrize("token_id", [-1, 259, 2**40])
def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer, token_id: int) -> None:
    [x] = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.decode([x, token_id, x]) == "xx"


@pytest.mark.parametrize("has_spaces", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_plain_texts_are_what_tokens_add_to_any_text(
    tokenizer: Tokenizer, skips: bool, has_spaces: bool
) -> None:
    plain = tokenizer.plain_texts(skips)
    [x] = tokenizer.encode("x", add_special_tokens=False)
    [*_, last_of_pair] = tokenizer.encode("é", add_special_tokens=False)
    texts = [tokenizer.decode(ids, skips, has_spaces) for ids in ([], [x], [x, A], [C, x, x])]
    longer = [
        [tokenizer.decode([*ids, one], skips, has_spaces) for ids in ([], [x], [x, A], [C, x, x])]
        for one in range(260)  # the last has no token
    ]
    for one, whole in enumerate(longer):
        if plain[one] is not None:
            assert whole == [text + plain[one] for text in texts]
    assert (plain[x], plain[C], plain[259]) == ("x", "<c>", "")
    assert plain[last_of_pair] is None
    assert plain[A] == ("" if skips else None)


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.ByteLevel(), "ab"),
        (decoders.Metaspace(), "ab"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback()]), None),
        (decoders.CTC(), None),  # "aa" may be one a
        (decoders.BPEDecoder(), None),  # the last word has no space behind it
        (decoders.WordPiece(), None),
        (
            decoders.Sequence(
                [
                    decoders.Replace("_", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 0, 1),
                ]
            ),
            None,
        ),
    ],
)
def test_tokens_are_plain_where_their_texts_are_simply_joined(
    decoder: object, expected: str | None
) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"ab": 0}, "ab"))
    backend.decoder = decoder
    assert Tokenizer(backend, SpecialTokens()).plain_texts(True)[0] == expected


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt: character 1 is half"):
        tokenizer.encode("a\ud83d", add_special_tokens=True)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(prepend_scheme="always"),
        decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    ],
    ids=["metaspace", "strip"],
)
def test_a_leading_space_stays_whatever_the_decoder(decoder: object) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"\u2581the": 0, "re": 1}, merges=[]))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, SpecialTokens())
    assert tokenizer.decode([0, 1, 0]) == " there the"


def test_a_tokenizer_without_decoder_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        Tokenizer(backend, SpecialTokens())


def test_no_chat_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_the_template_sees_the_special_tokens() -> None:
    special = SpecialTokens({"bos_token": "<a>", "eos_token": "<b>"})
    template = (
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = Tokenizer(byte_level(), special, template)
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "<a>x<b>>"
    assert tokenizer.render_chat(messages, ChatOptions(add_generation_prompt=False)) == "<a>x<b>"
