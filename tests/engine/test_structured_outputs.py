"""Generated texts are what their grammars say, whatever happens to the requests."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest

from kvloom import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from kvloom.errors import RequestError
from random_schemas import random_schema
from tiny_folder import make_tiny_folder

NUM_FULL_SCHEMAS = 200


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the native backend runs, with more rows of logits than there are tokens."""
    folder = tmp_path_factory.mktemp("padded")
    return make_tiny_folder(folder, vocab_size=300, head_dim=16)


@pytest.fixture(scope="module", params=["reference", "auto"])
def any_llm(padded: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Both samplers."""
    llm = LLM(model=str(padded), num_blocks=400, max_num_batched_tokens=64, backend=request.param)
    yield llm
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    assert llm._core._grammars._requests == {}
    llm.shutdown()


def sampled(seed: int = 0, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 150, "seed": seed} | changes)


def test_random_schemas_are_obeyed(any_llm: LLM, scale: int):
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(max(20, NUM_FULL_SCHEMAS * (scale // 20)))]
    params = [
        sampled(i, structured_outputs=StructuredOutputs(json=schema), top_k=20 * (i % 3))
        for i, schema in enumerate(schemas)
    ]
    num_finished = 0
    for schema, output in zip(schemas, any_llm.generate(["x"] * len(schemas), params), strict=True):
        [choice] = output.outputs
        assert choice.finish_reason in ("stop", "length"), choice.error
        if choice.finish_reason == "stop":
            # Numbers of a JSON schema are decimals: rounded to floats, they may reach a limit.
            jsonschema.validate(json.loads(choice.text, parse_float=Decimal), schema)
            num_finished += 1
    assert num_finished >= 0.9 * len(schemas)


LARK = """
start: sentence ("," " " sentence)* "."
sentence: NAME " " ("sees" | "hears") " " NAME
NAME: /[A-Z][a-z]{1,3}/
"""
FORMS = [
    (StructuredOutputs(regex="(ab|cd){2}[0-9]{3}"), "(?:ab|cd){2}[0-9]{3}"),
    (StructuredOutputs(choice=("left", 'ri\n"ght', "é😀")), 'left|ri\n"ght|é😀'),
    (
        StructuredOutputs(grammar=LARK),
        r"(N (sees|hears) N)(, N (sees|hears) N)*\.".replace("N", "[A-Z][a-z]{1,3}"),
    ),
]


@pytest.mark.parametrize(("structured", "pattern"), FORMS, ids=["regex", "choice", "grammar"])
def test_each_form_is_obeyed(any_llm: LLM, structured: StructuredOutputs, pattern: str):
    """`pattern` says the same in the syntax of Python's re."""
    [output] = any_llm.generate("x", sampled(structured_outputs=structured, n=6, max_tokens=200))
    finished = [choice.text for choice in output.outputs if choice.finish_reason == "stop"]
    assert len(finished) >= 4
    for text in finished:
        assert re.fullmatch(pattern, text), text


def test_any_json_object(any_llm: LLM):
    structured = StructuredOutputs(json_object=True)
    [output] = any_llm.generate("x", sampled(structured_outputs=structured, n=8, max_tokens=200))
    values = [json.loads(c.text) for c in output.outputs if c.finish_reason == "stop"]
    assert values
    assert all(isinstance(value, dict) for value in values)


def test_a_finished_text_ends_without_eos_and_a_cut_one_says_so(any_llm: LLM):
    exact = StructuredOutputs(regex="[ab]{5}")
    [whole, cut] = any_llm.generate(
        ["x", "x"],
        [sampled(structured_outputs=exact, max_tokens=n) for n in (5, 4)],
    )
    assert (whole.outputs[0].finish_reason, len(whole.outputs[0].token_ids)) == ("stop", 5)
    assert (cut.outputs[0].finish_reason, len(cut.outputs[0].token_ids)) == ("length", 4)
    # Where it may end or go on, EOS ends it, and is not part of the text.
    biased = sampled(structured_outputs=StructuredOutputs(regex="[ab]+"), logit_bias={257: 100.0})
    [output] = any_llm.generate("x", biased)
    assert len(output.outputs[0].text) == 1
    assert output.outputs[0].token_ids[1:] == [257]
    assert output.outputs[0].finish_reason == "stop"


def test_stop_rules_end_a_text_before_its_grammar_does(any_llm: LLM):
    structured = StructuredOutputs(regex="abcabc")
    [by_string] = any_llm.generate("x", sampled(structured_outputs=structured, stop="ca"))
    assert (by_string.outputs[0].text, by_string.outputs[0].stop_reason) == ("ab", "ca")
    [by_token] = any_llm.generate(
        "x",
        sampled(
            structured_outputs=structured, stop_token_ids=(any_llm.tokenizer.encode("c", False)[0],)
        ),
    )
    assert by_token.outputs[0].text == "ab"


def test_a_request_without_a_token_fails_alone(any_llm: LLM):
    structured = StructuredOutputs(regex="abc")
    bad, good = any_llm.generate(
        ["x", "x"],
        [
            sampled(structured_outputs=structured, bad_words=("b",)),
            sampled(structured_outputs=structured),
        ],
    )
    assert bad.outputs[0].finish_reason == "error"
    assert "grammar" in (bad.outputs[0].error or "")
    assert good.outputs[0].text == "abc"


REPETITIVE = {"type": "array", "minItems": 3, "items": {"enum": ["one thing", "another thing"]}}


def test_texts_are_the_same_whatever_happens_to_requests(padded: Path):
    """Pools that force none and constant preemption, drafts, steps ahead; with seeds, penalties."""
    rng = random.Random(3)
    schemas = [random_schema(rng) if i % 2 else REPETITIVE for i in range(9)]
    params = [
        replace(
            sampled(i, logprobs=1, frequency_penalty=0.5, max_tokens=60),
            structured_outputs=StructuredOutputs(json=schema) if i % 4 else None,
        )
        for i, schema in enumerate(schemas)
    ]
    prompts = [f"prompt number {i}" for i in range(9)]
    results = []
    variants = [(400, 0, False), (9, 0, False), (400, 4, False), (9, 4, True), (9, 0, True)]
    for num_blocks, num_drafts, is_async in variants:
        llm = LLM(
            model=str(padded),
            num_blocks=num_blocks,
            block_size=16,
            num_draft_tokens=num_drafts,
            has_async_stepping=is_async,
        )
        outputs = llm.generate(prompts, params)
        results.append([output.outputs[0] for output in outputs])
        stats = llm.stats.scheduler
        assert (stats.num_preemptions > 0) == (num_blocks < 400)
        assert (stats.num_accepted_tokens > 20) == (num_drafts > 0)
        llm._core.manager.check()
        llm.shutdown()
    assert results[1:] == results[:1] * 4


REFUSED = [
    ("json", {"type": "strin"}, "Invalid type"),
    ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("json", {"$ref": "#/nowhere"}, "nowhere"),
    ("regex", "(", "unclosed group"),
    ("grammar", "start: nothing", "nothing"),
]


@pytest.mark.parametrize(("kind", "source", "reason"), REFUSED)
def test_what_is_refused_at_the_door(llm: LLM, kind: str, source: object, reason: str):
    params = sampled(structured_outputs=StructuredOutputs(**{kind: source}))
    with pytest.raises(RequestError, match=reason) as error:
        llm.generate(["fine", "x"], [sampled(), params])
    assert error.value.field == f"structured_outputs.{kind}"
    assert llm.stats.steps.num_steps == 0


def test_while_grammars_are_compiled_the_engine_sleeps_and_hears_of_aborts(llm: LLM, monkeypatch):
    grammars, may_compile = llm._core._grammars, threading.Event()
    compile_, wait, num_waits = grammars._compile, grammars.wait, 0

    def slow_compile(*source: str):
        assert may_compile.wait(60)
        return compile_(*source)

    def counted_wait(max_seconds: float) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 3:
            may_compile.set()
        wait(60 if num_waits == 3 else max_seconds)

    monkeypatch.setattr(grammars, "_compile", slow_compile)
    monkeypatch.setattr(grammars, "wait", counted_wait)
    aborted = llm.stream("x", sampled(structured_outputs=StructuredOutputs(regex="zz")))
    [output] = llm.generate("x", sampled(structured_outputs=StructuredOutputs(regex="ab")))
    assert output.outputs[0].text == "ab"
    assert num_waits == 3
    assert llm.stats.steps.num_steps == 4  # two in vain, then one per token
    aborted.close()


async def _one(llm: AsyncLLM, structured: StructuredOutputs) -> str:
    output = await llm.generate("x", sampled(structured_outputs=structured))
    return output.outputs[0].text


def test_slow_grammars_keep_no_prompt_waiting(padded: Path, monkeypatch: pytest.MonkeyPatch):
    """More of them than `asyncio.to_thread` has threads, and one that is known."""

    async def ask_all(llm: AsyncLLM, may_end: threading.Event) -> list[str]:
        known = await _one(llm, StructuredOutputs(regex="zz"))
        monkeypatch.setattr(llm._inputs._grammars, "_ask", lambda *source: slow(may_end))
        params = [sampled(structured_outputs=StructuredOutputs(regex=f"a{i}")) for i in range(40)]
        slow_ones = [asyncio.create_task(llm.generate("x", one)) for one in params]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(llm.prepare("x", sampled()), 30)
        llm._inputs.check_grammar(sampled(structured_outputs=StructuredOutputs(regex="zz")))
        may_end.set()
        outputs = await asyncio.gather(*slow_ones)
        return [known, *(output.outputs[0].text for output in outputs)]

    def slow(may_end: threading.Event) -> None:
        assert may_end.wait(60)

    llm = AsyncLLM(model=str(padded), num_blocks=200)
    texts = asyncio.run(ask_all(llm, threading.Event()))
    llm.shutdown()
    assert texts == ["zz", *(f"a{i}" for i in range(40))]


def test_async_llm(padded: Path):
    llm = AsyncLLM(model=str(padded), num_blocks=200)
    texts = asyncio.run(_one(llm, StructuredOutputs(choice=("left", "right"))))
    llm.shutdown()
    assert texts in {"left", "right"}
