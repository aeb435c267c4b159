"""The bodies of requests. An unknown field is refused by name; nothing is accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from kvloom.errors import RequestError
from kvloom.request import MAX_LOGPROBS, MAX_PRIORITY, PARAM_RANGES, SamplingParams
from kvloom.server.chat_parts import Message, NamedTool, ResponseFormat, StrictModel, Tool
from kvloom.structured_outputs import StructuredOutputs
from kvloom.tokenizer import ChatOptions

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]

_MAX_STOPS = 64  # each is looked for at every token
_LEGACY_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it


def _describe_ranges(schema: dict[str, Any]) -> None:
    """Add to the description which values SamplingParams takes; it checks them itself."""
    for name, _, low, high in PARAM_RANGES:
        for kind in schema["properties"].get(name, {}).get("anyOf", ()):
            if kind["type"] in ("integer", "number"):
                kind["minimum"] = low
                if high < 2**63 - 1:
                    kind["maximum"] = high


class StreamOptions(StrictModel):
    """How a stream ends."""

    include_usage: bool = False


class SamplingFields(StrictModel):
    """What chat and completion requests have in common. null stands for the default."""

    model_config = ConfigDict(json_schema_extra=_describe_ranges)

    model: str | None = Field(None, description="the served model, if given")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    max_tokens: Int64 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    logit_bias: dict[str, Number] | None = None
    user: str | None = Field(None, max_length=512, description="written to the access log")
    top_k: Int64 | None = Field(None, description="extra: keep this many most likely tokens")
    min_p: Number | None = Field(
        None, description="extra: drop tokens less likely than this share of the likeliest"
    )
    repetition_penalty: Number | None = Field(
        None, description="extra: divides positive logits of tokens seen"
    )
    min_tokens: Int64 | None = Field(None, description="extra: no end among so many first tokens")
    ignore_eos: bool | None = Field(None, description="extra: do not end at an end-of-text token")
    stop_token_ids: list[TokenId] | None = Field(None, description="extra: ids that end the text")
    cache_salt: str | None = Field(
        None, description="extra: share cached prefixes only with requests of the same salt"
    )
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        None, description="extra: lower numbers run first; 0 if not given"
    )

    @field_validator("logit_bias")
    @classmethod
    def _has_token_ids(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for key in biases or ():
            if not (key.isascii() and key.isdecimal()) or len(key) > 10:
                raise ValueError(f"{key!r} is not a token id")
        return biases

    @field_validator("cache_salt")
    @classmethod
    def _is_salt(cls, salt: str | None) -> str | None:
        if salt == "":
            raise ValueError("an empty salt isolates nothing; leave it out")
        return salt

    @model_validator(mode="after")
    def _streams_with_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "only a stream has them; set stream to true")
        return self

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the last chunk of a stream tells the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The engine's parameters.

        Raises:
            RequestError: one is not valid.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_NAMES} | more
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


_SAMPLING_NAMES = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)


def _describe_echo(schema: dict[str, Any]) -> None:
    _describe_ranges(schema)
    schema["properties"]["max_tokens"]["anyOf"][0]["minimum"] = 0


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=_describe_echo)

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _echoes_once(self) -> CompletionRequest:
        # The prompt is scored once, for the first choice, which others may overtake in a stream.
        if self.echo and self.logprobs is not None and self.stream and self.num_choices > 1:
            raise RequestError("n", "a stream that echoes log-probabilities has one choice")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[i for i in self.prompt if isinstance(i, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def only_echoes(self) -> bool:
        """Whether the prompt is wanted back with nothing behind it, to score it."""
        return self.max_tokens == 0 and bool(self.echo) and not self.stream

    def params(self) -> SamplingParams:
        """The engine's parameters; it generates one token even where none is wanted."""
        max_tokens = _LEGACY_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(
            max_tokens=1 if self.only_echoes else max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    documents: list[dict[str, Any]] | None = Field(
        None, description="extra: texts for chat templates that know documents"
    )
    add_generation_prompt: bool = Field(True, description="extra: begin the assistant's answer")
    continue_final_message: bool = Field(False, description="extra: go on with the last message")

    @model_validator(mode="after")
    def _goes_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "set logprobs to true to get them")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError("max_tokens", "give it or max_completion_tokens, not both")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if choice not in (None, "none") and not names:
            raise RequestError("tool_choice", "there are no tools to choose from")
        if len(set(names)) < len(names):
            raise RequestError("tools", "two functions have one name")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError("tool_choice.function.name", f"the tools are: {', '.join(names)}")
        if not self.uses_tools:
            return
        if self.response_format is not None and self.response_format.type != "text":
            raise RequestError(
                "response_format", "an answer that may call tools is text; set tool_choice to none"
            )
        if not self.forces_calls and any(tool.function.strict for tool in self.tools or ()):
            raise RequestError(
                "tools", "only calls that tool_choice forces can be strict; leave strict out"
            )

    @property
    def uses_tools(self) -> bool:
        """Whether the model is offered tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_calls(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable_functions(self) -> dict[str, dict[str, Any] | None]:
        """Parameters of the functions that may be called, by name."""
        choice = self.tool_choice
        return {
            tool.function.name: tool.function.parameters
            for tool in self.tools or ()
            if not isinstance(choice, NamedTool) or choice.function.name == tool.function.name
        }

    def params(
        self, *, keeps_special_tokens: bool, calls: StructuredOutputs | None = None
    ) -> SamplingParams:
        """The engine's parameters; some models write calls with special tokens.

        `calls` are those that the answer must consist of.
        """
        wanted = self.response_format
        return self.sampling_params(
            structured_outputs=calls or (wanted and wanted.structured_outputs),
            max_tokens=self.max_tokens
            if self.max_tokens is not None
            else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            skip_special_tokens=not keeps_special_tokens,
        )

    def options(self) -> ChatOptions:
        """What the chat template is given beside the messages."""
        tools = [t.model_dump(exclude_none=True) for t in self.tools or ()]
        return ChatOptions(
            tools=tools if self.uses_tools else None,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class TokenizeRequest(StrictModel):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="of a prompt; true if not given")
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="of a conversation; true if not given"
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "give a prompt, or messages")
        if self.prompt is None and self.add_special_tokens is not None:
            raise RequestError("add_special_tokens", "the chat template places them")
        if self.messages is None and self.add_generation_prompt is not None:
            raise RequestError("add_generation_prompt", "only a conversation has one")
        return self


class EmbeddingRequest(StrictModel):
    """POST /v1/embeddings: what OpenAI's API has, so that it is refused for the right reason."""

    model: str | None = Field(None, description="the served model, if given")
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = Field(None, max_length=512)


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
