"""Beam search: the likeliest continuations of a prompt, found on an engine that forks requests.

A beam is a request. One step tells the likeliest tokens behind it, and nothing it samples itself is
used; the best tokens over all beams make the next ones, which share its blocks. Scores, and when
the search ends, are those of transformers' `generate(num_beams=width, do_sample=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvloom.engine.detokenizer import IncrementalDetokenizer
from kvloom.engine.inputs import InputProcessor, Prompt
from kvloom.errors import RequestError
from kvloom.request import MAX_LOGPROBS, Request, ResolvedSamplingParams, SamplingParams
from kvloom.step import RequestEvent
from kvloom.tokenizer import Tokenizer

# A beam's one step, and one more: a request that ends of itself leaves nothing to fork.
_BEAM_TOKENS = 2


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One continuation.

    Attributes:
        token_ids: end-of-sequence token included, which `text` leaves out.
        logprob: of all its tokens together.
        score: `logprob / num_tokens ** length_penalty`; sequences are ranked by it.
        finish_reason: "stop" at an end-of-sequence token, else "length".
    """

    text: str
    token_ids: list[int]
    logprob: float
    score: float
    finish_reason: str


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt and its best continuations, the best one first.

    Attributes:
        error: why there are none.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSequence] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """What `LLM.beam_search` is asked for.

    Raises:
        RequestError: a value is out of range.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(name, f"{value!r} is no integer of at least 1")
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise RequestError("length_penalty", f"{penalty!r} is no finite number")


@dataclass(frozen=True, slots=True)
class Candidate:
    """The tokens of a beam, or of what it may become, and their log-probability."""

    token_ids: tuple[int, ...]
    logprob: float


class BeamRanking:
    """The search itself: candidates in, beams out.

    Attributes:
        finished: at most `width` pairs of score and ended candidate, the best first.
        num_candidates: the likeliest tokens that are wanted of each beam. If `width` of them end
            their sequences, there are still as many that do not.
    """

    def __init__(self, options: BeamOptions, eos_token_ids: frozenset[int]) -> None:
        self.finished: list[tuple[float, Candidate]] = []
        self._options = options
        self._eos_token_ids = frozenset() if options.ignore_eos else eos_token_ids
        self.num_candidates = max(2, 1 + len(self._eos_token_ids)) * options.width

    def advance(
        self, beams: Sequence[tuple[Candidate, Sequence[tuple[int, float]]]]
    ) -> list[Candidate]:
        """Choose the next beams, all one token longer; none once the search is over.

        Args:
            beams: each with its likeliest tokens and their log-probabilities, the best first.
        """
        width = self._options.width
        candidates = [
            Candidate((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, top in beams
            for token_id, logprob in top
        ]
        candidates.sort(key=lambda one: -one.logprob)
        num_tokens = len(candidates[0].token_ids)
        going_on: list[Candidate] = []
        for rank, one in enumerate(candidates[: self.num_candidates]):
            if num_tokens < self._options.max_tokens and not self.is_stop(one):
                going_on.append(one)
            elif rank < width:
                self.finished.append((self._score(one.logprob, num_tokens), one))
        self.finished.sort(key=lambda pair: -pair[0])
        del self.finished[width:]
        return [] if self._is_over(going_on, num_tokens) else going_on[:width]

    def is_stop(self, candidate: Candidate) -> bool:
        """Whether its last token ends the sequence."""
        return candidate.token_ids[-1] in self._eos_token_ids

    def _is_over(self, going_on: Sequence[Candidate], num_tokens: int) -> bool:
        """Whether no beam would beat a finished sequence if it ended as it is."""
        if not going_on or len(self.finished) < self._options.width:
            return not going_on
        return self._score(going_on[0].logprob, num_tokens) <= self.finished[-1][0]

    def _score(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / num_tokens**self._options.length_penalty)


@dataclass(slots=True)
class _Beam:
    request: Request
    candidate: Candidate
    top: Sequence[tuple[int, float]] = ()


class BeamSearch:
    """One prompt's search on its way: takes events of its beams, and tells which come next.

    Attributes:
        output: complete once `is_finished`.
    """

    def __init__(
        self, inputs: InputProcessor, tokenizer: Tokenizer, prompt: Prompt, options: BeamOptions
    ) -> None:
        """Check a prompt and its options.

        Raises:
            RequestError: they are not valid, or `width` wants more log-probabilities than there
                are.
        """
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
        self._prompt = inputs.prepare(prompt, params)
        limits = inputs.limits
        self._ranking = BeamRanking(options, limits.eos_token_ids)
        num_candidates = self._ranking.num_candidates
        if num_candidates > MAX_LOGPROBS:
            largest = MAX_LOGPROBS * options.width // num_candidates
            raise RequestError(
                "width", f"{options.width} beams are too many for this model; give up to {largest}"
            )
        self._params = ResolvedSamplingParams(
            seed=0,
            temperature=0.0,
            max_tokens=_BEAM_TOKENS,
            ignore_eos=True,
            logprobs=min(num_candidates, limits.vocab_size),
        )
        self._tokenizer = tokenizer
        self._beams: dict[str, _Beam] = {}
        self.output = BeamSearchOutput(self._prompt.text, self._prompt.token_ids)

    @property
    def req_ids(self) -> list[str]:
        """The requests of the beams there are now."""
        return list(self._beams)

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete."""
        return bool(self.output.sequences) or self.output.error is not None

    def start(self, make_id: Callable[[], str]) -> list[Request]:
        """The request of the first beam: the prompt."""
        return self._make_beams([(Candidate((), 0.0), None)], make_id)

    def push(self, event: RequestEvent) -> None:
        """Take an event of a beam; all but its first token is of no interest."""
        beam = self._beams[event.req_id]
        if not beam.top and event.logprobs:
            beam.top = event.logprobs[0].top
        elif not beam.top and event.finish_reason is not None:
            self.output.error = event.error or event.finish_reason

    def branch(self, make_id: Callable[[], str]) -> list[Request]:
        """The requests of the next beams, which replace all others; none before their time.

        They fork the beams they come from. So these may end only when the new ones were added.
        """
        if self.is_finished or not all(beam.top for beam in self._beams.values()):
            return []
        beams = [(beam.candidate, beam.top) for beam in self._beams.values()]
        leaders = {beam.candidate.token_ids: beam.request for beam in self._beams.values()}
        candidates = self._ranking.advance(beams)
        if not candidates:
            self.output.sequences = [self._sequence(*pair) for pair in self._ranking.finished]
        return self._make_beams([(one, leaders[one.token_ids[:-1]]) for one in candidates], make_id)

    def _make_beams(
        self, candidates: Sequence[tuple[Candidate, Request | None]], make_id: Callable[[], str]
    ) -> list[Request]:
        self._beams = {}
        for candidate, leader in candidates:
            token_ids = [*self._prompt.token_ids, *candidate.token_ids]
            request = Request(make_id(), token_ids, self._params)
            request.leader = leader
            request.runs_ahead = False  # nothing behind its one step is wanted
            self._beams[request.req_id] = _Beam(request, candidate)
        return [beam.request for beam in self._beams.values()]

    def _sequence(self, score: float, candidate: Candidate) -> BeamSequence:
        is_stop = self._ranking.is_stop(candidate)
        token_ids = list(candidate.token_ids)
        detokenizer = IncrementalDetokenizer(self._tokenizer, self._params, self._prompt.token_ids)
        text = detokenizer.push(token_ids[:-1] if is_stop else token_ids) + detokenizer.finish()
        finish_reason = "stop" if is_stop else "length"
        return BeamSequence(text, token_ids, candidate.logprob, score, finish_reason)
