"""Chat templates: the functions they expect, and what stops them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from kvloom.errors import ModelError, RequestError
from kvloom.tokenizer.chat import ChatOptions, ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(template: str, messages: list[Any] = USER) -> str:
    return ChatTemplate(template, {}).render(messages, ChatOptions())


def test_blocks_leave_no_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\n{# no #}\ny") == "x\ny"


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    messages = [{"role": "user", "content": "<é&'>"}]
    assert render("{{ messages[0].content | tojson }}", messages) == '"<é&\'>"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {
        str(datetime.now().year),
        str(datetime.now().year - 1),
    }


def test_generation_tags_are_their_body() -> None:
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"


def test_loops_can_be_left() -> None:
    template = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(template) == "01"


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_broken_template_is_the_models_fault(template: str) -> None:
    with pytest.raises(ModelError, match=r"chat template fails: .*; repair chat_template"):
        render(template)


def test_the_templates_own_words_are_kept() -> None:
    with pytest.raises(RequestError, match=r"messages: .*roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("message", ["hi", {}, {"content": "hi"}, {"role": 1, "content": "hi"}])
def test_messages_that_are_none(message: Any) -> None:
    with pytest.raises(RequestError, match="messages: number 1 is not an object with a role"):
        render("x", [*USER, message])


@pytest.mark.parametrize("content", [None, 5, [{"type": "text", "text": "hi"}], {"text": "hi"}])
def test_content_that_is_no_text_is_named_before_a_template_writes_it_as_python(
    content: Any,
) -> None:
    """`{{ None }}` would be the text "None"."""
    messages = [*USER, {"role": "user", "content": content}]
    with pytest.raises(RequestError, match=r"messages: number 1 has no text .*; give one text"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", messages)


def test_a_message_that_calls_tools_may_lack_a_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[1].tool_calls[0].name }}", [*USER, call]) == "f"


def test_fields_that_a_template_does_not_know_are_named() -> None:
    call = {"role": "assistant", "tool_calls": [1]}
    with pytest.raises(RequestError, match=r"leave out .*\(tool_calls\)"):
        render("{{ messages[1].tool_calls[0].function.name }}", [*USER, call])
