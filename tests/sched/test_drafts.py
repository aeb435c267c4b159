"""Drafts: where they come from, what room they get, and what a step leaves of them."""

from __future__ import annotations

import random

import pytest

from drafting import Guesser, Listed, next_token
from kvloom.config import SpeculativeConfig
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.drafts import NgramProposer, make_speculation
from kvloom.step import MAX_EXTRA_LOGITS_ROWS
from visibility import Kind

MIXTURES = [
    [Kind("full", 4)],
    [Kind("full", 8), Kind("window", 4, 30)],
    [Kind("full", 4), Kind("window", 8, 16), Kind("window", 4, 33)],
    [Kind("latent", 4), Kind("chunk", 8, 64)],
]


def text_of(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


# --- n-grams ----------------------------------------------------------------------------------


def proposal(text, smallest, largest, num_tokens):
    """By the definition: every earlier place, the one where most tokens agree, the latest such."""

    def num_equal(end):
        num = 0
        while num < min(largest, end) and text[end - 1 - num] == text[-1 - num]:
            num += 1
        return num

    ends = [end for end in range(1, len(text)) if num_equal(end) >= smallest][-16:]
    if not ends:
        return []
    best = max(ends, key=lambda end: (num_equal(end), end))
    longer = list(text)
    for i in range(num_tokens):
        longer.append(longer[best + i])
    return longer[len(text) :]


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_what_followed_the_last_tokens_before_is_proposed(smallest, largest, scale):
    rng = random.Random(smallest * 10 + largest)
    config = SpeculativeConfig(6, smallest, largest)
    num_drafts = 0
    for number in range(30 * scale):
        proposer = NgramProposer(config)
        text = rng.choices(range(3), k=rng.randint(1, 12))
        for _ in range(40):
            most = rng.randint(1, 6)
            drafts = proposer.propose("r", text, most)
            assert drafts == proposal(text, smallest, largest, most), number
            num_drafts += len(drafts)
            text += rng.choices(range(3), k=rng.choice([0, 1, 1, 1, 3]))
    assert num_drafts > 0


def test_a_proposal_goes_on_from_itself_where_the_text_repeats():
    proposer = NgramProposer(SpeculativeConfig(7, 2, 3))
    assert proposer.propose("r", [9, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert proposer.propose("s", [9, 5, 5, 5], 3) == [5, 5, 5]
    assert proposer.propose("t", [1, 2, 3, 4], 7) == []


def test_a_request_that_ended_is_forgotten():
    """Its id may come again with another text."""
    proposer = NgramProposer(SpeculativeConfig(2, 1, 1))
    assert proposer.propose("r", [7, 8, 9, 7], 2) == [8, 9]
    proposer.forget("r")
    assert proposer.propose("r", [1, 2, 3, 4, 5, 1], 2) == [2, 3]
    proposer.forget("unknown")


def test_off_means_none():
    assert make_speculation(SpeculativeConfig(), 100) is None


# --- a step -----------------------------------------------------------------------------------


def test_accepted_drafts_and_one_more_become_tokens(setup):
    s = setup(block_size=4, speculation=(Guesser(), 5))
    s.add("r", range(3), max_tokens=20)
    s.step()
    output = s.schedule()
    text = text_of(range(3), 20)
    assert output.scheduled_spec_decode_tokens == {"r": text[1:6]}
    assert output.num_scheduled_tokens == {"r": 6}
    assert output.total_num_scheduled_tokens == 6
    assert output.scheduled_cached_reqs.num_computed_tokens == [3]
    assert output.scheduled_cached_reqs.new_block_ids == [([2, 3],)]  # slots 3 to 8
    [event] = s.update(output)
    assert event.new_token_ids == text[1:7]
    output = s.schedule()
    assert output.scheduled_cached_reqs.num_computed_tokens == [9]
    [event] = s.update(output)
    assert event.new_token_ids == text[7:13]
    assert s.scheduler.stats.num_draft_tokens == 10
    assert s.scheduler.stats.num_accepted_tokens == 10


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_rejected_drafts_are_computed_over(setup, num_right):
    text = text_of(range(3), 20)
    drafts = [*text[1 : 1 + num_right], *[text[1 + num_right] + 1] * (4 - num_right)]
    s = setup(block_size=4, speculation=(Listed(drafts), 4))
    request = s.add("r", range(3), max_tokens=20)
    s.step()
    output, [event] = s.step()
    assert output.scheduled_cached_reqs.new_block_ids == [([2],)]  # slots 3 to 7
    assert event.new_token_ids == text[1 : 2 + num_right]
    assert request.num_computed_tokens == request.num_tokens - 1 == 4 + num_right
    output = s.schedule()
    assert output.scheduled_spec_decode_tokens == {}
    assert output.num_scheduled_tokens == {"r": 1}
    assert output.scheduled_cached_reqs.num_computed_tokens == [4 + num_right]
    assert output.scheduled_cached_reqs.new_block_ids == [([],)]  # the slots are there
    s.update(output)
    stats = s.scheduler.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, num_right)
    s.finish_all()
    assert request.output_token_ids == text


def test_a_stop_token_among_accepted_drafts_ends_the_text_there(setup):
    text = text_of(range(3), 20)
    s = setup(speculation=(Guesser(), 6))
    s.add("r", range(3), max_tokens=20, stop_token_ids=(text[3],), min_tokens=2)
    [last] = s.finish_all()
    assert (last.finish_reason, last.stop_reason) == ("stop", text[3])
    assert last.new_token_ids == text[1:4]


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(7, 512), (500, 10)])
def test_no_draft_lies_beyond_the_end(setup, max_tokens, max_model_len):
    """The last token is sampled behind a draft at most: 7 tokens, two of the step before."""
    s = setup(speculation=(Guesser(), 4), max_model_len=max_model_len)
    request = s.add("r", range(3), max_tokens=max_tokens)
    outputs = [output for output, _ in s.run_out()]
    assert [sum(output.num_scheduled_tokens.values()) for output in outputs] == [3, 5, 1]
    assert request.num_output_tokens == 7
    assert request.status is RequestStatus.FINISHED_LENGTH


# --- room -------------------------------------------------------------------------------------


def test_drafts_leave_a_token_of_the_budget_to_everybody(setup, fresh):
    s = setup(speculation=(Guesser(), 4), max_num_batched_tokens=6)
    for name in "abc":
        s.add(name, fresh(2), max_tokens=50)
    s.step()
    output = s.schedule()
    assert output.num_scheduled_tokens == {"a": 4, "b": 1, "c": 1}
    assert output.scheduled_spec_decode_tokens.keys() == {"a"}


def test_a_request_has_no_more_tokens_with_drafts_than_a_step_gives_to_one(setup, fresh):
    s = setup(speculation=(Guesser(), 6), prefill_segment=4)
    for name in "abcdef":
        s.add(name, fresh(2), max_tokens=50)
    s.step()
    assert set(s.schedule().num_scheduled_tokens.values()) == {4}


def test_drafts_and_scored_prompts_share_the_rows_of_logits(setup, fresh):
    s = setup(speculation=(Guesser(), 60))
    for name in "abcdef":
        s.add(name, fresh(2), max_tokens=100)
    s.step()
    s.add("scored", fresh(300), max_tokens=2, prompt_logprobs=0)
    output = s.schedule()
    num_drafts = [len(d) for d in output.scheduled_spec_decode_tokens.values()]
    assert num_drafts == [60, 60, 60, 60, MAX_EXTRA_LOGITS_ROWS - 240]
    assert output.num_scheduled_tokens["f"] == output.num_scheduled_tokens["scored"] == 1


def test_no_one_gives_way_to_a_draft(setup, fresh):
    """Four blocks for two requests that hold two each: there is no slot behind the fourth."""
    s = setup(num_blocks=5, block_size=4, max_model_len=16, speculation=(Guesser(), 4))
    for name in "ab":
        s.add(name, fresh(6), max_tokens=2)
    s.step()
    output = s.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    s.update(output)
    assert s.scheduler.stats.num_preemptions == 0


def test_a_draft_is_cut_where_the_reserve_ends(setup, fresh):
    """Window 8 at block size 4: 3 steady blocks; a step of 24 tokens reserves 6 above them.

    The query at 18 sees from 11 on, in column 2. A draft at 20 needs column 5, the fourth.
    """
    positions = range(3, 18)
    drafts = [[]] * 8 * len(positions) + [[0, 0]] * 8
    s = setup(
        kinds=[Kind("window", 4, 8)],
        max_model_len=64,
        max_num_batched_tokens=24,
        speculation=(Listed(*drafts), 2),
    )
    for i in range(8):
        s.add(str(i), fresh(3), max_tokens=40)
    s.step()
    for position in positions:
        assert set(s.step()[0].scheduled_cached_reqs.num_computed_tokens) == {position}
    output = s.schedule()
    assert set(output.scheduled_cached_reqs.num_computed_tokens) == {18}
    assert [len(d) for d in output.scheduled_spec_decode_tokens.values()] == [2] * 6 + [1] * 2


# --- the cache --------------------------------------------------------------------------------


def test_a_block_is_found_by_what_was_accepted_and_never_by_a_draft(setup):
    text = text_of(range(3), 20)
    wrong = [*text[1:4], text[4] + 1, 0, 0, 0, 0]
    s = setup(block_size=4, speculation=(Listed(wrong), 8))
    s.add("r", range(3), max_tokens=9)
    s.step()
    s.step()  # known: 3 + 1 + 3 + 1; slots 0 to 11 hold 4, then three drafts, then others
    for prefix, num_hit in [
        ([*range(3), text[0], *wrong], 4),
        ([*range(3), *text[:4], text[4] + 1, 5], 4),
    ]:
        probe = Request("probe", prefix, ResolvedSamplingParams(seed=0, max_tokens=1))
        assert s.manager.get_computed_blocks(probe).num_tokens == num_hit
    s.finish_all()
    again = s.add("again", [*range(3), *text[:8]], max_tokens=1)
    s.finish_all()
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("kinds", MIXTURES, ids=lambda kinds: "+".join(map(str, kinds)))
@pytest.mark.parametrize("num_blocks", [60, 400])
def test_texts_are_those_without_drafts(setup, fresh, kinds, num_blocks):
    """In a pool that preempts and in one that does not."""
    s = setup(
        num_blocks,
        kinds=kinds,
        max_model_len=128,
        max_num_batched_tokens=24,
        speculation=(Guesser(error_rate=0.2, seed=num_blocks), 6),
    )
    prompts = [fresh(5 + 7 * i) for i in range(6)]
    requests = [s.add(str(i), prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    s.run_out()
    assert [r.output_token_ids for r in requests] == [text_of(p, 40) for p in prompts]
    assert s.manager.num_used_blocks == 0
    stats = s.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (num_blocks < 400)


def test_whoever_ends_is_forgotten_in_any_state(setup, fresh):
    guesser = Guesser()
    s = setup(speculation=(guesser, 4), max_num_seqs=1)
    for name in ("running", "waiting"):
        s.add(name, fresh(6), max_tokens=20)
    s.step()
    output = s.schedule()
    s.scheduler.finish_requests(["running", "waiting"], RequestStatus.FINISHED_ABORT)
    assert s.update(output, sampled_token_ids={"running": [1, 2]}) == []
    assert sorted(guesser.forgotten) == ["running", "waiting"]
    assert s.manager.num_used_blocks == 0
