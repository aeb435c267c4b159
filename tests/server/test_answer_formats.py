"""response_format and tool_choice: the model is random, its answers are what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from llguidance import LLTokenizer

from kvloom.sampling.grammar import find_error, new_matcher, to_llguidance
from kvloom.server.forced_calls import forced_calls
from kvloom.server.tool_calls import FORMATS, CallDelta
from live_server import TINY_OPTIONS, LiveServer, run_server
from tiny_folder import make_tiny_folder

USER = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["color", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA, "strict": True}}


def create(live: LiveServer, **fields: Any) -> Any:
    fields = {"model": "tiny", "messages": USER, "temperature": 1.5, "seed": 1} | fields
    return live.openai().chat.completions.create(**fields)


def test_answers_keep_to_a_schema(live: LiveServer) -> None:
    answer = create(live, response_format=FORMAT, n=6, max_tokens=120)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    streamed = [""] * 6
    for chunk in create(live, response_format=FORMAT, n=6, max_tokens=120, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == [choice.message.content for choice in answer.choices]


def test_no_stream_waits_for_the_first_grammar(tiny_folder: Path) -> None:
    """What all grammars need is made before the server is ready."""
    with run_server({"model": str(tiny_folder), **TINY_OPTIONS}) as live:
        assert live.engine._core._grammars._vocabulary is not None


def test_a_cut_answer_says_so(live: LiveServer) -> None:
    [choice] = create(live, response_format=FORMAT, max_tokens=5).choices
    assert choice.finish_reason == "length"


def test_any_json_object(live: LiveServer) -> None:
    answer = create(live, response_format={"type": "json_object"}, n=8, max_tokens=150)
    finished = [c.message.content for c in answer.choices if c.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


FUNCTION = {"name": "pick", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**FORMAT, "type": "text"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "nothing"}},
                }
            },
            "response_format",
        ),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": FORMAT, "min_tokens": 3}, "min_tokens"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_valid_is_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/chat/completions", {"messages": USER, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral"])
def tool_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A model whose template teaches one of the formats."""
    tag = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
    folder = make_tiny_folder(tmp_path_factory.mktemp("tools"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% if tools %}" + tag[request.param] + "{% endif %}x:"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with run_server({"model": str(folder), **TINY_OPTIONS}) as live:
        yield live
        live.check_idle()


def other_tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "other", "parameters": parameters}}


def test_forced_calls(tool_server: LiveServer) -> None:
    tools = [*TOOLS, other_tool(properties={"a": {"const": 1}}, additionalProperties=False)]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    named: Any = {"type": "function", "function": {"name": "pick"}}
    for choice in (named, "required"):
        answer = create(tool_server, tools=tools, tool_choice=choice, n=6, max_tokens=200)
        finished = [c for c in answer.choices if c.finish_reason != "length"]
        assert finished
        for one in finished:
            assert one.finish_reason == "tool_calls"
            assert one.message.content is None
            for call in one.message.tool_calls:
                assert choice == "required" or call.function.name == "pick"
                jsonschema.validate(
                    json.loads(call.function.arguments), schemas[call.function.name]
                )
            assert choice == "required" or len(one.message.tool_calls) == 1


def test_a_strict_function_must_be_forced(tool_server: LiveServer) -> None:
    strict: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    forced = create(tool_server, tools=strict, tool_choice="required", max_tokens=150)
    assert forced.choices[0].message.tool_calls or forced.choices[0].finish_reason == "length"
    for fields, param in (
        ({"tools": strict}, "tools"),
        ({"tools": [*TOOLS, *TOOLS], "tool_choice": "required"}, "tools"),
        ({"tools": [other_tool(type="string")], "tool_choice": "required"}, "tools"),
        (
            {"tools": [other_tool(properties={"a": {"not": {}}})], "tool_choice": "required"},
            "tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "response_format": FORMAT}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(tool_server, **fields)
        assert caught.value.param == param


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_those_that_the_parser_reads(name: str) -> None:
    """Also names with quotes, and definitions that a function's parameters refer to."""
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/one"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"one": {"const": "x"}},
    }
    style = FORMATS[name].style
    structured = forced_calls(style, {"f.1": parameters, "g": None}, is_single=False)
    assert find_error(*structured.source) is None
    call = json.dumps({"name": "f.1", style.arguments_key: {"a": "x"}})
    text = style.begin + style.between.join([call, call]) + style.end
    matcher = new_matcher(LLTokenizer("byte"), to_llguidance(*structured.source))
    assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    assert matcher.is_accepting()
    parser = FORMATS[name].parser()
    found = [*parser.push(text), *parser.finish()]
    assert [(p.name, p.arguments) for p in found if isinstance(p, CallDelta)] == [
        ("f.1", '{"a": "x"}')
    ] * 2
    assert len(found) == 2
