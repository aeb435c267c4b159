"""Masks, penalties and truncation against their definitions, written out one token at a time."""

import math
from collections import Counter

import numpy as np
import pytest

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.logits import SamplingRow, adjust_logits, keep_tokens, top_indices


def resolved(**given) -> ResolvedSamplingParams:
    return ResolvedSamplingParams(**{"seed": 0, "max_tokens": 100} | given)


def adjusted(logits, prompt=(), output=(), **given):
    row = SamplingRow(resolved(**given), list(prompt), list(output))
    return adjust_logits(np.asarray(logits, np.float32), row).tolist()


def kept(logits, **given):
    """Token id -> probability."""
    token_ids, weights = keep_tokens(np.asarray(logits, np.float32), resolved(**given))
    assert weights.max() == 1.0
    return dict(zip(token_ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


def logits_of(*probabilities):
    return [math.log(p) if p else -math.inf for p in probabilities]


def test_logit_bias_is_added():
    assert adjusted([0.0, 1.0, 2.0, 3.0], logit_bias={1: 5.0, 3: -100.0}) == [0.0, 6.0, 2.0, -97.0]


def test_the_input_is_left_as_it_was():
    logits = np.zeros(4, np.float32)
    adjust_logits(logits, SamplingRow(resolved(logit_bias={1: 5.0}), [], []))
    assert logits.tolist() == [0.0] * 4


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_every_stop_and_eos_id(num_output, ignore_eos):
    logits = adjusted(
        [1.0] * 6,
        output=[0] * num_output,
        min_tokens=3,
        eos_token_ids=frozenset({1, 2}),
        stop_token_ids=(4,),
        ignore_eos=ignore_eos,
    )
    banned = {i for i, value in enumerate(logits) if value == -math.inf}
    assert banned == ({1, 2, 4} if num_output < 3 else set())


@pytest.mark.parametrize(
    ("bad_words", "output", "banned"),
    [
        (((3,),), [], {3}),
        (((3,),), [3, 3], {3}),
        (((1, 2),), [], set()),
        (((1, 2),), [1], {2}),
        (((1, 2),), [1, 0], set()),
        (((1, 2, 3),), [2], set()),
        (((1, 2, 3),), [0, 1, 2], {3}),
        (((1, 2, 3),), [1, 2, 0], set()),
        (((1, 1, 1),), [1, 1, 1], {1}),
        (((1, 2), (0, 1, 4), (5,)), [0, 1], {2, 4, 5}),
    ],
)
def test_bad_words_cannot_be_completed(bad_words, output, banned):
    logits = adjusted([1.0] * 6, output=output, bad_words_token_ids=bad_words)
    assert {i for i, value in enumerate(logits) if value == -math.inf} == banned


def test_a_bad_word_begun_in_the_prompt_is_the_users_own():
    assert adjusted([1.0] * 4, prompt=[1], bad_words_token_ids=((1, 2),)) == [1.0] * 4


def test_penalties_by_definition():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=20).astype(np.float32)
    prompt, output = rng.integers(0, 12, 9).tolist(), rng.integers(5, 16, 9).tolist()
    counts = Counter(output)
    expected = []
    for token_id, value in enumerate(logits.tolist()):
        if token_id in prompt or token_id in output:
            value = value / 1.3 if value > 0 else value * 1.3
        value -= 0.7 * counts[token_id] + (0.4 if counts[token_id] else 0.0)
        expected.append(value)
    found = adjusted(
        logits,
        prompt,
        output,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
    )
    assert found == pytest.approx(expected, rel=1e-12)


def test_bias_comes_before_the_penalties():
    assert adjusted([1.0], prompt=[0], repetition_penalty=2.0, logit_bias={0: 3.0}) == [2.0]
    assert adjusted([1.0], prompt=[0], repetition_penalty=2.0, logit_bias={0: -3.0}) == [-4.0]


@pytest.mark.parametrize(
    ("given", "has_adjustments"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "min_tokens": 2}, False),
        ({"min_tokens": 3}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"bad_words_token_ids": ((1,),)}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
    ],
)
def test_rows_that_need_no_adjustment_are_told_apart(given, has_adjustments):
    assert SamplingRow(resolved(**given), [1], [1, 2]).has_adjustments is has_adjustments


def test_temperature_divides():
    logits = [0.5, -1.0, 2.0]
    for temperature in (0.25, 1.0, 3.0):
        powers = [math.exp(value / temperature) for value in logits]
        expected = [power / sum(powers) for power in powers]
        assert list(kept(logits, temperature=temperature).values()) == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_leaves_weight_on_the_best_alone(temperature):
    assert kept([1.0, 3.0, -2.0, 2.9], temperature=temperature)[1] == 1.0


def test_top_k_keeps_all_that_tie_with_the_last():
    assert set(kept([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2)) == {1, 2, 3}
    assert set(kept([1.0, 3.0, 2.0, 2.0, 0.0], top_k=1)) == {1}
    assert set(kept([1.0, 3.0, 2.0, 2.0, 0.0], top_k=5)) == {0, 1, 2, 3, 4}
    assert set(kept([1.0, 3.0, 2.0, 2.0, 0.0], top_k=99)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.1, {2}),
        (0.49, {2}),
        (0.51, {0, 2}),
        (0.79, {0, 2}),
        (0.81, {0, 2, 3}),
        (0.99, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, expected):
    assert set(kept(logits_of(0.3, 0.05, 0.5, 0.15), top_p=top_p)) == expected


def test_top_p_prefers_the_lower_ids_of_a_tie():
    assert set(kept([0.0] * 8, top_p=0.4)) == {0, 1, 2, 3}


@pytest.mark.parametrize("spread", [0.001, 0.3, 4.0])
def test_top_p_of_a_large_vocabulary_by_definition(spread):
    """Flat distributions need more than the first head that is sorted."""
    logits = np.random.default_rng(2).normal(0.0, spread, 20_000).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    mass, expected = 0.0, set()
    for i in order:
        if mass >= 0.7 * weights.sum():
            break
        mass += weights[i]
        expected.add(i)
    assert set(kept(logits, top_p=0.7)) == expected


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.05, {0, 1, 2, 3}), (0.2, {0, 2, 3}), (0.5, {0, 2}), (1.0, {2})]
)
def test_min_p_is_a_share_of_the_most_likely(min_p, expected):
    assert set(kept(logits_of(0.3, 0.05, 0.5, 0.15), min_p=min_p)) == expected


def test_top_p_measures_what_top_k_and_min_p_left():
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    assert set(kept(logits, top_p=0.69)) == {0, 1}
    assert set(kept(logits, top_p=0.69, top_k=3)) == {0, 1}
    assert set(kept(logits, top_p=0.57, top_k=2)) == {0}
    assert set(kept(logits, top_p=0.57, min_p=0.7)) == {0}


def test_masked_tokens_never_come_back():
    masked = [-math.inf, 1.0, -math.inf, 0.5]
    for given in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.01}, {"temperature": 1e6}):
        drawn = {token_id for token_id, p in kept(masked, **given).items() if p > 0.0}
        assert drawn == {1, 3}


def test_top_indices_are_best_first_and_lowest_id_first_in_a_tie():
    values = np.array([1.0, 5.0, 5.0, 2.0, 5.0, 2.0])
    for count, expected in [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [1, 2, 4, 3])]:
        assert top_indices(values, count).tolist() == expected
    assert top_indices(values, 6).tolist() == [1, 2, 4, 3, 5, 0]
    assert top_indices(values, 9).tolist() == [1, 2, 4, 3, 5, 0]
