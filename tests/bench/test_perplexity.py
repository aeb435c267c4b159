"""Perplexity and divergence of distributions small enough for arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from perplexity import compare, log_softmax

HALF = np.log(np.array([[0.5, 0.5], [0.5, 0.5]], np.float32))
SKEWED = np.log(np.array([[0.25, 0.75], [0.5, 0.5]], np.float32))


def test_log_softmax_is_normalised_and_does_not_overflow():
    logprobs = log_softmax(np.array([[1e4, 1e4], [0.0, math.log(3)]], np.float32))
    np.testing.assert_allclose(np.exp(logprobs), [[0.5, 0.5], [0.25, 0.75]], rtol=1e-6)


def test_a_mode_equal_to_its_base():
    same = compare([HALF], [HALF], [[0, 1, 0]])
    assert same.perplexity == same.base_perplexity == pytest.approx(2.0)
    assert same.mean_kl == pytest.approx(0.0)
    assert same.top_1_share == 1.0


def test_a_skewed_mode():
    """The tokens 1 and 0 have probability 3/4 and 1/2, so the perplexity is sqrt(4/3 * 2).

    KL of the first position is 1/2 ln(2) + 1/2 ln(2/3), of the second 0. The base has a tie, which
    counts as its first token.
    """
    found = compare([HALF], [SKEWED], [[0, 1, 0]])
    assert found.perplexity == pytest.approx(math.sqrt(8 / 3))
    assert found.mean_kl == pytest.approx(0.5 * (math.log(2) + math.log(2 / 3)) / 2)
    assert found.top_1_share == 0.5


def test_tokens_of_all_passages_weigh_the_same():
    found = compare([HALF, HALF[:1]], [SKEWED, SKEWED[:1]], [[0, 1, 0], [0, 1]])
    assert found.perplexity == pytest.approx((4 / 3 * 2 * 4 / 3) ** (1 / 3))
