"""Structured outputs: grammars over a tokenizer, and how far each request is in its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvloom.sampling.grammar import new_matcher, summary, to_llguidance
from kvloom.sampling.vocabulary import TextTokenizer, make_vocabulary
from kvloom.step import SchedulerOutput, TokenMask
from kvloom.structured_outputs import GrammarProgress, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_COMPILED = 64  # grammars that are kept for the next request
_ALL_TOKENS = 0xFFFFFFFF


@dataclass(slots=True)
class _RequestGrammar:
    """A request's grammar.

    Attributes:
        compiled: the matcher at the beginning of a text; shared, and never advanced.
        matcher: at the end of this request's text, from when it has been compiled.
        error: why its text cannot go on.
    """

    compiled: Future[LLMatcher]
    matcher: LLMatcher | None = None
    error: str | None = None


class GrammarStates:
    """The grammars of an engine's requests, by request id.

    Grammars are compiled one after another on a thread of their own. The engine's thread makes all
    calls but `token_mask`, which may run beside calls for requests that are not in its step.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """`vocab_size`: rows of logits; the tokenizer may know fewer tokens, or more."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvloom-grammar")
        self._vocabulary: LLTokenizer | None = None  # made by that thread
        self._compiled: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self._requests: dict[str, _RequestGrammar] = {}
        self._compiling: dict[str, _RequestGrammar] = {}  # those of them that have no matcher yet

    def prepare(self) -> None:
        """Make what the first grammar needs, which can keep all threads waiting for a second."""
        if self._tokenizer.eos_token_ids:
            self._threads.submit(self._get_vocabulary).result()

    def begin(self, req_id: str, structured: StructuredOutputs) -> None:
        """Have the grammar of a new request compiled."""
        source = structured.source
        if source not in self._compiled:
            self._compiled[source] = self._threads.submit(self._compile, *source)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        request = _RequestGrammar(self._compiled[source])
        self._requests[req_id] = self._compiling[req_id] = request

    def take_compiled(self) -> list[tuple[str, str | None]]:
        """Requests that may start since the last call; those with an error never can."""
        if not self._compiling:
            return []
        done = [pair for pair in self._compiling.items() if pair[1].compiled.done()]
        taken = []
        for req_id, request in done:
            del self._compiling[req_id]
            error = request.compiled.exception()
            if error is None:
                request.matcher = request.compiled.result().deep_copy()
            taken.append((req_id, None if error is None else str(error)))
        return taken

    def wait(self, max_seconds: float) -> None:
        """Sleep until a grammar has been compiled."""
        wait([r.compiled for r in self._compiling.values()], max_seconds, FIRST_COMPLETED)

    def accept(self, req_id: str, token_id: int) -> GrammarProgress:
        """Take the next token of a request's text."""
        request = self._requests[req_id]
        assert request.matcher is not None
        if request.error is None and request.matcher.try_consume_tokens([token_id]) == 0:
            detail = summary(request.matcher.get_error()) or f"token {token_id} does not fit"
            request.error = f"the grammar cannot go on: {detail}; simplify it"
        return GrammarProgress(request.matcher.is_stopped(), request.error)

    def num_fitting(self, req_id: str, token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow a request's text, from the first one on."""
        matcher = self._requests[req_id].matcher
        assert matcher is not None
        return matcher.validate_tokens(list(token_ids))

    def end(self, req_id: str) -> None:
        """Forget a request, wherever it is."""
        del self._requests[req_id]
        self._compiling.pop(req_id, None)

    def token_mask(self, output: SchedulerOutput) -> TokenMask | None:
        """What the requests of a step may sample; None if all may sample anything.

        A request has one row, and another one after each of its drafts that its grammar takes;
        behind the first that it does not take, rows say nothing.
        """
        first_rows = output.structured_output_request_ids
        if not first_rows:
            return None
        drafts = output.scheduled_spec_decode_tokens
        num_rows = len(first_rows) + sum(len(drafts.get(req_id, ())) for req_id in first_rows)
        num_words = (self._vocab_size + 31) // 32
        bits = np.full((num_rows, num_words), _ALL_TOKENS, np.uint32)
        for req_id, row in first_rows.items():
            request = self._requests.get(req_id)
            if request is not None:  # it may have ended since the step was scheduled
                _fill(request, bits[row:], drafts.get(req_id, ()))
        return TokenMask(first_rows, bits)

    def shutdown(self) -> None:
        """End the thread, once it has compiled what it is at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size)
        return self._vocabulary

    def _compile(self, kind: str, source: str) -> LLMatcher:
        matcher = new_matcher(self._get_vocabulary(), to_llguidance(kind, source))
        if matcher.is_error():
            raise ValueError(summary(matcher.get_error()))
        return matcher


def _fill(request: _RequestGrammar, bits: NDArray[np.uint32], drafts: Sequence[int]) -> None:
    """Write the rows of one request into the first of `bits` [*, num_words]."""
    matcher = request.matcher
    assert matcher is not None
    num_taken = 0
    for row in range(len(drafts) + 1):
        matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)
        if matcher.is_error():
            request.error = f"the grammar became too complex: {summary(matcher.get_error())}"
            bits[row] = _ALL_TOKENS  # so that there is a token, whose event tells the error
            return
        if row == len(drafts) or matcher.try_consume_tokens([drafts[row]]) == 0:
            break
        num_taken += 1
    matcher.rollback(num_taken)
