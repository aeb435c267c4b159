"""Tool calls: parsers on texts of each format, cut anywhere; then whole requests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvloom.server.tool_calls import FORMATS, CallDelta, find_tool_format
from live_server import run_server
from scripted_model import make_scripted_folder

PARIS = ("get_weather", {"city": "Paris", "days": [1, 2]})
ROME = ("get_weather", {"city": 'Röm "x"', "days": []})


def hermes(name: str, arguments: dict[str, Any]) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def llama3(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def mistral_list(*calls: tuple[str, dict[str, Any]]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls])


def mistral_args(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


CASES = [
    ("hermes", hermes(*PARIS), "", [PARIS]),
    ("hermes", hermes(*PARIS) + "\n" + hermes(*ROME) + "\n", "", [PARIS, ROME]),
    ("hermes", "I look.\n\n" + hermes(*PARIS), "I look.", [PARIS]),
    ("hermes", hermes(*PARIS).removesuffix("\n</tool_call>"), "", [PARIS]),
    ("hermes", "a <tool_ b < c  \n", "a <tool_ b < c  \n", []),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>x', None, []),
    ("llama3", llama3(*PARIS), "", [PARIS]),
    ("llama3", "<|python_tag|>" + llama3(*PARIS), "", [PARIS]),
    ("llama3", llama3(*PARIS) + "; " + llama3(*ROME), "", [PARIS, ROME]),
    ("llama3", "The object {} is empty. ", "The object {} is empty. ", []),
    ("llama3", '{"temperature": 5}', '{"temperature": 5}', []),
    ("llama3", llama3(*PARIS)[:-3], llama3(*PARIS)[:-3], []),
    ("mistral", mistral_list(PARIS, ROME), "", [PARIS, ROME]),
    ("mistral", "Well. " + mistral_list(PARIS), "Well.", [PARIS]),
    ("mistral", mistral_args(*PARIS) + mistral_args(*ROME), "", [PARIS, ROME]),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ("mistral", "plain [TOOL] text", "plain [TOOL] text", []),
]


def parse(format_name: str, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser = FORMATS[format_name].parser()
    parts = [part for piece in pieces for part in parser.push(piece)] + list(parser.finish())
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, CallDelta)]
    assert len({call.call_id for call in calls}) == len(calls)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("format_name", "text", "content", "calls"), CASES)
def test_calls_of_a_text(
    format_name: str, text: str, content: str | None, calls: list[Any]
) -> None:
    assert parse(format_name, [text]) == (text if content is None else content, calls)


@pytest.mark.parametrize(("format_name", "text", "content", "calls"), CASES)
def test_calls_do_not_depend_on_the_pieces(
    format_name: str, text: str, content: str | None, calls: list[Any], scale: int
) -> None:
    whole = parse(format_name, [text])
    assert parse(format_name, list(text)) == whole
    rng = random.Random(text)
    for _ in range(20 * scale):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(format_name, pieces) == whole


def test_content_is_not_held_longer_than_it_must() -> None:
    parser = FORMATS["hermes"].parser()
    assert list(parser.push("Hello there")) == ["Hello there"]
    assert list(parser.push(" <")) == []
    assert list(parser.push("3")) == [" <3"]


def test_mistral_ids_have_nine_letters_and_digits() -> None:
    parser = FORMATS["mistral"].parser()
    list(parser.push(mistral_list(PARIS)))
    [call] = parser.finish()
    assert isinstance(call, CallDelta)
    assert len(call.call_id) == 9
    assert call.call_id.isalnum()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3"),
        ("{{ tools }}", None),
        ("<tool_call> {{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    found = find_tool_format(template)
    assert (found and found.name) == name


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}={{ m.content or (m.tool_calls | tojson) }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PIECES = [
    "I look. ",
    "<tool_call>",
    '{"name": "get_weather", ',
    '"arguments": {"city": "Paris"}}',
    "</tool_call>",
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
]


def test_a_client_calls_a_tool(tmp_path: Path) -> None:
    folder = make_scripted_folder(tmp_path, PIECES, TEMPLATE)
    with run_server({"model": str(folder), "num_blocks": 200, "backend": "reference"}) as live:
        client = live.openai()
        user = {"role": "user", "content": "What is the weather?"}
        fields: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "tools": TOOLS}
        answer = client.chat.completions.create(**fields, messages=[user])
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Paris"}

        content, calls, reasons = "", [], []
        for chunk in client.chat.completions.create(**fields, messages=[user], stream=True):
            [streamed] = chunk.choices
            content += streamed.delta.content or ""
            calls += streamed.delta.tool_calls or []
            reasons += [streamed.finish_reason] if streamed.finish_reason else []
        assert (content, reasons) == ("I look.", ["tool_calls"])
        [delta] = calls
        assert (delta.index, delta.function.name) == (0, "get_weather")
        assert json.loads(delta.function.arguments) == {"city": "Paris"}

        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages = [user, choice.message.model_dump(exclude_unset=True), result]
        again = client.chat.completions.create(**fields, messages=messages)
        assert again.choices[0].finish_reason == "tool_calls"  # the script is the same

        none = client.chat.completions.create(**fields, messages=[user], tool_choice="none")
        assert none.choices[0].message.content == "".join(PIECES)
        assert none.choices[0].finish_reason == "stop"
        broken = {**choice.message.model_dump(exclude_unset=True)}
        broken["tool_calls"][0]["function"]["arguments"] = "no JSON"
        refused = live.post("/v1/chat/completions", {"messages": [user, broken]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
        live.check_idle()
