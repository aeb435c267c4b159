"""What LLM refuses to run, and how it says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom import LLM
from kvloom.errors import RequestError
from tiny_folder import greedy


def test_a_stream_is_checked_before_it_begins(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.stream([999], greedy())
    with pytest.raises(RequestError, match="prompt: character 1 is half of a surrogate pair"):
        llm.stream("a\ud800", greedy())
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.stream("a", greedy(stop_token_ids=[999]))


LIMIT = 16


@pytest.fixture(scope="module")
def short(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(folder), num_blocks=20, max_model_len=LIMIT)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"), [(15, 1, 1), (15, None, 1), (10, None, 6)]
)
def test_room(short: LLM, num_prompt: int, max_tokens: int | None, num_output: int) -> None:
    """CASES.md case 2, step 4: max_model_len counts prompt and output."""
    [output] = short.generate([1] * num_prompt, greedy(max_tokens=max_tokens))
    assert len(output.outputs[0].token_ids) == num_output
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(16, 1, "prompt"), (17, 1, "prompt"), (17, None, "prompt"), (10, 100, "max_tokens")],
)
def test_no_room(short: LLM, num_prompt: int, max_tokens: int | None, field: str) -> None:
    with pytest.raises(RequestError) as error:
        short.generate([1] * num_prompt, greedy(max_tokens=max_tokens))
    assert error.value.field == field
    assert str(LIMIT) in str(error.value)
    assert str(num_prompt) in str(error.value)
    test_room(short, 10, None, 6)  # the engine is alive


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([258], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True, 1], {}, "prompt"),
        ("a", {"logit_bias": {258: 1.0}}, "logit_bias"),
        ("a", {"stop_token_ids": [999]}, "stop_token_ids"),
    ],
)
def test_bad_requests_name_their_field(
    llm: LLM, prompt: object, params: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate([prompt], greedy(**params))  # type: ignore[list-item]  # on purpose
    assert error.value.field == field


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"abc",
        {"prompt": "a"},
        {"a", "b"},
        (text for text in "ab"),
        np.array(1),
        [None],
        [b"abc"],
        ["a", 3],
        ["a", {"prompt": "a"}],
        [1, "a"],
        [1.0, 2.0],
        np.array([1.0, 2.0]),
        np.array([True, False]),
    ],
)
def test_prompts_of_another_kind_are_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match=r"prompt: .*; give (a text or|integers)"):
        llm.generate(prompts, greedy())  # type: ignore[arg-type]  # on purpose
    if not isinstance(prompts, list):
        with pytest.raises(RequestError, match=r"prompt: .*; give (a text or|integers)"):
            llm.stream(prompts, greedy())  # type: ignore[arg-type]  # on purpose


def test_integers_of_any_library_are_token_ids(llm: LLM) -> None:
    [expected] = llm.generate([1, 2, 3], greedy())
    array = np.array([1, 2, 3])
    for prompts in (array, list(array), [array], (1, 2, 3), range(1, 4), array[None]):
        [output] = llm.generate(prompts, greedy())  # type: ignore[arg-type]  # on purpose
        assert output.prompt_token_ids == [1, 2, 3]
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert "".join(d.text for d in llm.stream(array, greedy())) == expected.outputs[0].text


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None, greedy()], "xy", 5, (greedy(), 1)])
def test_params_of_another_kind_are_refused(llm: LLM, params: object) -> None:
    with pytest.raises(RequestError, match="params: give SamplingParams"):
        llm.generate(["a", "b"], params)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(RequestError, match="params: give SamplingParams"):
        llm.stream("a", params)  # type: ignore[arg-type]  # on purpose


def test_a_stream_takes_one_set_of_params(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params: give SamplingParams"):
        llm.stream("a", [greedy()])  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("messages", [None, 5, "hi", ["hi"], {"role": "user", "content": "hi"}])
def test_messages_of_another_kind_are_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(RequestError, match=r"messages: .*; give .*'role': 'user'"):
        llm.chat(messages, greedy())  # type: ignore[arg-type]  # on purpose


def test_one_bad_prompt_runs_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fine", [999]], greedy())
    assert llm.stats.steps.num_steps == 0


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()])


def test_priorities_decide_who_runs_first(folder: Path) -> None:
    llm = LLM(model=str(folder), num_blocks=20, max_num_seqs=1, max_model_len=LIMIT)
    step, ended = llm._core.step, []

    def spied_step():
        events = step()
        ended.extend(e.req_id for e in events if e.finish_reason is not None)
        return events

    llm._core.step = spied_step
    llm.generate([[1], [2], [3]], greedy(max_tokens=1), priority=[1, 0, -1])
    assert ended == ["2", "1", "0"]
    llm.generate([[1], [2]], greedy(max_tokens=1), priority=7)
    messages = [[{"role": "user", "content": ""}]] * 2
    llm.chat(messages, greedy(max_tokens=1, truncate_prompt_tokens=4), priority=[1, 0])
    assert ended[3:] == ["3", "4", "6", "5"]
    assert [d.finish_reason for d in llm.stream([1], greedy(max_tokens=1), priority=1)] == [
        "length"
    ]
    for priority, reason in [([1], "1 for 2 prompts"), ("high", "integer"), ([1, 0.5], "integer")]:
        with pytest.raises(RequestError, match=f"priority.*{reason}"):
            llm.generate([[1], [2]], greedy(), priority=priority)
    with pytest.raises(RequestError, match="priority"):
        llm.stream([1], greedy(), priority=None)
    llm.shutdown()
