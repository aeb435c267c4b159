"""When a text counts as the model's."""

from __future__ import annotations

import math

import pytest
from text_check import OWN, QUESTIONS, Score, is_right, report_lines

OF_OWN = Score([[-1.0, -1.0], [-0.4]])


def test_there_are_five_fixed_prompts():
    assert len(set(QUESTIONS)) == 5


def test_every_token_weighs_the_same():
    assert OF_OWN.mean_logprob == pytest.approx(-0.8)


@pytest.mark.parametrize(
    ("logprob", "expected"),
    [(-0.8, True), (-0.89, True), (-0.91, False), (-0.71, True), (-0.69, False)],
)
def test_near_means_within_a_tenth(logprob, expected):
    assert is_right(Score([[logprob], [logprob]]), OF_OWN) is expected


def test_an_empty_answer_is_wrong():
    silent = Score([[-0.8], []])
    assert silent.mean_logprob == -math.inf
    assert not is_right(silent, OF_OWN)


def test_the_report_names_who_is_wrong():
    lines = report_lines({OWN: OF_OWN, "good": Score([[-0.85]]), "bad": Score([[-2.0]])})
    assert "-0.800" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["good", "bad"]
    assert lines[1].endswith(": right")
    assert lines[2].endswith(": WRONG TEXT")
