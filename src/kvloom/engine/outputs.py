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
        num_cached_tokens: prompt tokens whose KV came from the prefix cache, for the first choice;
            others share what it computes.
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
    """What was added to one choice; `finish_reason` is set on its last delta.

    Attributes:
        logprobs: one entry per token of `token_ids`, if asked for.
        stop_reason: with the last delta, the stop string or stop token id that ended the choice.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Choice:
    """One choice on its way.

    Attributes:
        num_told_chars, num_told_tokens: what deltas have told of it.
        is_end_told: whether a delta has told that it ended.
    """

    output: CompletionOutput
    params: ResolvedSamplingParams
    detokenizer: IncrementalDetokenizer
    num_told_chars: int = 0
    num_told_tokens: int = 0
    is_end_told: bool = False

    def push(self, event: RequestEvent) -> None:
        """Add what `event` says of this choice."""
        output, detokenizer = self.output, self.detokenizer
        is_last = event.finish_reason is not None
        output.token_ids += event.new_token_ids
        output.logprobs += event.logprobs
        text = detokenizer.push(self._visible(event) if is_last else event.new_token_ids)
        if is_last:
            text += detokenizer.finish()
        if text:
            output.text += text
        if detokenizer.stop_reason is not None:
            output.finish_reason, output.stop_reason = "stop", detokenizer.stop_reason
            # A step may give tokens behind the one that completed the stop string.
            del output.token_ids[detokenizer.num_tokens :]
            del output.logprobs[detokenizer.num_tokens :]
        elif is_last:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
            output.error = event.error

    def take_delta(self) -> TextDelta | None:
        """What was added since the last call, if anything was."""
        output = self.output
        has_ended = output.finish_reason is not None
        if self.is_end_told or not (has_ended or len(output.token_ids) > self.num_told_tokens):
            return None
        text = output.text[self.num_told_chars :]
        token_ids = output.token_ids[self.num_told_tokens :]
        logprobs = output.logprobs[self.num_told_tokens :]
        self.num_told_chars += len(text)
        self.num_told_tokens += len(token_ids)
        self.is_end_told = has_ended
        return TextDelta(
            output.index, text, token_ids, output.finish_reason, logprobs, output.stop_reason
        )

    def _visible(self, event: RequestEvent) -> Sequence[int]:
        """A stop token ends the text without being part of it, unless the user keeps it."""
        ids = event.new_token_ids
        if (
            event.finish_reason == "stop"
            and ids
            and ids[-1] in self.params.all_stop_token_ids
            and not self.params.include_stop_str_in_output
        ):
            return ids[:-1]
        return ids


class Generation:
    """One prompt on its way: collects the events of its choices and turns them into text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: PreparedPrompt, requests: Sequence[Request]
    ) -> None:
        self.req_ids = [request.req_id for request in requests]
        self._choices = {
            request.req_id: _Choice(
                CompletionOutput(index),
                request.sampling_params,
                IncrementalDetokenizer(tokenizer, request.sampling_params, prompt.token_ids),
            )
            for index, request in enumerate(requests)
        }
        outputs = [choice.output for choice in self._choices.values()]
        self.output = RequestOutput(prompt.text, prompt.token_ids, outputs)

    @property
    def unfinished_req_ids(self) -> list[str]:
        """Choices that still run."""
        pairs = zip(self.req_ids, self.output.outputs, strict=True)
        return [req_id for req_id, choice in pairs if choice.finish_reason is None]

    def take_deltas(self) -> list[TextDelta]:
        """What was added to each choice since the last call."""
        deltas = [choice.take_delta() for choice in self._choices.values()]
        return [delta for delta in deltas if delta is not None]

    def push(self, event: RequestEvent) -> str | None:
        """Add one event.

        Returns:
            The stop string that just ended the choice while its request still runs, or None.
        """
        output = self.output
        output.prompt_logprobs += event.prompt_logprobs
        if event.req_id == self.req_ids[0]:  # the others find what this one computed
            output.num_cached_tokens = max(output.num_cached_tokens, event.num_cached_tokens)
        choice = self._choices[event.req_id]
        choice.push(event)
        return choice.detokenizer.stop_reason if event.finish_reason is None else None
