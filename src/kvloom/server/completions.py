"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvloom.engine.async_llm import AsyncLLM, Submission
from kvloom.engine.outputs import CompletionOutput, RequestOutput, TextDelta
from kvloom.errors import RequestError
from kvloom.server.logprobs import LegacyLogprobs, joined
from kvloom.server.replies import Reply, header_of
from kvloom.server.schema import CompletionRequest
from kvloom.server.state import ServerState
from kvloom.tokenizer import Tokenizer


async def start_completion(state: ServerState, body: CompletionRequest, request_id: str) -> Reply:
    """Check, tokenise and submit all prompts.

    Raises:
        ApiError, RequestError: the request is refused; none of its prompts has run.
    """
    llm = state.engine_for(body.model)
    params = body.params()
    prompts = body.prompts
    if not prompts:
        raise RequestError("prompt", "the list is empty; give at least one prompt")
    field = "prompt" if len(prompts) > 1 else "n"
    release = state.take_seats(len(prompts) * body.num_choices, field)
    try:
        prepared = [await llm.prepare(prompt, params) for prompt in prompts]
        if body.only_echoes:
            # What scores the prompt also predicts one token, which is not told.
            params = replace(params, ignore_eos=True, stop=(), stop_token_ids=(), logprobs=None)
        stream = llm.submit(Submission(prepared, params, body.cache_salt, body.priority or 0))
    except BaseException:
        release()
        raise
    writers = [
        CompletionWriter(llm, body, output, index * body.num_choices + choice.index, choice)
        for index, output in enumerate(stream.outputs)
        for choice in output.outputs
    ]
    header = header_of("cmpl", "text_completion", state.model_name, request_id)
    return Reply(header, "text_completion", stream, writers, body.num_choices, release)


class CompletionWriter:
    """Writes one choice of a completion, behind its prompt if that is wanted back."""

    def __init__(
        self,
        llm: AsyncLLM,
        body: CompletionRequest,
        output: RequestOutput,
        index: int,
        choice: CompletionOutput,
    ) -> None:
        self._tokenizer: Tokenizer = llm.tokenizer
        self._body = body
        self._output = output
        self._index = index
        self._choice = choice
        self._logprobs = LegacyLogprobs(llm.tokenizer)
        self._is_prompt_told = not body.echo

    def whole(self) -> dict[str, Any]:
        """The finished choice."""
        prompt, choice = self._prompt(), self._choice
        if self._body.only_echoes:
            choice.token_ids.clear()
            return self._chunk(prompt["text"], prompt["logprobs"]) | {"finish_reason": "length"}
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs.add(choice.logprobs)
            if prompt["logprobs"] is not None:
                logprobs = joined(prompt["logprobs"], logprobs)
        return self._chunk(prompt["text"] + choice.text, logprobs, choice)

    def begin(self) -> Iterator[dict[str, Any]]:
        """Nothing: an echoed prompt's log-probabilities are not there before the first token."""
        return iter(())

    def add(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The prompt once, then text as it comes; the last chunk has the reason of the end."""
        if not self._is_prompt_told:
            self._is_prompt_told = True
            prompt = self._prompt()
            yield self._chunk(prompt["text"], prompt["logprobs"])
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs.add(delta.logprobs)
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            yield self._chunk(delta.text, logprobs, delta)

    def _prompt(self) -> dict[str, Any]:
        if not self._body.echo:
            return {"text": "", "logprobs": None}
        output = self._output
        ids = output.prompt_token_ids
        text = output.prompt
        if text is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
        logprobs = None
        if self._body.logprobs is not None:
            first = self._logprobs.add_unscored(ids[0])
            logprobs = joined(first, self._logprobs.add(output.prompt_logprobs))
        return {"text": text, "logprobs": logprobs}

    def _chunk(
        self, text: str, logprobs: Any, told: CompletionOutput | TextDelta | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": told and told.finish_reason,
            "stop_reason": told and told.stop_reason,
        }
