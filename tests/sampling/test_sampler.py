import itertools
import math
import tracemalloc

import numpy as np
import pytest

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.sampler import Sampler, SamplingRow, derive_seed, draw_uniform

CHI_SQUARE_BOUND = 35.0  # of 7 degrees of freedom; a right distribution passes it 1 in 100,000


def row(prompt=(), output=(), **given) -> SamplingRow:
    params = ResolvedSamplingParams(**{"seed": 0, "max_tokens": 1000} | given)
    return SamplingRow(params, prompt, output)


def sample(logits, rows):
    logits = np.asarray(logits, np.float32)
    return Sampler(logits.shape[1]).sample(logits, rows)


def test_greedy_takes_the_lowest_id_of_the_best():
    result = sample([[1, 5, 5, 0], [7, 7, 7, 7]], [row(temperature=0.0)] * 2)
    assert result.token_ids == [1, 0]
    assert result.logprobs == [None, None]
    assert result.errors == {}


def test_a_grammar_leaves_only_the_tokens_of_its_bits():
    bits = np.array([[0b1001, 0], [0, 0b10]], np.uint32)  # tokens 0 and 3; token 33
    logits = np.arange(40, dtype=np.float32) * np.ones((4, 1), np.float32)
    rows = [row(temperature=0.0)] * 3 + [row(temperature=5.0)]
    result = Sampler(40).sample(logits, rows, bits, [0, -1, 1, 1])
    assert result.token_ids == [3, 39, 33, 33]
    empty = Sampler(40).sample(logits[:1], rows[:1], np.zeros((1, 2), np.uint32), [0])
    assert "leave no token" in empty.errors[0]


def test_greedy_applies_penalties_and_masks():
    rows = [
        row(temperature=0.0, output=[1, 1], frequency_penalty=2.0),
        row(temperature=0.0, prompt=[1], repetition_penalty=2.0),
        row(temperature=0.0, logit_bias={0: 10}),
        row(temperature=0.0, bad_words_token_ids=((1,),)),
        row(temperature=0.0, min_tokens=1, eos_token_ids=frozenset({1, 2})),
        row(temperature=0.0, min_tokens=1, eos_token_ids=frozenset({1, 2}), output=[0]),
    ]
    assert sample([[1, 5, 4, 0]] * 6, rows).token_ids == [2, 2, 0, 2, 0, 1]


def test_no_rows():
    assert sample(np.zeros((0, 4)), []).token_ids == []


def test_rows_and_logits_must_match():
    with pytest.raises(ValueError, match="logits are"):
        sample(np.zeros((2, 4)), [row()])


def test_a_seeded_token_depends_on_seed_and_index_alone():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(40, 100)).astype(np.float32)
    rows = [row(seed=derive_seed(9, i % 5), output=range(i)) for i in range(40)]
    together = sample(logits, rows).token_ids
    backwards = sample(logits[::-1], rows[::-1]).token_ids[::-1]
    alone = [sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0] for i in range(40)]
    assert together == backwards == alone
    assert len(set(together)) > 20


def test_draws_are_distinct_uniform_numbers():
    draws = [draw_uniform(seed, index) for seed in range(40) for index in range(50)]
    assert draws == [draw_uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(draws)) == len(draws)
    assert 0.0 <= min(draws) < max(draws) < 1.0
    assert np.mean(draws) == pytest.approx(0.5, abs=0.03)


def test_derived_seeds_differ_and_fit():
    seeds = {derive_seed(base, index) for base in (0, 1, 11, 2**63 - 1) for index in range(200)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 11) != derive_seed(11, 1)
    assert derive_seed(0, 0) == 6213027144842677344  # the same in every process, for ever


@pytest.mark.parametrize("varied", ["seed", "index"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.7, "presence_penalty": 0.5, "logit_bias": {3: 1.0}},
    ],
)
def test_frequencies_follow_the_distribution(scale, varied, given):
    """20,000 draws with --full. The expected shares come from the definitions."""
    # Over growing outputs the penalties' work grows as well, so these stay fewer.
    num_draws = 1000 * (scale if varied == "seed" else min(scale, 5))
    logits = np.array([0.3, -0.2, 1.0, 0.5, -1.0, 0.0, 0.8, -0.5])
    shares = expected_shares(logits, **given)
    if varied == "seed":
        rows = [row(**given, seed=derive_seed(1, i), output=[2]) for i in range(num_draws)]
    else:
        # Only token 2 was generated, however long the output is.
        rows = [row(**given, seed=1, output=np.full(i + 1, 2)) for i in range(num_draws)]
    drawn = sample(np.tile(logits, (num_draws, 1)), rows).token_ids
    counts = np.bincount(drawn, minlength=8)
    assert chi_square(counts, shares) < CHI_SQUARE_BOUND
    # The same counts must not fit other parameters, or the bound would prove nothing.
    other = expected_shares(logits, **({"temperature": 0.7} if not given else {}))
    assert chi_square(counts, other) > CHI_SQUARE_BOUND


def expected_shares(logits, temperature=1.0, top_k=8, top_p=1.0, min_p=0.0, **penalties):
    values = logits.tolist()
    if penalties:
        values[3] += 1.0
        values[2] = values[2] / 1.7 - 0.5
    powers = {i: math.exp(value / temperature) for i, value in enumerate(values)}
    best = max(powers.values())
    ranked = sorted(powers, key=lambda i: -powers[i])[:top_k]
    ranked = [i for i in ranked if powers[i] >= min_p * best]
    total = sum(powers[i] for i in ranked)
    mass, stays = 0.0, []
    for i in ranked:
        if mass < top_p * total:
            stays.append(i)
        mass += powers[i]
    total = sum(powers[i] for i in stays)
    return [powers[i] / total if i in stays else 0.0 for i in range(8)]


def chi_square(counts, shares):
    num_draws = counts.sum()
    if any(count and not share for count, share in zip(counts, shares, strict=True)):
        return math.inf
    return sum(
        (count - num_draws * share) ** 2 / (num_draws * share)
        for count, share in zip(counts, shares, strict=True)
        if share
    )


def test_logprobs_are_of_the_raw_distribution():
    given = {"temperature": 0.0, "logit_bias": {0: 50.0}}
    result = sample([[0.0, math.log(3)]] * 3, [row(**given, logprobs=k) for k in (0, 1)] + [row()])
    assert result.token_ids[:2] == [0, 0]
    without, with_top, nothing = result.logprobs
    assert (without.token_id, without.rank, without.top) == (0, 2, ())
    assert without.logprob == pytest.approx(math.log(0.25))
    assert with_top.top == ((1, pytest.approx(math.log(0.75))),)
    assert nothing is None


@pytest.mark.parametrize(
    ("bad", "message"), [(np.nan, "NaN"), (np.inf, "+inf"), (-np.inf, "only -inf")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(bad, message, temperature):
    logits = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 2]], np.float32)
    rows = [row(temperature=temperature, logprobs=1)] * 3
    good = sample(logits, rows)
    logits[1] = bad
    result = sample(logits, rows)
    assert list(result.errors) == [1]
    assert message in result.errors[1]
    assert result.logprobs[1] is None
    assert [result.token_ids[i] for i in (0, 2)] == [good.token_ids[i] for i in (0, 2)]
    assert [result.logprobs[i] for i in (0, 2)] == [good.logprobs[i] for i in (0, 2)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_is_enough(temperature):
    logits = np.zeros((1, 50), np.float32)
    logits[0, 33] = np.nan
    assert "NaN" in sample(logits, [row(temperature=temperature)]).errors[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_left_fails_alone(temperature):
    banned = ((0,), (1,), (2,))
    rows = [row(temperature=temperature, bad_words_token_ids=banned[:n]) for n in (3, 2)]
    result = sample([[5, 5, 1]] * 2, rows)
    assert list(result.errors) == [0]
    assert "bad_words" in result.errors[0]
    assert result.token_ids[1] == 2


def test_masked_logits_of_the_model_are_no_error():
    result = sample([[-math.inf, 0.0, -math.inf]] * 2, [row(temperature=0.0), row()])
    assert result.token_ids == [1, 1]
    assert result.errors == {}


@pytest.mark.parametrize("point", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_draw_fall_on_tokens_with_weight(monkeypatch, point):
    monkeypatch.setattr("kvloom.sampling.sampler.draw_uniform", lambda seed, index: point)
    logits = [[-math.inf, 0.0, -1000.0, 1.0, -math.inf, -1000.0]]
    assert sample(logits, [row()]).token_ids == [1 if point == 0.0 else 3]


def test_scratch_covers_every_way_of_sampling():
    """Whoever plans memory counts it before it is known what requests will ask for."""
    vocab_size = 20_000
    sampler = Sampler(vocab_size)
    peaks = []
    ways = {
        "temperature": (0.0, 1.0),
        "top_k": (0, vocab_size - 1),
        "min_p": (0.0, 1e-9),
        "top_p": (1.0, 0.999_999),
        "logprobs": (None, 20),
        "presence_penalty": (0.0, 0.5),
    }
    for values in itertools.product(*ways.values()):
        given = dict(zip(ways, values, strict=True))
        sampled = row(prompt=range(500), output=range(500), repetition_penalty=1.5, **given)
        logits = np.zeros((1, vocab_size), np.float32)  # equal ones: none is ever left out
        tracemalloc.start()
        assert sampler.sample(logits, [sampled]).errors == {}
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert 0.5 * sampler.scratch_bytes < max(peaks) <= sampler.scratch_bytes
