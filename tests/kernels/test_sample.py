"""The native sampler chooses the very tokens that the numpy sampler does, for the same reasons."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.logprobs import prompt_logprobs
from kvloom.sampling.native import _RECORD, NativeSampler
from kvloom.sampling.sampler import Sampler, SamplingRow, draw_uniform

SPANS = ("prompt", "output", "bias", "banned")
VOCAB_SIZES = (1, 32, 50, 333, 4096, 49_152)  # below a block of 64, at its end, with odd tails


@pytest.fixture(scope="module")
def team(native):
    return native.ThreadTeam(2)


def make_row(prompt=(), output=(), **given) -> SamplingRow:
    params = ResolvedSamplingParams(**{"seed": 0, "max_tokens": 1000} | given)
    return SamplingRow(params, list(prompt), list(output))


def random_row(rng, vocab_size) -> SamplingRow:
    """Any combination of parameters, each off in about half of the rows."""

    def maybe(*values):
        return values[rng.integers(len(values))] if rng.random() < 0.5 else None

    some_ids = rng.integers(0, vocab_size, 6).tolist()
    output = rng.choice(some_ids, rng.integers(0, 12)).tolist()
    given = {
        "temperature": maybe(0.0, 0.3, 1e-6, 1.7, 50.0),
        "top_k": maybe(1, 2, 50, vocab_size - 1, vocab_size, 10**30),
        "top_p": maybe(0.05, 0.5, 0.9, 0.999),
        "min_p": maybe(0.001, 0.05, 0.7, 1.0),
        "repetition_penalty": maybe(0.5, 1.3, 100.0),
        "frequency_penalty": maybe(-1.0, 0.4, 2.0),
        "presence_penalty": maybe(-0.5, 1.1),
        "logit_bias": maybe({some_ids[0]: 2.5, some_ids[1]: -100.0}, {some_ids[2]: 100.0}),
        "min_tokens": maybe(3, 20),
        "bad_words_token_ids": maybe(((some_ids[0],), (some_ids[1], some_ids[2]))),
        "logprobs": maybe(0, 1, 7, 50),
    }
    return make_row(
        prompt=rng.integers(0, vocab_size, rng.integers(0, 40)),
        output=output,
        seed=int(rng.integers(2**63)),
        stop_token_ids=tuple(some_ids[3:4]),
        eos_token_ids=frozenset(some_ids[4:]),
        **{name: value for name, value in given.items() if value is not None},
    )


def random_logits(kind, rng, shape):
    logits = rng.normal(0.0, 4.0, shape).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "flat":
        return logits / np.float32(4000.0)
    if kind == "equal":
        return np.full(shape, -3.25, np.float32)
    if kind == "masked":
        is_open = rng.random(shape) < 0.1
        is_open[:, rng.integers(shape[1])] = True
        return np.where(is_open, logits, np.float32(-np.inf))
    if kind == "huge":
        return logits * np.float32(1e30)
    if kind == "tiny":
        return logits * np.float32(1e-40)
    assert kind == "normal"
    return logits


def assert_same(found, expected):
    assert found.token_ids == expected.token_ids
    assert found.errors == expected.errors
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        assert_same_score(a, b)


def assert_same_score(found, expected):
    if expected is None:
        assert found is None
        return
    assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
    assert [i for i, _ in found.top] == [i for i, _ in expected.top]
    values = [p for _, p in found.top], [p for _, p in expected.top]
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5, rel=1e-6)
    assert values[0] == pytest.approx(values[1], abs=1e-5, rel=1e-6)


def test_uniform_numbers_are_numpys(native):
    rng = np.random.default_rng(1)
    seeds = [0, 1, 2**63 - 1, *rng.integers(2**63, size=1000).tolist()]
    indices = [0, 2**31, 2**40, *rng.integers(100_000, size=1000).tolist()]
    for seed, index in zip(seeds, indices, strict=True):
        assert native.draw_uniform(seed, index) == draw_uniform(seed, index)


def test_a_record_is_the_librarys_struct(native):
    assert _RECORD.itemsize == native.sample_row_bytes


@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "equal", "masked", "huge", "tiny"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equal_to_numpy(scale, native, team, vocab_size, kind):
    rng = np.random.default_rng([2, vocab_size])
    num_rows = 60 * scale if vocab_size < 4096 else 12 * scale
    logits = random_logits(kind, rng, (num_rows, vocab_size))
    rows = [random_row(rng, vocab_size) for _ in range(num_rows)]
    found = NativeSampler(native, team, vocab_size).sample(logits, rows)
    assert_same(found, Sampler(vocab_size).sample(logits, rows))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.02},
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"temperature": 1e6, "top_p": 0.5},
    ],
)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_one_parameter_at_a_time(native, team, given, spread):
    rng = np.random.default_rng(3)
    logits = rng.normal(0.0, spread, (40, 1000)).astype(np.float32)
    rows = [make_row(output=[0] * i, seed=7, **given) for i in range(40)]
    found = NativeSampler(native, team, 1000).sample(logits, rows)
    assert_same(found, Sampler(1000).sample(logits, rows))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_does_not_depend_on_its_batch(native, num_threads):
    rng = np.random.default_rng(4)
    logits = random_logits("normal", rng, (25, 333))
    rows = [random_row(rng, 333) for _ in range(25)]
    sampler = NativeSampler(native, native.ThreadTeam(num_threads), 333)
    together = sampler.sample(logits, rows)
    for i in range(25):
        alone = sampler.sample(logits[i : i + 1], rows[i : i + 1])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_rows_of_a_wider_array_are_read_where_they_are(native, team):
    wide = np.random.default_rng(5).normal(size=(6, 96)).astype(np.float32)
    wide[:, 50:] = np.nan
    rows = [make_row(temperature=t, logprobs=2) for t in (0.0, 1.0)] * 3
    found = NativeSampler(native, team, 50).sample(wide[:, :50], rows)
    assert_same(found, Sampler(50).sample(wide[:, :50], rows))


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 17, 63, 64, 98, 99])
def test_a_bad_row_fails_alone(native, team, given, bad, place):
    logits = np.random.default_rng(6).normal(size=(3, 100)).astype(np.float32)
    logits[:, 40:60] = -np.inf
    logits[1, place] = bad
    rows = [make_row(logprobs=1, **given)] * 3
    found = NativeSampler(native, team, 100).sample(logits, rows)
    assert list(found.errors) == [1]
    assert_same(found, Sampler(100).sample(logits, rows))


def test_rows_without_a_token(native, team):
    logits = np.zeros((4, 3), np.float32)
    logits[2] = -np.inf
    logits[3] = [np.nan, np.inf, -np.inf]
    banned = ((0,), (1,), (2,))
    rows = [make_row(bad_words_token_ids=banned[:n], logprobs=3) for n in (3, 2, 0, 0)]
    found = NativeSampler(native, team, 3).sample(logits, rows)
    assert sorted(found.errors) == [0, 2, 3]
    assert found.token_ids == [0, 2, 0, 0]
    assert_same(found, Sampler(3).sample(logits, rows))


def test_no_rows(native, team):
    found = NativeSampler(native, team, 50).sample(np.zeros((0, 50), np.float32), [])
    assert (found.token_ids, found.logprobs, found.errors) == ([], [], {})


@pytest.mark.parametrize("vocab_size", [32, 50, 333])
def test_a_grammar_masks_tokens(native, team, vocab_size):
    """Masking by bits is masking by -inf; log-probabilities stay the model's own."""
    rng = np.random.default_rng(7)
    logits = random_logits("normal", rng, (30, vocab_size))
    rows = [random_row(rng, vocab_size) for _ in range(30)]
    is_allowed = rng.random((4, vocab_size)) < 0.5
    is_allowed[2], is_allowed[3] = True, False
    grammar_rows = rng.integers(-1, 4, 30)
    masked = np.where(is_allowed[grammar_rows] | (grammar_rows < 0)[:, None], logits, -np.inf)
    padded = np.zeros((4, -(-vocab_size // 32) * 32), bool)
    padded[:, :vocab_size] = is_allowed
    words = np.packbits(padded, axis=1, bitorder="little").view("<u4")
    sampler = NativeSampler(native, team, vocab_size)
    found = sampler.sample(logits, rows, words, grammar_rows.tolist())
    expected = Sampler(vocab_size).sample(masked.astype(np.float32), rows)
    assert found.token_ids == expected.token_ids
    assert found.errors.keys() == expected.errors.keys()
    plain = Sampler(vocab_size).sample(logits, rows)
    for i, score in enumerate(found.logprobs):
        if score is not None:
            top = plain.logprobs[i].top
            assert [token_id for token_id, _ in score.top] == [token_id for token_id, _ in top]
            assert [p for _, p in score.top] == pytest.approx([p for _, p in top], abs=1e-5)


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "equal", "huge"])
@pytest.mark.parametrize("vocab_size", [1, 50, 4096])
@pytest.mark.parametrize("num_top", [0, 3, 50])
def test_prompt_tokens_are_scored(native, team, vocab_size, kind, num_top):
    rng = np.random.default_rng(8)
    logits = random_logits(kind, rng, (9, vocab_size))
    token_ids = rng.integers(0, vocab_size, 9).tolist()
    found = NativeSampler(native, team, vocab_size).prompt_logprobs(logits, token_ids, num_top)
    expected = prompt_logprobs(logits, token_ids, num_top)
    for a, b in zip(found, expected, strict=True):
        assert_same_score(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_prompt_row_without_a_distribution_is_nan(native, team, bad):
    logits = np.zeros((2, 70), np.float32)
    logits[0, 66] = bad
    if bad == -np.inf:
        logits[0] = bad
    broken, whole = NativeSampler(native, team, 70).prompt_logprobs(logits, [1, 1], 2)
    assert math.isnan(broken.logprob)
    assert all(math.isnan(p) for _, p in broken.top)
    assert whole.logprob == pytest.approx(-math.log(70))


class TestHostileInput:
    """Whatever comes from Python ends in an exception, never in a crash."""

    VOCAB = 50

    def sample(self, native, rows=2, *, records=None, logits=None, edits=None, **changed):
        if records is None:
            records = np.zeros(rows, _RECORD)
            records["top_p"] = records["repetition_penalty"] = 1.0
            records["num_logprobs"] = records["grammar_row"] = -1
        for name, value in changed.items():
            if name in SPANS:
                first = 2 * SPANS.index(name)
                records["spans"][:, first : first + 2] = value
            else:
                records[name] = value
        if logits is None:
            logits = np.zeros((rows, self.VOCAB), np.float32)
        arrays = {
            "history": np.arange(10, dtype=np.int32),
            "bias_ids": np.arange(4, dtype=np.int32),
            "bias_values": np.zeros(4),
            "banned_ids": np.arange(4, dtype=np.int32),
            "grammar": None,
        }
        scores = native.SampleScores(
            logprobs=np.empty(2),
            ranks=np.empty(2, np.int32),
            top_ids=np.empty((2, 3), np.int32),
            top_logprobs=np.empty((2, 3)),
        )
        chosen = np.full((2, rows), -1, np.int32)
        native.TokenSampler(native.ThreadTeam(1), self.VOCAB).sample(
            logits,
            records.view(np.uint8).reshape(rows, -1),
            chosen,
            native.SampleEdits(**arrays | (edits or {})),
            scores,
        )
        return chosen.tolist()

    def test_the_harness_itself_is_right(self, native):
        assert self.sample(native) == [[0, 0], [0, 0]]
        assert self.sample(native, banned=(0, 2), num_logprobs=3) == [[2, 2], [0, 0]]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", np.nan),
            ("temperature", -1.0),
            ("temperature", np.inf),
            ("top_p", 0.0),
            ("top_p", np.nan),
            ("min_p", 1.5),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", np.nan),
            ("frequency_penalty", np.inf),
            ("presence_penalty", np.nan),
            ("top_k", -1),
            ("num_logprobs", 4),
            ("num_logprobs", -2),
            ("output_index", -1),
            ("grammar_row", 0),
            ("grammar_row", -2),
            ("bias", (0, 5)),
            ("bias", (-1, 1)),
            ("bias", (2**63 - 1, 2**63 - 1)),
            ("banned", (5, 0)),
            ("banned", (1, -1)),
        ],
    )
    def test_records(self, native, name, value):
        with pytest.raises(ValueError, match=r"."):
            self.sample(native, **{name: value})

    @pytest.mark.parametrize("name", ["prompt", "output"])
    def test_history_spans(self, native, name):
        assert self.sample(native, **{name: (4, 7)}) == [[0, 0], [0, 0]]  # nothing reads it
        with pytest.raises(ValueError, match="span"):
            self.sample(native, repetition_penalty=2.0, **{name: (4, 7)})

    @pytest.mark.parametrize(
        ("name", "used"),
        [("history", "output"), ("bias_ids", "bias"), ("banned_ids", "banned")],
    )
    @pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
    def test_ids(self, native, name, used, bad):
        ids = np.array([1, 2, bad, 3], np.int32)
        edits = {name: ids}
        assert self.sample(native, edits=edits, presence_penalty=1.0, **{used: (0, 2)})[1] == [0, 0]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            self.sample(native, edits=edits, presence_penalty=1.0, **{used: (0, 3)})

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_bias_values(self, native, bad):
        with pytest.raises(ValueError, match="finite"):
            self.sample(native, edits={"bias_values": np.array([0, 0, bad, 0])}, bias=(0, 3))
        with pytest.raises(ValueError, match="length"):
            self.sample(native, edits={"bias_values": np.zeros(3)}, bias=(0, 3))

    def test_grammar_shape(self, native):
        edits = {"grammar": np.zeros((1, 1), np.uint32)}
        with pytest.raises(ValueError, match="fewer bits"):
            self.sample(native, edits=edits, grammar_row=0)

    @pytest.mark.parametrize("shape", [(2, 49), (1, 50), (3, 50), (2, 100)])
    def test_logits_shape(self, native, shape):
        with pytest.raises(ValueError, match="logits"):
            self.sample(native, logits=np.zeros(shape, np.float32))

    def test_logits_strides_and_type(self, native):
        with pytest.raises(ValueError, match="together"):
            self.sample(native, logits=np.zeros((50, 2), np.float32).T)
        for other in (np.zeros((2, 50)), np.zeros((2, 50), np.int32), np.zeros(100, np.float32)):
            with pytest.raises(TypeError):
                self.sample(native, logits=other)

    def test_record_size(self, native):
        with pytest.raises(ValueError, match="record"):
            self.sample(native, records=np.zeros(2, "u1"))

    @pytest.mark.parametrize("vocab_size", [0, -1, 2**24 + 1, 2**40])
    def test_vocab_size(self, native, vocab_size):
        with pytest.raises(ValueError, match="vocab_size"):
            native.TokenSampler(native.ThreadTeam(1), vocab_size)

    @pytest.mark.parametrize("token_id", [-1, 50])
    def test_scored_ids(self, native, token_id):
        sampler = NativeSampler(native, native.ThreadTeam(1), 50)
        with pytest.raises(ValueError, match="vocabulary"):
            sampler.prompt_logprobs(np.zeros((1, 50), np.float32), [token_id], 1)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_scratch_is_what_each_thread_allocates(native, num_threads):
    """Doubles of logits, weights and values, three ids, weighted ids; two maxima per 64 logits.

    For each thread of the team, and for a caller that does not wake it.
    """
    vocab_size = 4096
    sampler = NativeSampler(native, native.ThreadTeam(num_threads), vocab_size)
    per_thread = vocab_size * (3 * 8 + 3 * 4 + 16) + vocab_size // 64 * 2 * 8
    assert sampler.scratch_bytes == (num_threads + 1) * per_thread


def test_a_call_that_was_started_ends_as_one_that_was_waited_for(native, team):
    rng = np.random.default_rng(5)
    sampler = NativeSampler(native, team, 333)
    for num_rows in (0, 1, 2, 17):
        rows = [random_row(rng, 333) for _ in range(num_rows)]
        logits = random_logits("normal", rng, (num_rows, 333))
        expected = sampler.sample(logits, rows)
        started = sampler.start(logits, rows)
        if num_rows > 2:  # what comes between finishes it first, and its result is kept
            assert sampler.sample(logits[:2], rows[:2]).token_ids == expected.token_ids[:2]
        assert started.finish() == expected
        assert started.token_ids.tolist() == expected.token_ids


def test_a_call_that_nobody_finished_is_finished_by_the_next(native, team):
    sampler, logits = NativeSampler(native, team, 50), np.zeros((2, 50), np.float32)
    logits[0, 7] = logits[1, 9] = 1.0
    rows = [make_row(temperature=0.0)]
    first, second = (sampler.start(logits[i : i + 1], rows) for i in range(2))
    assert first.token_ids.tolist() == [7]
    assert [one.finish().token_ids for one in (second, first, second)] == [[9], [7], [9]]
    sampler.start(logits[:1], rows)
    del sampler  # also with a call that nobody finished


def test_a_call_holds_what_it_reads(native, team):
    """The ids of the caller are gone when the call comes to them."""
    sampler = NativeSampler(native, team, 50)
    rows = [make_row(temperature=0.0, logit_bias={3: 5.0}, repetition_penalty=1.5)] * 64
    logits = np.zeros((64, 50), np.float32)
    for _ in range(20):
        started = sampler.start(logits, rows)
        started._call = replace(started._call, edits=None)
        junk = [np.full(64, 10**9, np.int32) for _ in range(50)]
        assert started.finish().token_ids == [3] * 64
        del junk


def test_ids_stay_as_they_were_checked(native, team):
    """Whoever changes an array after a call has started changes nothing."""
    ids, values = np.array([3], np.int32), np.array([5.0])
    none = np.empty(0, np.int32)
    edits = native.SampleEdits(
        history=none, bias_ids=ids, bias_values=values, banned_ids=none, grammar=None
    )
    ids[0] = 10**9
    record = np.zeros(1, _RECORD)
    record[["top_p", "repetition_penalty"]] = (1.0, 1.0)
    record["num_logprobs"] = record["grammar_row"] = -1
    record["spans"][0][SPANS.index("bias") * 2 :][:2] = (0, 1)
    chosen = np.empty((2, 1), np.int32)
    scores = native.SampleScores(
        logprobs=np.empty(0),
        ranks=none.copy(),
        top_ids=np.empty((0, 0), np.int32),
        top_logprobs=np.empty((0, 0)),
    )
    logits = np.zeros((1, 50), np.float32)
    sampler = native.TokenSampler(team, 50)
    sampler.sample(logits, record.view(np.uint8).reshape(1, -1), chosen, edits, scores)
    assert chosen.tolist() == [[3], [0]]
