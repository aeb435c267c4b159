"""Chat templates: jinja2 in a sandbox, with what Hugging Face's templates expect to find there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom.errors import ModelError, RequestError

_EXAMPLE = "[{'role': 'user', 'content': 'What is a KV cache?'}]"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a prompt is made of beside the messages.

    Attributes:
        tools: functions the model may call, as JSON schemas; None offers none.
        documents: texts the model may draw on; None gives none.
        add_generation_prompt: open the assistant's answer.
        continue_final_message: let the prompt end within the last message, which the model
            continues.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message",
                "the answer cannot both begin and go on; set add_generation_prompt to false",
            )


class _RefusedError(TemplateError):
    """The template refuses the messages, in its own words."""


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's chat template with the texts of its special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template: bos_token, eos_token, ..."""
        self._source = source
        self._special_tokens = special_tokens

    @property
    def source(self) -> str:
        """The template's text."""
        return self._source

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The prompt for `messages`.

        Raises:
            RequestError: what is no message, or messages or options that the template refuses.
            ModelError: the template itself is broken.
        """
        for index, message in enumerate(messages):
            _check_message(index, message)
        for name, value in (("tools", options.tools), ("documents", options.documents)):
            if value and name not in self._source:
                raise RequestError(name, f"the model's chat template does not know {name}")
        text = self._render(messages, options)
        if options.continue_final_message:
            return _cut_after_final_message(text, messages[-1])
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        try:
            return (
                _environment()
                .from_string(self._source)
                .render(
                    messages=messages,
                    tools=options.tools,
                    documents=options.documents,
                    add_generation_prompt=options.add_generation_prompt,
                    **self._special_tokens,
                )
            )
        except _RefusedError as error:
            raise RequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        except Exception as error:
            extra = sorted({key for message in messages for key in message} - {"role", "content"})
            if extra:
                raise RequestError(
                    "messages",
                    f"the model's chat template cannot render them: {error}; leave out what it may "
                    f"not know ({', '.join(map(str, extra))})",
                ) from error
            raise ModelError(
                f"the model's chat template fails: {error}; repair chat_template in the model's "
                "files, or use generate with a plain prompt"
            ) from error


def _check_message(index: int, message: Any) -> None:
    """A message has a role and a text; only one that calls tools may come without a text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            "messages", f"number {index} is not an object with a role; give {_EXAMPLE}"
        )
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    raise RequestError(
        "messages",
        f"number {index} has no text as its content, but {type(content).__name__}; give one text "
        f"(join the texts of a list of parts), like {_EXAMPLE}",
    )


def _cut_after_final_message(text: str, message: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's text; templates may trim that."""
    content = message.get("content") or ""
    for wanted in (content, content.strip()):
        begin = text.rfind(wanted)
        if wanted and begin >= 0:
            return text[: begin + len(wanted)]
    raise RequestError(
        "continue_final_message", "the last message has no text in the prompt to go on from"
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes characters for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
