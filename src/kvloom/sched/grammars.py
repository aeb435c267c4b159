"""Requests whose text has a grammar: they wait until it is compiled, and end where it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvloom.request import Request, RequestStatus
from kvloom.sched.stop import Stop, check_stop
from kvloom.structured_outputs import GrammarProgress, StructuredOutputs


class Grammars(Protocol):
    """Whoever compiles grammars and follows texts through them, by request id."""

    def begin(self, req_id: str, structured: StructuredOutputs) -> None:
        """Have the grammar of a new request compiled."""

    def take_compiled(self) -> list[tuple[str, str | None]]:
        """Requests that may start since the last call; those with an error never can."""

    def accept(self, req_id: str, token_id: int) -> GrammarProgress:
        """Take the next token of a request's text."""

    def num_fitting(self, req_id: str, token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow a request's text, from the first one on."""

    def end(self, req_id: str) -> None:
        """Forget a request, wherever it is."""


class GrammarDesk:
    """Where the scheduler keeps such requests until they may stand in line."""

    def __init__(self, grammars: Grammars | None) -> None:
        """Without `grammars` no request may have one."""
        self._grammars = grammars
        self._compiling: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._compiling)

    def add(self, request: Request) -> None:
        """Have the grammar of a new request compiled."""
        structured = request.sampling_params.structured_outputs
        assert self._grammars is not None
        assert structured is not None
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self._compiling[request.req_id] = request
        self._grammars.begin(request.req_id, structured)

    def take_compiled(self) -> list[tuple[Request, str | None]]:
        """Requests that may stand in line from now on; those with an error never can."""
        if not self._compiling or self._grammars is None:
            return []
        return [(self._compiling.pop(i), error) for i, error in self._grammars.take_compiled()]

    def check_stop(self, request: Request, max_model_len: int) -> Stop | None:
        """Whether the last token of `request`, of any request, ends it, as `stop.check_stop` says.

        A text that is complete ends, too; it was not cut, even if its last token was its last one.
        """
        stop = check_stop(request, max_model_len)
        if request.sampling_params.structured_outputs is None:
            return stop
        if stop is not None and stop.status is RequestStatus.FINISHED_STOP:
            return stop
        assert self._grammars is not None
        progress = self._grammars.accept(request.req_id, request.token_ids[-1])
        if progress.error is not None:
            return Stop(RequestStatus.FINISHED_ERROR, error=progress.error)
        return Stop(RequestStatus.FINISHED_STOP) if progress.is_complete else stop

    def num_fitting(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow the text of `request`, from the first one on."""
        assert self._grammars is not None
        return self._grammars.num_fitting(request.req_id, token_ids)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        assert self._grammars is not None
        self._compiling.pop(request.req_id, None)
        self._grammars.end(request.req_id)
