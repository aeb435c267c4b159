"""schemathesis over the server's own description: no 5xx, and answers are as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from live_server import TINY_OPTIONS, LiveServer, run_server


@pytest.fixture(scope="module")
def short(tiny_folder: Path) -> Iterator[LiveServer]:
    """A server whose answers are short and few, so that cases are many."""
    options = {"model": str(tiny_folder), **TINY_OPTIONS, "max_model_len": 32}
    with run_server(options, max_choices=8) as live:
        yield live


def whole_numbers(value: Any) -> Any:
    """JSON schema takes 1.0 for an integer, and this server does not."""
    if isinstance(value, dict):
        return {key: whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def simplify(body: dict[str, Any]) -> None:
    """Leave out what a description cannot bound, so that a body is seldom refused for it."""
    body.pop("model", None)
    for message in body.get("messages") or ():
        if isinstance(message, dict):
            message.pop("tool_calls", None)
            message["content"] = message.get("content") or "x"


def test_the_description_knows_keys_errors_and_ranges(short: LiveServer, tiny_folder: Path) -> None:
    with run_server({"model": str(tiny_folder), **TINY_OPTIONS}, api_keys=("one",)) as locked:
        headers = {"Authorization": "Bearer one"}
        with_key = locked.get("/openapi.json", headers=headers).json()
    without = short.get("/openapi.json").json()
    assert with_key["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for description in (with_key, without):
        for path, operations in description["paths"].items():
            [operation] = operations.values()
            asks = description is with_key and path not in ("/health", "/version", "/cache")
            assert ("401" in operation["responses"], "security" in operation) == (asks, asks)
            for status, answer in operation["responses"].items():
                assert status == "200" or list(answer["content"]) == ["application/json"]
    schemas = without["components"]["schemas"]
    for name, field, low, high in (
        ("ChatRequest", "n", 1, 128),
        ("ChatRequest", "max_tokens", 1, None),
        ("CompletionRequest", "max_tokens", 0, None),  # with echo
        ("CompletionRequest", "temperature", 0, 1e6),
    ):
        number = schemas[name]["properties"][field]["anyOf"][0]
        assert (number["minimum"], number.get("maximum")) == (low, high)
    [no_answer] = without["paths"]["/v1/embeddings"].values()
    assert "200" not in no_answer["responses"]


def test_answers_are_as_the_description_says(short: LiveServer, scale: int) -> None:
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    schema = schema.exclude(path="/cache/events")  # it ends when the page that follows it does
    posts = schema.include(method="POST")
    cases = (
        schema.as_strategy(GenerationMode.POSITIVE)
        | posts.as_strategy(GenerationMode.POSITIVE)
        | posts.as_strategy(GenerationMode.NEGATIVE)
    )
    # A description cannot say which fields go together, nor how long the model's context is.
    excluded = [c for c in CHECKS.get_all() if c.__name__ == "positive_data_acceptance"]
    with requests.Session() as session:

        @settings(max_examples=250 * scale)
        @given(cases, st.booleans())
        def check(case: schemathesis.Case, is_simple: bool) -> None:
            case.body = whole_numbers(case.body)
            if is_simple and isinstance(case.body, dict):
                simplify(case.body)
            answer = case.call(session=session, timeout=60)
            case.validate_response(answer, excluded_checks=excluded)

        check()
    short.check_idle()
