"""Tokenizers of GGUF metadata, on vocabularies small enough to merge by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.errors import UnsupportedModelError
from kvloom.tokenizer.from_gguf import tokenizer_from_gguf

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def byte_level(
    pieces: list[str], merges: list[str], pre: str = "gpt-2", **extra: Any
) -> dict[str, Any]:
    """Tokens: <s>, </s>, then `pieces`."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<s>", "</s>", *pieces],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def sentencepiece(pieces: dict[str, float], **extra: Any) -> dict[str, Any]:
    """Tokens: <unk>, <s>, </s>, the bytes from 3 on, then `pieces` from 259 on."""
    count = len(pieces)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *("<unk>", "<s>", "</s>"),
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *pieces,
        ],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * count],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def encode(metadata: dict[str, Any], text: str, add_special_tokens: bool = True) -> list[int]:
    return tokenizer_from_gguf(metadata, frozenset()).encode(text, add_special_tokens)


def test_merges_apply_in_their_order() -> None:
    pieces = ["a", "b", "c", "bc", "ab"]  # 2, 3, 4, 5, 6
    assert encode(byte_level(pieces, ["b c", "a b"]), "abc") == [2, 5]
    assert encode(byte_level(pieces, ["a b", "b c"]), "abc") == [6, 4]


def test_spaces_and_bytes_use_the_alphabet() -> None:
    # A space is U+0120, a newline U+010A, and "é" the characters of its two bytes.
    metadata = byte_level(["Ġ", "Ċ", "Ã", "©", "a", "Ġa"], ["Ġ a"])
    tokenizer = tokenizer_from_gguf(metadata, frozenset())
    ids = tokenizer.encode(" a\né", add_special_tokens=True)
    assert ids == [7, 3, 4, 5]
    assert tokenizer.decode(ids) == " a\né"
    assert tokenizer.decode(ids[2:3]) == "\ufffd"


def test_control_and_user_defined_tokens_stay_whole() -> None:
    metadata = byte_level(["<", ">", "s", "<u>", "u"], [])
    metadata["tokenizer.ggml.token_type"][5] = USER_DEFINED
    tokenizer = tokenizer_from_gguf(metadata, frozenset())
    assert tokenizer.encode("<s><u>s", add_special_tokens=True) == [0, 5, 4]
    # Only control tokens are special.
    assert tokenizer.decode([0, 5, 4]) == "<u>s"


def test_a_named_token_is_special_whatever_its_type() -> None:
    metadata = byte_level(["a"], [])
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * 3
    tokenizer = tokenizer_from_gguf(metadata, frozenset())
    assert tokenizer.decode([0, 2, 1]) == "a"


def test_a_token_outside_the_alphabet_makes_no_new_id() -> None:
    metadata = byte_level(["a", "Ġ", "x y"], [])
    metadata["tokenizer.ggml.token_type"][4] = CONTROL
    assert tokenizer_from_gguf(metadata, frozenset()).vocab_size == 5


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, [2]),
        ({"add_bos_token": True}, [0, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 2, 1]),
        ({"add_eos_token": True}, [2, 1]),
        ({"pre": "llama-bpe"}, [0, 2]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [2]),
        ({"pre": "qwen2"}, [2]),
    ],
)
def test_bos_and_eos_rules(extra: dict[str, Any], expected: list[int]) -> None:
    metadata = byte_level(["a"], [], **extra)
    assert encode(metadata, "a") == expected
    assert encode(metadata, "a", add_special_tokens=False) == [2]


def test_ids_the_engine_asks_for() -> None:
    tokenizer = tokenizer_from_gguf(byte_level(["a"], []), frozenset({1, 5}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, {1, 5})
    assert tokenizer.vocab_size == 3


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # The rules of each family: digits in runs, in threes, or one by one; contractions.
        ("gpt-2", "ab 12345", ["ab", " 12345"]),
        ("llama-bpe", "ab 12345", ["ab", " ", "123", "45"]),
        ("qwen2", "ab 12345", ["ab", " ", "1", "2", "3", "4", "5"]),
        ("tekken", "abCd 12", ["ab", "Cd", " ", "1", "2"]),
        ("llama-bpe", "I'LL\n\n  x", ["I", "'LL", "\n\n", " ", " x"]),
        ("gpt-2", "I'll  x", ["I", "'ll", " ", " x"]),
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
    ],
)
def test_where_texts_are_cut(pre: str, text: str, expected: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(["a"], [], pre=pre), frozenset())
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == expected


def test_whole_words_are_taken_without_merges() -> None:
    pieces = ["a", "b", "ab", "abab"]
    assert encode(byte_level(pieces, ["a b"], pre="llama-bpe"), "abab") == [0, 5]
    assert encode(byte_level(pieces, ["a b"], pre="qwen2"), "abab") == [4, 4]


def test_the_chat_template_of_the_file() -> None:
    metadata = byte_level(["a"], []) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    }
    tokenizer = tokenizer_from_gguf(metadata, frozenset())
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_sentencepiece_merges_by_score() -> None:
    pieces = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0}
    assert encode(sentencepiece(pieces, add_space_prefix=False), "abc") == [1, 259, 263]
    pieces |= {"ab": -1.0, "bc": -2.0}
    assert encode(sentencepiece(pieces, add_space_prefix=False), "abc") == [1, 262, 261]


def test_of_equal_scores_the_longest_left_part_merges_first() -> None:
    pieces = dict.fromkeys(["a", "b", "c", "d", "ab", "cd", "abc"], 0.0)
    assert encode(sentencepiece(pieces, add_space_prefix=False), "abcd") == [1, 265, 262]


def test_sentencepiece_prefix_space() -> None:
    pieces = {"\u2581": -3.0, "a": -3.0, "\u2581a": -1.0}
    assert encode(sentencepiece(pieces), "a a") == [1, 261, 261]
    assert encode(sentencepiece(pieces, add_space_prefix=False), "a a") == [1, 260, 261]


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = tokenizer_from_gguf(
        sentencepiece({"a": -1.0}, add_space_prefix=False, add_bos_token=False), frozenset()
    )
    ids = tokenizer.encode("aé", add_special_tokens=True)
    assert ids == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.decode(ids[:2]) == "a\ufffd"


def test_gemma_merges_in_the_order_of_its_tokens() -> None:
    pieces = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "  ": 0.0, "\u2581": 0.0}
    metadata = sentencepiece(pieces, add_space_prefix=False)
    metadata["general.architecture"] = "gemma3"
    assert encode(metadata, "abc") == [1, 262, 261]
    # Its runs of spaces are stored as such.
    assert encode(metadata, "a  b") == [1, 259, 264, 260]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "GGUF tokenizer 't5'.*'gpt2', 'llama'"),
        ({"pre": "bloom"}, "pre-tokenizer 'bloom'.*gpt-2"),
        ({"bos_token_id": 99}, r"bos_token_id = 99 is outside"),
        ({"merges": ["a nothing"]}, "damaged"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        tokenizer_from_gguf(
            byte_level(["a"], []) | {f"tokenizer.ggml.{k}": v for k, v in change.items()},
            frozenset(),
        )


def test_a_missing_pre_tokenizer_is_refused() -> None:
    metadata = byte_level(["a"], [])
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer None"):
        tokenizer_from_gguf(metadata, frozenset())


IDS = [f"{name}_token_id" for name in ("bos", "eos", "unknown", "padding")]


@pytest.mark.parametrize("make", [lambda: byte_level(["a"], []), lambda: sentencepiece({"a": 0.0})])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"ggml.{key}", value) for key in IDS for value in ([1], "1", None, 1.0, True)),
        *((f"ggml.{key}", value) for key in ("tokens", "merges") for value in ("a", 1, None, [1])),
        *(("ggml.token_type", value) for value in ("a", 1, None, ["a"])),
        *(("ggml.scores", value) for value in ("a", 1.0, None, ["a"])),
        *(("ggml.pre", value) for value in (["gpt-2"], 1, None)),
        *(("ggml.model", value) for value in (["gpt2"], 1, None)),
        *(
            (f"ggml.add_{key}", value)
            for key in ("bos_token", "eos_token", "space_prefix")
            for value in ("false", [False], None)
        ),
        *(("chat_template", value) for value in (1, ["{{ x }}"], None)),
    ],
)
def test_values_of_another_kind_are_refused_by_name(make: Any, key: str, value: Any) -> None:
    message = "GGUF tokenizer" if key == "ggml.model" else rf"GGUF metadata tokenizer\.{key} "
    with pytest.raises(UnsupportedModelError, match=message):
        tokenizer_from_gguf(make() | {f"tokenizer.{key}": value}, frozenset())


def test_scores_that_are_too_few_are_refused() -> None:
    metadata = sentencepiece({"a": 0.0})
    metadata["tokenizer.ggml.scores"].pop()
    with pytest.raises(UnsupportedModelError, match="259 values for 260 tokens"):
        tokenizer_from_gguf(metadata, frozenset())


def test_a_file_without_tokenizer() -> None:
    with pytest.raises(UnsupportedModelError, match="carries no tokenizer"):
        tokenizer_from_gguf({"general.architecture": "llama"}, frozenset())
