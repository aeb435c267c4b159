"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvloom.engine.async_llm import AsyncLLM, Submission
from kvloom.engine.inputs import PreparedPrompt
from kvloom.engine.outputs import CompletionOutput, TextDelta
from kvloom.errors import KvloomError, RequestError
from kvloom.request import SamplingParams
from kvloom.server.chat_parts import NamedTool
from kvloom.server.forced_calls import forced_calls
from kvloom.server.logprobs import chat_logprobs
from kvloom.server.replies import Reply, header_of
from kvloom.server.schema import ChatRequest
from kvloom.server.state import ServerState
from kvloom.server.tool_calls import CallDelta, ToolFormat, find_tool_format
from kvloom.tokenizer import Tokenizer


async def start_chat(state: ServerState, body: ChatRequest, request_id: str) -> Reply:
    """Check, tokenise and submit a conversation.

    Raises:
        ApiError, RequestError: it is refused.
    """
    llm = state.engine_for(body.model)
    tool_format = _tool_format(llm, body)
    params = _params(body, tool_format)
    release = state.take_seats(body.num_choices, "n")
    try:
        prompt = await prepare_chat(llm, body, params)
        stream = llm.submit(Submission([prompt], params, body.cache_salt, body.priority or 0))
    except BaseException:
        release()
        raise
    writers = [
        ChatWriter(llm.tokenizer, output, bool(body.logprobs), tool_format)
        for output in stream.outputs[0].outputs
    ]
    header = header_of("chatcmpl", "chat.completion", state.model_name, request_id)
    return Reply(header, "chat.completion.chunk", stream, writers, len(writers), release)


def _params(body: ChatRequest, tool_format: ToolFormat | None) -> SamplingParams:
    calls = None
    if tool_format is not None and body.forces_calls:
        is_single = isinstance(body.tool_choice, NamedTool)
        calls = forced_calls(tool_format.style, body.callable_functions, is_single)
    return body.params(keeps_special_tokens=tool_format is not None, calls=calls)


async def prepare_chat(llm: AsyncLLM, body: ChatRequest, params: SamplingParams) -> PreparedPrompt:
    """Render and tokenise the messages; whatever fails in it is the messages' fault."""
    messages = [message.for_template for message in body.messages]
    try:
        return await llm.prepare_chat(messages, params, body.options())
    except RequestError as error:
        field = _name_here(error.field, body)
        raise RequestError(field, str(error).removeprefix(f"{error.field}: ")) from error
    except KvloomError as error:
        raise RequestError("messages", str(error)) from error


def _name_here(field: str, body: ChatRequest) -> str:
    """What a parameter of the engine is called in a chat's body."""
    if field == "max_tokens" and body.max_tokens is None:
        return "max_completion_tokens"
    if field.startswith("structured_outputs"):
        return "tools" if body.forces_calls else "response_format"
    return "messages" if field == "prompt" else field


def _tool_format(llm: AsyncLLM, body: ChatRequest) -> ToolFormat | None:
    if not body.uses_tools:
        return None
    template = llm.tokenizer.chat_template
    found = None if template is None else find_tool_format(template.source)
    if found is None:
        raise RequestError(
            "tools", "the model's chat template has no tools that this server knows how to call"
        )
    return found


class ChatWriter:
    """Writes one choice of a chat answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        output: CompletionOutput,
        has_logprobs: bool,
        tool_format: ToolFormat | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._output = output
        self._has_logprobs = has_logprobs
        self._tool_format = tool_format
        self._parser = None if tool_format is None else tool_format.parser()
        self._num_calls = 0

    def whole(self) -> dict[str, Any]:
        """The finished choice."""
        output = self._output
        content, calls = output.text, []
        if self._parser is not None:
            parts = [*self._parser.push(output.text), *self._parser.finish()]
            content = "".join(part for part in parts if isinstance(part, str))
            calls = [self._call(part) for part in parts if isinstance(part, CallDelta)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": self._finish_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        """The role comes first."""
        yield self._chunk({"role": "assistant", "content": ""})

    def add(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Text and calls as they come, the reason of the end alone in the last chunk."""
        logprobs = delta.logprobs
        for part in self._parts(delta):
            if isinstance(part, str):
                yield self._chunk({"content": part}, self._logprobs(logprobs))
            else:
                call = {"index": self._num_calls} | self._call(part)
                yield self._chunk({"tool_calls": [call]}, self._logprobs(logprobs))
            logprobs = []
        if self._has_logprobs and logprobs:  # of tokens whose text is held back, or that have none
            yield self._chunk({}, self._logprobs(logprobs))
        if delta.finish_reason is not None:
            yield self._chunk({}) | {
                "finish_reason": self._finish_reason(delta.finish_reason),
                "stop_reason": delta.stop_reason,
            }

    def _parts(self, delta: TextDelta) -> Iterator[str | CallDelta]:
        if self._parser is None:
            if delta.text:
                yield delta.text
            return
        yield from self._parser.push(delta.text)
        if delta.finish_reason is not None:
            yield from self._parser.finish()

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _call(self, call: CallDelta) -> dict[str, Any]:
        self._num_calls += 1
        return call.as_json()

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return chat_logprobs(self._tokenizer, entries)

    def _finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._num_calls and reason == "stop" else reason
