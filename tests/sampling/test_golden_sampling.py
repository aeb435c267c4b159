"""The tokens that stay, and their probabilities, equal those of transformers' processors."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.logits import SamplingRow, adjust_logits, keep_tokens

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "sampling.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["params"]))
def test_equal_to_transformers(case):
    given = dict(case["params"])
    given["logit_bias"] = {int(i): bias for i, bias in given.get("logit_bias", {}).items()}
    params = ResolvedSamplingParams(
        **given, seed=0, max_tokens=9, eos_token_ids=frozenset(GOLDEN["eos_token_ids"])
    )
    row = SamplingRow(params, GOLDEN["prompt"], GOLDEN["output"])
    token_ids, weights = keep_tokens(
        adjust_logits(np.array(case["logits"], np.float32), row), params
    )
    is_possible = weights > 0.0
    assert token_ids[is_possible].tolist() == case["kept"]
    shares = (weights / weights.sum())[is_possible]
    assert shares.tolist() == pytest.approx(case["probabilities"], abs=1e-5)
