"""Draws of both samplers follow the distributions that transformers' processors give.

Each case of `golden/sampling.json` is drawn with seeds of its own: 1,000 times, 20,000 with --full.
transformers has no presence and frequency penalties; those follow from their definition.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.ops.isa import built_isas, load_native
from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.native import NativeSampler
from kvloom.sampling.sampler import Sampler, SamplingRow, derive_seed

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "sampling.json").read_text(encoding="utf-8")
)
PROMPT, OUTPUT = GOLDEN["prompt"], GOLDEN["output"]
VOCAB_SIZE = 40
NUM_DRAWS = 1000
LEAST_EXPECTED = 5.0  # rarer tokens are counted together


def penalised_case(presence: float, frequency: float) -> dict[str, Any]:
    """A penalty is subtracted once per token that was generated, or per time it was."""
    logits = np.random.default_rng(9).normal(0.0, 2.0, VOCAB_SIZE).round(3)
    counts = np.bincount(OUTPUT, minlength=VOCAB_SIZE)
    powers = np.exp(logits - presence * (counts > 0) - frequency * counts)
    return {
        "params": {"presence_penalty": presence, "frequency_penalty": frequency},
        "logits": logits.tolist(),
        "kept": list(range(VOCAB_SIZE)),
        "probabilities": (powers / powers.sum()).tolist(),
    }


CASES = [
    *GOLDEN["cases"],
    *(penalised_case(*penalties) for penalties in ((1.5, 0.0), (0.0, 1.2), (-1.0, -0.5))),
]


@pytest.fixture(scope="module", params=["numpy", "native"])
def sampler(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "numpy":
        yield Sampler(VOCAB_SIZE)
        return
    if not built_isas():
        pytest.skip("the native library is not built")
    native = load_native()
    yield NativeSampler(native, native.ThreadTeam(1), VOCAB_SIZE)


def chi_square(counts: np.ndarray, shares: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare tokens count as one."""
    expected = shares * counts.sum()
    is_rare = expected < LEAST_EXPECTED
    observed = [*counts[~is_rare], counts[is_rare].sum()]
    wanted = [*expected[~is_rare], expected[is_rare].sum()]
    cells = [(o, e) for o, e in zip(observed, wanted, strict=True) if e > 0.0]
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


def bound(num_degrees: int) -> float:
    """What a right distribution passes once in a million, by Wilson and Hilferty."""
    spread = 2.0 / (9.0 * num_degrees)
    return num_degrees * (1.0 - spread + 4.753 * math.sqrt(spread)) ** 3


def draw(sampler: Any, case: dict[str, Any], num_draws: int) -> np.ndarray:
    """[vocab_size] how often each token was drawn."""
    given = dict(case["params"])
    given["logit_bias"] = {int(i): bias for i, bias in given.get("logit_bias", {}).items()}
    rows = [
        SamplingRow(
            ResolvedSamplingParams(
                **given,
                seed=derive_seed(7, number),
                max_tokens=9,
                eos_token_ids=frozenset(GOLDEN["eos_token_ids"]),
            ),
            PROMPT,
            OUTPUT,
        )
        for number in range(num_draws)
    ]
    logits = np.tile(np.array(case["logits"], np.float32), (num_draws, 1))
    drawn = sampler.sample(logits, rows)
    assert not drawn.errors
    return np.bincount(drawn.token_ids, minlength=VOCAB_SIZE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["params"]))
def test_draws_follow_the_distribution(scale: int, sampler: Any, case: dict[str, Any]) -> None:
    shares = np.zeros(VOCAB_SIZE)
    shares[case["kept"]] = case["probabilities"]
    counts = draw(sampler, case, NUM_DRAWS * scale)
    assert not counts[shares == 0.0].any()
    statistic, num_degrees = chi_square(counts, shares / shares.sum())
    if num_degrees == 0:  # one token is left, as with top_k 1
        assert counts.max() == counts.sum()
        return
    assert statistic < bound(num_degrees)
    # The same draws do not fit another distribution, or the bound would prove nothing.
    other, _ = chi_square(counts, np.roll(shares / shares.sum(), 1))
    assert other > bound(num_degrees)
