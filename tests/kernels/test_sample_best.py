"""Tokens of rows of which only the best was kept: those of the whole rows, for the same reasons."""

import numpy as np
import pytest

from best_twin import write_best
from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.native import NativeSampler
from kvloom.sampling.sampler import Sampler, SamplingRow

VOCAB_SIZES = (2, 32, 33, 333, 4096, 49_152)


@pytest.fixture(scope="module")
def team(native):
    return native.ThreadTeam(2)


def params(**given) -> ResolvedSamplingParams:
    return ResolvedSamplingParams(**{"seed": 0, "max_tokens": 9, "temperature": 0.0} | given)


def greedy_rows(count) -> list[SamplingRow]:
    return [SamplingRow(params(), (), ()) for _ in range(count)]


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_those_of_all_logits(native, team, vocab_size, is_rounded):
    """Rounded ones are equal in many places: the first counts."""
    logits = np.random.default_rng(vocab_size).normal(size=(40, vocab_size)).astype(np.float32)
    if is_rounded:
        logits = logits.round()
        logits[5] = -2.0
    rows = greedy_rows(40)
    expected = Sampler(vocab_size).sample(logits, rows)
    sampler = NativeSampler(native, team, vocab_size)
    kept = write_best(logits)
    assert sampler.sample(kept, rows, are_best_only=True) == expected
    assert sampler.start(kept, rows, are_best_only=True).finish() == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 99, slice(None)])
def test_a_bad_row_fails_alone(native, team, bad, place):
    logits = np.random.default_rng(1).normal(size=(3, 100)).astype(np.float32)
    logits[1, place] = bad
    rows = greedy_rows(3)
    found = NativeSampler(native, team, 100).sample(write_best(logits), rows, are_best_only=True)
    assert found == Sampler(100).sample(logits, rows)
    assert list(found.errors) == ([] if bad == -np.inf and place != slice(None) else [1])


@pytest.mark.parametrize("bits", [-1, -(2**31), 2**31 - 1, 31, 32])
def test_whatever_the_memory_holds_a_token_is_of_the_vocabulary(native, team, bits):
    kept = np.zeros((4, 40), np.float32)
    kept[:, 1] = 1.0
    kept[:, 2:4] = np.array([bits], np.int32).view(np.float32)
    found = NativeSampler(native, team, 40).sample(kept, greedy_rows(4), are_best_only=True)
    assert all(32 <= token_id < 40 for token_id in found.token_ids)


MORE = [
    {"temperature": 0.5},
    {"logprobs": 0},
    {"logit_bias": {3: 1.0}},
    {"min_tokens": 2, "eos_token_ids": frozenset([1])},
    {"bad_words_token_ids": ((1,),)},
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.1},
    {"presence_penalty": 0.1},
]


@pytest.mark.parametrize("given", MORE)
def test_who_asks_for_more_gets_no_token_of_the_best(native, team, given):
    """`min_tokens` ends, but nobody looks ahead to where."""
    sampler = NativeSampler(native, team, 50)
    assert sampler.asks_best_only([params()] * 3)
    assert not sampler.asks_best_only([params(), params(**given)])
    rows = [SamplingRow(params(**given), (), ())]
    kept = write_best(np.zeros((1, 50), np.float32))
    with pytest.raises(ValueError, match="asks for more than its best logit"):
        sampler.sample(kept, rows, are_best_only=True)
    mask = np.ones((1, 2), np.uint32)
    with pytest.raises(ValueError, match="asks for more than its best logit"):
        sampler.sample(kept, greedy_rows(1), mask, [0], are_best_only=True)
    assert sampler.asks_best_only([])


def test_one_token_is_no_choice(native, team):
    with pytest.raises(ValueError, match="asks for more"):
        NativeSampler(native, team, 1).sample(
            np.zeros((1, 1), np.float32), greedy_rows(1), are_best_only=True
        )
