"""What a user gets back, and how events of the scheduler become text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.engine.detokenizer import IncrementalDetokenizer
from kvloom.engine.inputs import PreparedPrompt
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.step import RequestEvent, TokenLogprobs
from kvloom.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS.
        error: what went wrong when finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices.

    Attributes:
        prompt_logprobs: one entry per prompt token but the first, if asked for.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to one choice; `finish_reason` is set on its last delta."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


class Generation:
    """One prompt on its way: collects the events of its choices and turns them into text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: PreparedPrompt, requests: Sequence[Request]
    ) -> None:
        self.req_ids = [request.req_id for request in requests]
        self.output = RequestOutput(
            prompt.text,
            prompt.token_ids,
            [CompletionOutput(index) for index in range(len(requests))],
        )
        self._index = {req_id: index for index, req_id in enumerate(self.req_ids)}
        self._params = [request.sampling_params for request in requests]
        self._detokenizers = [
            IncrementalDetokenizer(tokenizer, one, prompt.token_ids) for one in self._params
        ]
        self._deltas: list[TextDelta] = []

    @property
    def unfinished_req_ids(self) -> list[str]:
        """Choices that still run."""
        pairs = zip(self.req_ids, self.output.outputs, strict=True)
        return [req_id for req_id, choice in pairs if choice.finish_reason is None]

    def take_deltas(self) -> list[TextDelta]:
        """What was added since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def push(self, event: RequestEvent) -> str | None:
        """Add one event.

        Returns:
            The stop string that just ended the choice while its request still runs, or None.
        """
        index = self._index[event.req_id]
        choice = self.output.outputs[index]
        detokenizer = self._detokenizers[index]
        self.output.prompt_logprobs += event.prompt_logprobs
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, event.num_cached_tokens)
        choice.token_ids += event.new_token_ids
        choice.logprobs += event.logprobs
        text = detokenizer.push(self._visible(event, self._params[index]))
        if event.finish_reason is not None and not detokenizer.is_stopped:
            text += detokenizer.finish()
        if detokenizer.is_stopped:
            choice.finish_reason, choice.stop_reason = "stop", detokenizer.stop_reason
        elif event.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
            choice.error = event.error
        choice.text += text
        self._deltas.append(TextDelta(index, text, event.new_token_ids, choice.finish_reason))
        still_runs = event.finish_reason is None
        return detokenizer.stop_reason if detokenizer.is_stopped and still_runs else None

    @staticmethod
    def _visible(event: RequestEvent, params: ResolvedSamplingParams) -> Sequence[int]:
        """A stop token ends the text without being part of it, unless the user keeps it."""
        ids = event.new_token_ids
        if (
            event.finish_reason == "stop"
            and ids
            and ids[-1] in params.all_stop_token_ids
            and not params.include_stop_str_in_output
        ):
            return ids[:-1]
        return ids
