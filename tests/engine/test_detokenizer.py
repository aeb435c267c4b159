"""Text rules of a stream. Expected texts are from the definitions, or from decoding all at once."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import kvloom.tokenizer
from kvloom.engine.detokenizer import IncrementalDetokenizer
from kvloom.request import SamplingParams
from kvloom.tokenizer.tokenizer import SpecialTokens
from stop_cases import CASE_9, REPLACEMENT, ByteDecoder, byte_pieces

properties = settings(max_examples=150)


class NothingPlain:
    """A decoder that vouches for no token: the text must be the same."""

    def __init__(self, decoder) -> None:
        self.decode = decoder.decode

    def plain_texts(self, skip_special_tokens):
        return defaultdict(lambda: None)


class RealDecoder(NothingPlain):
    """A `tokenizers` tokenizer behind the protocol; what it says depends on where a text begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids, skip_special_tokens, spaces_between_special_tokens):
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def engine_tokenizer(tokenizer: Tokenizer) -> kvloom.tokenizer.Tokenizer:
    """The decoder that the engine uses."""
    return kvloom.tokenizer.Tokenizer(tokenizer, SpecialTokens())


def run(decoder, token_ids, params=None, *, group=1, prompt=()):
    """All deltas, the last one from finish(), and the detokenizer."""
    deltas, detokenizer = run_once(decoder, token_ids, params, group=group, prompt=prompt)
    without_plain, _ = run_once(
        NothingPlain(decoder), token_ids, params, group=group, prompt=prompt
    )
    assert without_plain == deltas
    return deltas, detokenizer


def run_once(decoder, token_ids, params, *, group, prompt):
    detokenizer = IncrementalDetokenizer(decoder, params or SamplingParams(), prompt)
    groups = [token_ids[i : i + group] for i in range(0, len(token_ids), group)]
    deltas = [detokenizer.push(ids) for ids in groups]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    assert detokenizer.finish() == ""
    return deltas, detokenizer


@pytest.mark.parametrize(("texts", "stop", "prompt", "text", "forbidden", "num_tokens"), CASE_9)
@pytest.mark.parametrize("group", [1, 2, 3, 9])
def test_case_9(texts, stop, prompt, text, forbidden, num_tokens, group):
    pieces = byte_pieces([*texts, *prompt])
    ids = list(range(len(texts)))
    params = SamplingParams(stop=stop or ())
    deltas, detokenizer = run(
        ByteDecoder(pieces), ids, params, group=group, prompt=range(len(texts), len(pieces))
    )
    assert detokenizer.text == text
    assert not any(char in delta for char in forbidden for delta in deltas)
    assert detokenizer.num_tokens == num_tokens
    assert detokenizer.stop_reason == (stop if stop and text in ("ab", "a") else None)


def test_the_stop_string_is_kept_on_request():
    params = SamplingParams(stop="bc", include_stop_str_in_output=True)
    for pieces in ([b"x", b"b", b"c", b"d"], [b"x", b"bcd"], [b"xb", b"cd"]):
        _, detokenizer = run(ByteDecoder(pieces), range(len(pieces)), params)
        assert (detokenizer.text, detokenizer.stop_reason) == ("xbc", "bc")


def test_nothing_is_held_back_for_long_stop_strings_that_do_not_begin():
    pieces = [b"h", b"e", b"l", b"l", b"o", None]
    deltas, _ = run(ByteDecoder(pieces), range(6), SamplingParams(stop="zzzzzzzz"))
    assert deltas == ["h", "e", "l", "l", "o", "", ""]


def test_only_what_may_begin_a_stop_string_is_held_back():
    pieces = [b"ab", b"c", b"d", b"x"]
    deltas, _ = run(ByteDecoder(pieces), range(4), SamplingParams(stop=["cde", "d!"]))
    assert deltas == ["ab", "", "", "cdx", ""]


def test_what_comes_after_a_stop_is_not_consumed():
    decoder = ByteDecoder([b"a", b"b", b"c"])
    detokenizer = IncrementalDetokenizer(decoder, SamplingParams(stop="b"))
    assert detokenizer.push([0, 1, 2, 2]) == "a"
    assert detokenizer.is_stopped
    assert detokenizer.push([2]) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [
        (["cd", "bcdef"], "ab", "cd"),  # completed first, though it begins later
        (["bcdef", "cd"], "ab", "cd"),
        (["cd", "bcd"], "a", "bcd"),  # both completed by the d: the longer
        (["d", "cd"], "ab", "cd"),
        (["f", "ab"], "", "ab"),
    ],
)
def test_the_stop_completed_first_wins_whatever_the_tokens(stops, text, reason):
    whole = [b"abcdefg"]
    single = [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    for pieces in (whole, single):
        _, detokenizer = run(ByteDecoder(pieces), range(len(pieces)), SamplingParams(stop=stops))
        assert (detokenizer.text, detokenizer.stop_reason) == (text, reason)


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "ab" * 2), (5, "ab" * 4), (6, "ab" * 5)],
)
def test_stop_strings_within_min_tokens_are_passed_over(min_tokens, text):
    pieces = [b"a", b"b", b"a", b"b", b"abab", b"ab", b"ab"]
    params = SamplingParams(stop="ab", min_tokens=min_tokens)
    _, detokenizer = run(ByteDecoder(pieces), range(7), params)
    assert detokenizer.text == text
    assert detokenizer.is_stopped


def test_a_stop_that_begins_within_min_tokens_may_end_after_them():
    params = SamplingParams(stop="bc", min_tokens=2)
    deltas, detokenizer = run(ByteDecoder([b"a", b"b", b"c", b"d"]), range(4), params)
    assert detokenizer.text == "a"
    assert deltas == ["a", "", "", "", ""]


def test_a_stop_that_was_passed_over_does_not_count_later():
    """The held "abc" may begin "abcd" and holds "bc", which the third token completed."""
    params = SamplingParams(stop=["abcd", "bc"], min_tokens=3)
    deltas, detokenizer = run(ByteDecoder([b"a", b"b", b"c", b"x", b"y"]), range(5), params)
    assert deltas == ["", "", "", "abcx", "y", ""]
    assert not detokenizer.is_stopped


def test_special_tokens_are_kept_on_request():
    pieces = [b"a", None, b"b"]
    assert run(ByteDecoder(pieces), range(3))[1].text == "ab"
    params = SamplingParams(skip_special_tokens=False)
    assert run(ByteDecoder(pieces), range(3), params)[1].text == "a<s>b"


def test_decoding_options_are_passed_on():
    seen = []

    class Spy(ByteDecoder):
        def decode(self, ids, skip_special_tokens, spaces_between_special_tokens):
            seen.append((skip_special_tokens, spaces_between_special_tokens))
            return super().decode(ids, skip_special_tokens, spaces_between_special_tokens)

    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    run(Spy([b"a"]), [0], params)
    assert set(seen) == {(False, False)}


@pytest.mark.parametrize(
    "pieces",
    [
        [b"word "],
        [b"\x80"],  # invalid for ever
        [REPLACEMENT.encode()],  # a real U+FFFD for ever
        [None],  # text for never
        [b"a", None, None, None],
        [b"\xf0", b"\x9f\x98\x80\xf0"] + [b"\x9f\x98\x80\xf0"] * 60,  # no token ends a character
    ],
)
def test_the_window_stays_short(pieces):
    decoder = ByteDecoder(pieces)
    ids = [i % len(pieces) for i in range(400)]
    _, detokenizer = run(decoder, ids, prompt=ids[:20])
    assert decoder.longest_window <= 20
    data = b"".join(pieces[i] or b"" for i in ids)
    assert detokenizer.text == data.decode("utf-8", "replace")


@pytest.mark.parametrize("num_special", [1, 8, 40])
def test_special_tokens_amid_a_character_do_not_split_it(num_special):
    special = [None] * num_special
    pieces = [b"a", b"\xf0", *special, b"\x9f", b"\x98", *special, b"\x80", b"b"]
    deltas, _ = run(ByteDecoder(pieces), range(len(pieces)))
    assert [delta for delta in deltas if delta] == ["a", "\U0001f600", "b"]


texts = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.text(alphabet="ab \n", max_size=6),
        st.sampled_from(
            ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301", "한국어"]
        ),
        st.sampled_from(["日本語テキスト", "สวัสดี", "नमस्ते", "🇩🇪", REPLACEMENT, "\x00\x7f"]),
    ),
    max_size=12,
).map("".join)


def cut(data: bytes, seed: int) -> list[bytes | None]:
    """Tokens of 1 to 5 bytes, cut anywhere, with a special token in between now and then."""
    rng = random.Random(seed)
    pieces: list[bytes | None] = []
    while data:
        size = rng.randint(1, rng.choice([1, 2, 5]))
        pieces.append(data[:size])
        data = data[size:]
        if rng.random() < 0.1:
            pieces.append(None)
    return pieces


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character; the first stop that the text ends with ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@properties
@given(texts, st.integers(0, 2**32), st.integers(1, 4))
def test_any_cut_of_any_text_streams_as_the_text(text, seed, group):
    pieces = cut(text.encode(), seed)
    deltas, _ = run(ByteDecoder(pieces), range(len(pieces)), group=group)
    assert "".join(deltas) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in delta for delta in deltas)


@properties
@given(st.lists(st.integers(0x70, 0xFF), max_size=80).map(bytes), st.integers(0, 2**32))
def test_bytes_that_are_no_text_read_as_decoded_at_once(data, seed):
    pieces = cut(data, seed)
    assert run(ByteDecoder(pieces), range(len(pieces)))[1].text == data.decode("utf-8", "replace")


@properties
@given(
    st.text(alphabet="ab한", max_size=40),
    st.lists(st.text(alphabet="ab한", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.integers(1, 4),
)
def test_stop_strings_are_found_as_by_naive_search(text, stops, seed, group):
    pieces = cut(text.encode(), seed)
    params = SamplingParams(stop=stops)
    deltas, detokenizer = run(ByteDecoder(pieces), range(len(pieces)), params, group=group)
    expected, reason = naive(text, stops)
    assert ("".join(deltas), detokenizer.stop_reason) == (expected, reason)
    kept = SamplingParams(stop=stops, include_stop_str_in_output=True)
    assert run(ByteDecoder(pieces), range(len(pieces)), kept)[1].text == expected + (reason or "")


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE as SmolLM2's, trained on little, so that other scripts fall to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the cache keeps what the model has read", "über naïve", "日本語日本", "😀😃😄"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@properties
@given(texts, st.lists(st.text(min_size=1, max_size=3), max_size=3), st.integers(1, 4))
def test_a_real_byte_level_tokenizer(byte_level, text, stops, group):
    ids = byte_level.encode(text).ids
    full = byte_level.decode(ids)
    deltas, _ = run(RealDecoder(byte_level), ids, group=group)
    assert "".join(deltas) == full == text
    assert run(engine_tokenizer(byte_level), ids, group=group)[0] == deltas
    stops += [text[3:5]] if text[3:5] else []
    stopped = run(RealDecoder(byte_level), ids, SamplingParams(stop=stops), group=group)[1]
    assert (stopped.text, stopped.stop_reason) == naive(full, stops)


SENTENCE_WORDS = ["<s>", "\u2581", "\u2581the", "\u2581cat", "s", ".", "\u2581\u2581", "한", "\n"]


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """Words that begin with a space, single bytes, and a decoder that strips the first space."""
    vocabulary = [*SENTENCE_WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def sentence_piece_ids(tokenizer: Tokenizer, parts) -> list[int]:
    ids = []
    for part in parts:
        token_id = tokenizer.token_to_id(part)
        names = [f"<0x{byte:02X}>" for byte in part.encode()] if token_id is None else [part]
        ids += [tokenizer.token_to_id(name) for name in names]
    return ids


def test_a_word_after_the_prompt_keeps_its_space(sentence_piece):
    prompt = sentence_piece_ids(sentence_piece, ["<s>", "\u2581the"])
    ids = sentence_piece_ids(sentence_piece, ["\u2581cat", "s"])
    decoder = RealDecoder(sentence_piece)
    assert run(decoder, ids, prompt=prompt)[0] == [" cat", "s", ""]
    assert run(decoder, ids)[0] == ["cat", "s", ""]


SPELT_IN_BYTES = ["😀", "é", "日", "日本語" * 9, "x"]


def test_a_first_token_without_text_still_counts(sentence_piece):
    """The decoder strips one space at the start: that of the first token, not of the second."""
    ids = sentence_piece_ids(sentence_piece, ["\u2581", "\u2581cat"])
    assert run(RealDecoder(sentence_piece), ids)[1].text == " cat" == sentence_piece.decode(ids)


def test_every_word_keeps_its_space(sentence_piece):
    ids = sentence_piece_ids(sentence_piece, ["\u2581the"] * 100)
    assert run(RealDecoder(sentence_piece), ids)[0][:-1] == ["the", *[" the"] * 99]


sentence_parts = st.lists(st.sampled_from([*SENTENCE_WORDS, *SPELT_IN_BYTES]), max_size=40)


@properties
@given(sentence_parts, st.integers(1, 3))
def test_sentence_piece_reads_as_decoded_at_once(sentence_piece, parts, group):
    prompt = sentence_piece_ids(sentence_piece, ["\u2581the"])
    ids = sentence_piece_ids(sentence_piece, parts)
    deltas, _ = run(RealDecoder(sentence_piece), ids, group=group, prompt=prompt)
    assert "".join(["the", *deltas]) == sentence_piece.decode(prompt + ids)
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert run(engine_tokenizer(sentence_piece), ids, group=group, prompt=prompt)[0] == deltas


def test_a_stray_byte_among_byte_tokens_costs_no_character_before_it(sentence_piece):
    names = ["<0xE2>", "<0x82>", "<0xAC>", "<0x80>", "\u2581cat"]
    ids = [sentence_piece.token_to_id(name) for name in names]
    deltas, _ = run(RealDecoder(sentence_piece), ids)
    assert "".join(deltas) == "€" + REPLACEMENT + " cat"


@pytest.mark.parametrize("char", ["é", "€", "😀"])
def test_a_run_of_byte_tokens_with_a_stray_one_reads_as_decoded_at_once(sentence_piece, char):
    stray = sentence_piece.token_to_id("<0x80>")
    ids = [stray, *sentence_piece_ids(sentence_piece, [char * 50, "\u2581cat"])]
    assert run(RealDecoder(sentence_piece), ids)[1].text == sentence_piece.decode(ids)


@pytest.mark.parametrize("repeats", [1, 30])
def test_many_skipped_special_tokens_do_not_hide_the_word_before(sentence_piece, repeats):
    parts = ["\u2581the", *["<s>"] * repeats, "\u2581cat"]
    ids = sentence_piece_ids(sentence_piece, parts)
    assert run(RealDecoder(sentence_piece), ids)[1].text == "the cat"
