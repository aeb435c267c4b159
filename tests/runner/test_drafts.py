"""The runner's rows behind drafts: which there are, and what is reported of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.step import TokenMask

PROMPT = [5, 6, 7]


def start(fakes, model, **params):
    """A request whose prompt and first token are known, and its text."""
    runner = fakes.runner(fakes.kv_config([(4, ["a"])]), model)
    new = [fakes.new_request("r", PROMPT, ([2, 3, 4],), **params)]
    runner.sample_tokens(runner.execute_model(fakes.step(new, scheduled={"r": 3})))
    return runner, fakes.continue_text(PROMPT, 20)


def run_drafts(fakes, runner, drafts, mask=None):
    """The step after the prompt's, with `drafts`."""
    step = fakes.step(
        cached=[("r", False, [], ([],), 3)],
        scheduled={"r": 1 + len(drafts)},
        drafts={"r": drafts} if drafts else {},
    )
    return runner.sample_tokens(runner.execute_model(step), mask)


@pytest.mark.parametrize("num_right", range(4))
def test_tokens_up_to_the_first_that_differs(fakes, num_right):
    runner, text = start(fakes, fakes.model(), logprobs=2)
    wrong = (text[1 + num_right] + 1) % fakes.vocab_size
    drafts = [*text[1 : 1 + num_right], *[wrong] * (3 - num_right)]
    result = run_drafts(fakes, runner, drafts)
    assert result.sampled_token_ids == {"r": text[1 : 2 + num_right]}
    assert [entry.token_id for entry in result.logprobs["r"]] == text[1 : 2 + num_right]
    assert result.errors == {}
    # The next step goes on behind them, and writes over what was stored of the other drafts.
    computed = 4 + num_right
    cached = [("r", False, [], ([],), computed)]
    step = fakes.step(cached=cached, scheduled={"r": 1})
    result = runner.sample_tokens(runner.execute_model(step))
    assert result.sampled_token_ids == {"r": [text[2 + num_right]]}


def test_rows_lie_in_order_of_position_and_before_those_of_prompts(fakes):
    model = fakes.model()
    runner, text = start(fakes, model)
    new = [
        fakes.new_request("scored", [1, 2, 3], ([5],), prompt_logprobs=0),
        fakes.new_request("plain", [8, 9], ([6],)),
    ]
    cached = [("r", False, [], ([],), 3)]
    scheduled = {"scored": 3, "r": 3, "plain": 2}
    step = fakes.step(new, cached, scheduled, drafts={"r": [text[1], 0]})
    result = runner.sample_tokens(runner.execute_model(step))
    assert model.batches[-1].token_ids.tolist() == [1, 2, 3, text[0], text[1], 0, 8, 9]
    assert model.batches[-1].logits_rows.tolist() == [2, 3, 4, 5, 7, 0, 1]
    assert result.sampled_token_ids == {
        "scored": fakes.continue_text([1, 2, 3], 1),
        "r": text[1:3],
        "plain": fakes.continue_text([8, 9], 1),
    }
    assert [entry.token_id for entry in result.prompt_logprobs["scored"]] == [2, 3]


def test_a_row_that_fails_counts_only_where_it_would_have_come(fakes):
    """NaN behind an accepted draft comes in a later step; behind a rejected one, never."""
    model = fakes.model()
    runner, text = start(fakes, model)
    model.nan_token = text[2]
    result = run_drafts(fakes, runner, text[1:5])
    assert (result.sampled_token_ids, result.errors) == ({"r": text[1:3]}, {})

    runner, text = start(fakes, model := fakes.model())
    wrong = model.nan_token = next(t for t in range(fakes.vocab_size) if t not in text)
    result = run_drafts(fakes, runner, [wrong, wrong])
    assert (result.sampled_token_ids, result.errors) == ({"r": [text[1]]}, {})

    runner, text = start(fakes, model := fakes.model())
    model.nan_token = text[0]
    result = run_drafts(fakes, runner, text[1:5])
    assert result.sampled_token_ids == {}
    assert "NaN" in result.errors["r"]


def test_each_row_obeys_a_row_of_the_mask(fakes):
    """The model wants `text`; the mask allows it once, and then drafts it would not have drawn."""
    runner, text = start(fakes, fakes.model())
    drafts = [text[1], 50, 60]
    bits = np.zeros((5, 4), np.uint32)  # 101 tokens
    for row, token_id in enumerate([0, text[1], 50, 60, 70]):
        bits[row, token_id // 32] = 1 << token_id % 32
    result = run_drafts(fakes, runner, drafts, TokenMask({"r": 1}, bits))
    assert result.sampled_token_ids == {"r": [text[1], 50, 60, 70]}


@pytest.mark.parametrize("drafts", [[], [1]])
def test_a_request_in_the_middle_of_its_prompt_has_no_row(fakes, drafts):
    model = fakes.model()
    runner, text = start(fakes, model)
    new = [fakes.new_request("long", list(range(9)), ([5, 6, 7],))]
    cached = [("r", False, [], ([],), 3)]
    scheduled = {"long": 4, "r": 1 + len(drafts)}
    step = fakes.step(new, cached, scheduled, drafts={"r": drafts} if drafts else {})
    result = runner.sample_tokens(runner.execute_model(step))
    assert model.batches[-1].logits_rows.tolist() == [4, 5][: 1 + len(drafts)]
    assert result.sampled_token_ids.keys() == {"r"}
    assert result.sampled_token_ids["r"][0] == text[1]
