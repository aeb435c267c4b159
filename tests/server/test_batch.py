"""`kvloom batch`: OpenAI's batch format, the same answers as over HTTP, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from kvloom.cli.main import main

BODY = {"temperature": 0, "max_tokens": 6}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": BODY | body}


def json_format(keyword: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": {keyword: "ok"}}}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def run(folder: Path, file: Path, output: Path) -> int:
    options = ["--model", str(folder), "--num-blocks", "50", "--backend", "reference"]
    return main(["batch", str(file), "--output", str(output), *options])


def read(output: Path) -> dict[str, Any]:
    answers = [json.loads(text) for text in output.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(by_id) == len(answers), "each request is answered once"
    return by_id


def test_answers_are_the_engine_s(tiny_folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        line("a", prompt="one"),
        line("b", "/v1/chat/completions", messages=messages),
        line("c", prompt="x", temperature=-1),
        line("d", prompt="x", no_such=1),
        line("e", prompt="x", stream=True),
        line("f", prompt=["p"] * 3, n=2),
        line("g", "/v1/chat/completions", messages=messages, response_format=json_format("const")),
        line("h", "/v1/chat/completions", messages=messages, response_format=json_format("not")),
    ]
    output = tmp_path / "out.jsonl"
    assert run(tiny_folder, write(tmp_path / "in.jsonl", lines), output) == 1
    answers = read(output)
    llm = LLM(model=str(tiny_folder), num_blocks=50, backend="reference")
    params = SamplingParams(temperature=0.0, max_tokens=6)
    [expected] = llm.generate("one", params)
    [chat] = llm.chat(messages, params)
    llm.shutdown()
    assert answers["a"]["body"]["choices"][0]["text"] == expected.outputs[0].text
    assert answers["b"]["body"]["choices"][0]["message"]["content"] == chat.outputs[0].text
    assert [answers[i]["status_code"] for i in "abcdefg"] == [200, 200, 400, 400, 400, 200, 200]
    assert [answers[i]["body"]["error"]["param"] for i in "cdeh"] == [
        "temperature",
        "no_such",
        "stream",
        "response_format",
    ]
    assert answers["g"]["body"]["choices"][0]["message"]["content"] == '"ok"'
    assert len(answers["f"]["body"]["choices"]) == 6


def test_a_run_that_was_killed_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    lines = [line(str(index), prompt=f"prompt {index}") for index in range(8)]
    file, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(tiny_folder, file, output) == 0
    whole = output.read_text().splitlines(keepends=True)
    # Killed in the middle of a line: what is torn is answered again, the rest stays as it was.
    output.write_text("".join(whole[:3]) + whole[3][:25])
    assert run(tiny_folder, file, output) == 0
    assert output.read_text().splitlines(keepends=True)[:3] == whole[:3]
    assert set(read(output)) == {str(index) for index in range(8)}
    before = output.read_text()
    assert run(tiny_folder, file, output) == 0  # nothing is left to do
    assert output.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "line 1 is not valid JSON"),
        ('{"url": "/v1/completions"}', "line 1 has no custom_id"),
        ('{"custom_id": "a", "url": "/v1/embeddings"}', "/v1/embeddings is not supported"),
        (2 * '{"custom_id": "a", "url": "/v1/completions"}\n', "is there twice"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    assert main(["batch", str(tmp_path / "in.jsonl")]) == 1
    assert message in capsys.readouterr().err


def test_another_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    output = tmp_path / "out.jsonl"
    output.write_text("something else\n")
    assert main(["batch", str(file), "--output", str(output)]) == 1
    assert output.read_text() == "something else\n"
    assert "holds other lines" in capsys.readouterr().err
