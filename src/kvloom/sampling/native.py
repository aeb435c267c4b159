"""The sampler on the native library: `Sampler`'s results, from logits that stay where they are.

A step's rows become one array of fixed-size records, with what differs in length beside it. What a
request always asks for is encoded once; a step adds the tokens generated since, where they matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.logits import FloatArray, SamplingRow, banned_token_ids
from kvloom.sampling.sampler import SampleResult
from kvloom.step import TokenLogprobs

__all__ = ["NativeSampler"]

_COPIED = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)

# The struct SampleRow of csrc/include/kvloom/sample_row.hpp.
_RECORD = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("repetition_penalty", "f8"),
        ("frequency_penalty", "f8"),
        ("presence_penalty", "f8"),
        ("seed", "u8"),
        ("top_k", "i8"),
        ("num_logprobs", "i8"),
        ("output_index", "i8"),
        ("spans", "i8", (8,)),  # start and count of: prompt, output, bias, banned
        ("grammar_row", "i8"),
    ]
)

# Why a row has no token, by the statuses of csrc/include/kvloom/sample.hpp (0 is success); the
# words are those of `Sampler`.
_BAD_LOGITS = "the model's logits hold {}; check its weights, or run it with dtype float32"
_REASONS = {
    1: _BAD_LOGITS.format("NaN"),
    2: _BAD_LOGITS.format("only -inf"),
    3: _BAD_LOGITS.format("+inf"),
    4: "logit_bias, bad_words, min_tokens and the grammar leave no token; relax them",
}

# Encoded requests that are kept; beyond it, all go, and running ones are encoded again.
_MAX_ENCODED = 4096
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A request's parameters as a record.

    Attributes:
        params: held, so that its id stays its own.
        may_adjust: whether anything but temperature and truncation can change the logits.
        is_fixed: whether the record is the same at every step: greedy, and nothing to adjust.
        num_logprobs: most likely tokens to report; -1: no log-probabilities at all.
    """

    params: ResolvedSamplingParams
    record: bytes
    num_logprobs: int
    may_adjust: bool
    is_fixed: bool


@dataclass(slots=True)
class _Edits:
    """The arrays that the spans of a step's records point into."""

    history: list[NDArray[np.int32]] = field(default_factory=list)
    num_history: int = 0
    bias_ids: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    banned_ids: list[int] = field(default_factory=list)

    def add(self, row: SamplingRow) -> tuple[int, ...]:
        """Append what adjusts a row's logits; returns its record's spans."""
        params = row.params
        has_repetition = params.repetition_penalty != 1.0
        has_counts = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        prompt = self._add_history(row.prompt_token_ids if has_repetition else ())
        output = self._add_history(row.output_token_ids if has_repetition or has_counts else ())
        bias = (len(self.bias_ids), len(params.logit_bias))
        self.bias_ids += params.logit_bias.keys()
        self.bias_values += params.logit_bias.values()
        banned = banned_token_ids(params.bad_words_token_ids, row.output_token_ids)
        if len(row.output_token_ids) < params.min_tokens:
            banned += [*params.eos_token_ids, *params.stop_token_ids]
        self.banned_ids += banned
        return (*prompt, *output, *bias, len(self.banned_ids) - len(banned), len(banned))

    def _add_history(self, token_ids: Sequence[int]) -> tuple[int, int]:
        start = self.num_history
        if len(token_ids):
            self.history.append(np.asarray(token_ids, np.int32))
            self.num_history += len(token_ids)
        return start, len(token_ids)


class NativeSampler:
    """Chooses tokens as `Sampler` does, on a team of native threads.

    A row's token depends on that row alone; what is kept between calls only saves work.
    """

    def __init__(self, native: ModuleType, team: Any, vocab_size: int) -> None:
        """`native` is the module of an instruction set and `team` a ThreadTeam of that module."""
        self._native = native
        self._vocab_size = vocab_size
        self._sampler = native.TokenSampler(team, vocab_size)
        self._encoded: dict[int, _Encoded] = {}  # by the id of the parameters
        self._no_edits = self._native_edits(_Edits(), None)
        self._no_scores = _Scores(native, 0, 0)

    @property
    def scratch_bytes(self) -> int:
        """Memory it takes while it samples, whatever the rows ask for."""
        num_bytes: int = self._sampler.scratch_bytes
        return num_bytes

    def asks_best_only(self, params: Iterable[ResolvedSamplingParams]) -> bool:
        """Whether all of them are greedy, and want nothing beside the token."""
        encoded = map(self._encode, params)
        return all(known.is_fixed and known.num_logprobs < 0 for known in encoded)

    def sample(
        self,
        logits: FloatArray,
        rows: Sequence[SamplingRow],
        grammar: NDArray[np.uint32] | None = None,
        grammar_rows: Sequence[int] = (),
        are_best_only: bool = False,
    ) -> SampleResult:
        """Choose one token per row of float32 `logits` [num_rows, vocab_size].

        Args:
            logits: a view of the library's own rows, which are not copied.
            rows: the requests.
            grammar: allowed tokens, [*, cdiv(vocab_size, 32)]: bit i % 32 of word i // 32 is i.
            grammar_rows: the row of `grammar` that each request obeys, -1 for none.
            are_best_only: the logits are of a batch that `wants_best_only`.

        Raises:
            ValueError: they are, and a row asks for more.
        """
        call = self._call(logits, rows, grammar, grammar_rows)
        self._sampler.sample(logits, *call.arguments, are_best_only)
        return call.result(self._vocab_size)

    def start(
        self,
        logits: FloatArray,
        rows: Sequence[SamplingRow],
        grammar: NDArray[np.uint32] | None = None,
        grammar_rows: Sequence[int] = (),
        are_best_only: bool = False,
    ) -> NativeSampling:
        """`sample` behind what the team does now: `logits` need not be there yet."""
        call = self._call(logits, rows, grammar, grammar_rows)
        self._sampler.start(logits, *call.arguments, are_best_only)
        return NativeSampling(self._sampler, call, self._vocab_size)

    def _call(
        self,
        logits: FloatArray,
        rows: Sequence[SamplingRow],
        grammar: NDArray[np.uint32] | None,
        grammar_rows: Sequence[int],
    ) -> _Call:
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {logits.shape}, not {(len(rows), self._vocab_size)}")
        encoded = [self._encode(row.params) for row in rows]
        data = np.frombuffer(bytearray().join([e.record for e in encoded]), np.uint8)
        edits = self._no_edits
        if grammar is not None or not all(e.is_fixed for e in encoded):
            records = data.view(_RECORD)
            if grammar is not None:
                records["grammar_row"] = grammar_rows
            edits = self._native_edits(_fill(records, rows, encoded), grammar)
        scores = self._no_scores
        num_logprobs = [e.num_logprobs for e in encoded]
        num_top = max(num_logprobs, default=-1)
        if num_top >= 0:
            scores = _Scores(self._native, len(rows), num_top)
        chosen = np.empty((2, len(rows)), np.int32)
        bytes_of_rows = data.reshape(len(rows), _RECORD.itemsize)
        return _Call(bytes_of_rows, chosen, edits, scores, num_logprobs)

    def prompt_logprobs(
        self, logits: FloatArray, next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score each prompt token by the row of `logits` of the position before it."""
        num_rows = len(next_token_ids)
        scores = _Scores(self._native, num_rows, num_top)
        token_ids = np.asarray(next_token_ids, np.int32)
        self._sampler.score(logits, token_ids, np.full(num_rows, num_top, np.int32), scores.native)
        found = scores.of_rows(token_ids.tolist(), [num_top] * num_rows, self._vocab_size)
        return [score for score in found if score is not None]

    def _encode(self, params: ResolvedSamplingParams) -> _Encoded:
        encoded = self._encoded.get(id(params))
        if encoded is None:
            if len(self._encoded) >= _MAX_ENCODED:
                self._encoded.clear()
            encoded = self._encoded[id(params)] = _encode(params)
        return encoded

    def _native_edits(self, edits: _Edits, grammar: NDArray[np.uint32] | None) -> Any:
        history = np.concatenate(edits.history) if edits.history else np.empty(0, np.int32)
        return self._native.SampleEdits(
            history=history,
            bias_ids=np.array(edits.bias_ids, np.int32),
            bias_values=np.array(edits.bias_values, np.float64),
            banned_ids=np.array(edits.banned_ids, np.int32),
            grammar=grammar,
        )


class _Scores:
    """Arrays that the library writes log-probabilities to."""

    def __init__(self, native: ModuleType, num_rows: int, num_top: int) -> None:
        self._logprobs = np.empty(num_rows, np.float64)
        self._ranks = np.empty(num_rows, np.int32)
        self._top_ids = np.empty((num_rows, num_top), np.int32)
        self._top_logprobs = np.empty((num_rows, num_top), np.float64)
        self.native = native.SampleScores(
            logprobs=self._logprobs,
            ranks=self._ranks,
            top_ids=self._top_ids,
            top_logprobs=self._top_logprobs,
        )

    def of_rows(
        self, token_ids: Sequence[int], num_top: Sequence[int], vocab_size: int
    ) -> list[TokenLogprobs | None]:
        """One entry per row; None where `num_top` is -1."""
        return [
            None if count < 0 else self._of_row(i, token_id, min(count, vocab_size))
            for i, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
        ]

    def _of_row(self, row: int, token_id: int, count: int) -> TokenLogprobs:
        top_ids = self._top_ids[row, :count].tolist()
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(self._logprobs[row]),
            rank=int(self._ranks[row]),
            top=tuple(zip(top_ids, self._top_logprobs[row, :count].tolist(), strict=True)),
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """The arrays of one call of the library.

    Attributes:
        records: uint8 [num_rows, bytes of a record].
        chosen: int32 [2, num_rows]: token ids, then statuses.
        num_logprobs: most likely tokens to report of each row; -1: nothing.
    """

    records: NDArray[np.uint8]
    chosen: NDArray[np.int32]
    edits: Any
    scores: _Scores
    num_logprobs: list[int]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the library takes behind the logits."""
        return self.records, self.chosen, self.edits, self.scores.native

    def result(self, vocab_size: int) -> SampleResult:
        """What the library wrote."""
        token_ids, statuses = self.chosen.tolist()
        result = SampleResult(token_ids=token_ids, logprobs=[None] * len(token_ids))
        wanted = self.num_logprobs
        if any(statuses):
            result.errors = {i: _REASONS[status] for i, status in enumerate(statuses) if status}
            wanted = [
                -1 if status else count for status, count in zip(statuses, wanted, strict=True)
            ]
        if max(wanted, default=-1) >= 0:
            result.logprobs = self.scores.of_rows(token_ids, wanted, vocab_size)
        return result


class NativeSampling:
    """A call that was started.

    Attributes:
        token_ids: int32 [num_rows], once it is done.
    """

    def __init__(self, sampler: Any, call: _Call, vocab_size: int) -> None:
        self.token_ids = call.chosen[0]
        self._sampler, self._call, self._vocab_size = sampler, call, vocab_size

    def finish(self) -> SampleResult:
        """Wait for it."""
        self._sampler.finish()
        return self._call.result(self._vocab_size)


def _encode(params: ResolvedSamplingParams) -> _Encoded:
    record = np.zeros((), _RECORD)
    for name in _COPIED:
        record[name] = getattr(params, name)
    record["top_k"] = min(params.top_k, _MAX_INT64)
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    record["num_logprobs"] = num_logprobs
    record["grammar_row"] = -1
    may_adjust = SamplingRow(params, (), ()).has_adjustments  # nor later, if not at the start
    return _Encoded(
        params,
        record.tobytes(),
        num_logprobs,
        may_adjust,
        is_fixed=params.is_greedy and not may_adjust,
    )


def _fill(
    records: NDArray[Any], rows: Sequence[SamplingRow], encoded: Sequence[_Encoded]
) -> _Edits:
    """Complete the records with what changes from step to step; returns what they point into."""
    edits = _Edits()
    records["output_index"] = [len(row.output_token_ids) for row in rows]
    adjusted = [
        i for i, known in enumerate(encoded) if known.may_adjust and rows[i].has_adjustments
    ]
    if adjusted:
        records["spans"][adjusted] = [edits.add(rows[i]) for i in adjusted]
    return edits
