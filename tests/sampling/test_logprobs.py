import math

import numpy as np
import pytest

from kvloom.sampling.logprobs import prompt_logprobs, score_token


def test_log_softmax_by_definition():
    logits = [1.5, -2.0, 0.25, 3.0]
    log_sum = math.log(sum(math.exp(value) for value in logits))
    scored = score_token(np.array(logits, np.float32), 2, 3)
    assert scored.token_id == 2
    assert scored.logprob == pytest.approx(0.25 - log_sum, abs=1e-6)
    assert scored.rank == 3
    assert [token_id for token_id, _ in scored.top] == [3, 0, 2]
    expected = [value - log_sum for value in (3.0, 1.5, 0.25)]
    assert [logprob for _, logprob in scored.top] == pytest.approx(expected, abs=1e-6)


def test_zero_gives_the_chosen_token_alone():
    scored = score_token(np.zeros(4, np.float32), 1, 0)
    assert scored.top == ()
    assert scored.logprob == pytest.approx(math.log(0.25))


def test_rank_counts_strictly_more_likely_tokens():
    logits = np.array([2.0, 1.0, 2.0, 1.0, 0.0], np.float32)
    assert [score_token(logits, i, 0).rank for i in range(5)] == [1, 3, 1, 3, 5]
    assert [i for i, _ in score_token(logits, 0, 3).top] == [0, 2, 1]


def test_more_top_tokens_than_tokens():
    assert len(score_token(np.zeros(3, np.float32), 0, 20).top) == 3


def test_large_logits_do_not_overflow():
    scored = score_token(np.array([1e30, 1e30, -1e30], np.float32), 0, 0)
    assert scored.logprob == pytest.approx(-math.log(2), abs=1e-6)


@pytest.mark.parametrize("size", [7, 49_152])
def test_float32_logits_are_summed_precisely(size):
    logits = (np.random.default_rng(3).normal(size=size) * 5).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = wide[5] - (wide.max() + math.log(math.fsum(np.exp(wide - wide.max()))))
    assert score_token(logits, 5, 0).logprob == pytest.approx(expected, abs=2e-6)


def test_a_masked_token_has_no_chance():
    scored = score_token(np.array([0.0, -math.inf], np.float32), 1, 2)
    assert scored.logprob == -math.inf
    assert scored.top[0] == (0, 0.0)


def test_nan_is_reported_as_nan():
    assert math.isnan(score_token(np.full(4, np.nan, np.float32), 1, 2).logprob)


def test_prompt_tokens_are_scored_by_the_position_before_them():
    logits = np.array([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]], np.float32)
    first, second = prompt_logprobs(logits, [1, 0], 1)
    assert (first.token_id, first.rank, first.top[0][0]) == (1, 1, 1)
    assert (second.token_id, second.rank, second.top[0][0]) == (0, 2, 2)
    assert prompt_logprobs(logits[:0], [], 1) == []
