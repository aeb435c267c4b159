"""Timed prompts have the number of tokens asked for, and no two are alike."""

from __future__ import annotations

import re

import pytest
from peers_prompts import PromptMaker

from kvloom.tokenizer import load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def maker(tokenizer):
    return PromptMaker(tokenizer)


@pytest.mark.parametrize("num_tokens", [1, 2, 128, 3500])
def test_prompts_have_exactly_the_tokens_asked_for(maker, tokenizer, num_tokens):
    for text in maker.make(4, num_tokens, "a"):
        assert len(tokenizer.encode(text, add_special_tokens=True)) == num_tokens


def test_no_two_prompts_share_their_first_token(maker, tokenizer):
    firsts = [tokenizer.encode(text, True)[0] for text in maker.make(32, 8, "a")]
    assert len(set(firsts)) == 32


def test_a_seed_stands_for_its_prompts(maker):
    assert maker.make(2, 16, "a") == maker.make(2, 16, "a")
    assert not set(maker.make(2, 16, "a")) & set(maker.make(2, 16, "b"))


class WithBos:
    """Token 0 begins every text; the others are words."""

    vocab_size = 500

    def encode(self, text, add_special_tokens):
        return [0] * add_special_tokens + [1] * text.count(" ")

    def decode(self, ids):
        return "".join(f" {chr(97 + i // 25)}{chr(97 + i % 25)}x" for i in ids)


def test_tokens_that_begin_a_text_count():
    [text] = PromptMaker(WithBos()).make(1, 5, "a")
    assert text.count(" ") == 4


class Merging(WithBos):
    """Some words merge with the word before: one pair in 400."""

    vocab_size = 100

    def encode(self, text, add_special_tokens):
        return super().encode(re.sub(" abx (a.x)", r" abx\1", text), add_special_tokens)


def test_words_that_merge_are_drawn_again():
    for text in PromptMaker(Merging()).make(20, 400, "a"):
        assert len(Merging().encode(text, add_special_tokens=True)) == 400
        assert text.count(" ") == 399


class Letters:
    """A token per letter: no word is one token."""

    vocab_size = 26

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + token_id) for token_id in ids)


class Liar(Letters):
    """Decodes tokens to words, and encodes them otherwise."""

    vocab_size = 500

    def decode(self, ids):
        return "".join(f" {chr(97 + i // 25)}{chr(97 + i % 25)}x" for i in ids)


def test_a_tokenizer_without_whole_words_is_refused():
    with pytest.raises(ValueError, match="too few tokens"):
        PromptMaker(Letters())


def test_a_wrong_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match="made to have 3 tokens has 12"):
        PromptMaker(Liar()).make(1, 3, "a")
