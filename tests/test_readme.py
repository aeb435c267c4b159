"""Every example of the README runs, and prints what the README says it prints.

A `console` fence holds commands (`$ kvloom ...`), each followed by its output. A `python` fence is
a program; a `text` fence right after it is what the program prints. `...` stands for any text, or
alone on a line for any lines. `<!-- numbers vary -->` before a fence lets each number stand for any
other; `<!-- not run: why -->` exempts it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w+)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.,]*")
KVLOOM = str(Path(sys.executable).parent / "kvloom")
SECONDS = 120


@dataclass(frozen=True)
class Example:
    """A command, and the output the README shows for it (None: it shows none)."""

    command: list[str]
    expected: str | None
    numbers_vary: bool = False


def examples(text: str) -> list[Example]:
    found: list[Example] = []
    end_of_program = -1
    for match in FENCE.finditer(text):
        marker, language, body = match.groups(default="")
        assert not marker or marker == "numbers vary" or marker.startswith("not run: "), marker
        if marker.startswith("not run: "):
            continue
        if language == "python":
            found.append(Example([sys.executable, "-c", body], None))
            end_of_program = match.end()
        elif language == "console":
            found += console_examples(body, numbers_vary=bool(marker))
        elif end_of_program >= 0 and not text[end_of_program : match.start()].strip():
            found[-1] = Example(found[-1].command, body)
    return found


def console_examples(body: str, numbers_vary: bool) -> list[Example]:
    found = []
    for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        line, _, output = session.partition("\n")
        words = shlex.split(line, comments=True)
        assert words[0] == "kvloom", f"cannot run {line!r} here; mark the fence as not run"
        found.append(Example([KVLOOM, *words[1:]], output or None, numbers_vary))
    return found


def matches(expected: str, printed: str) -> bool:
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
        else:
            pattern += ".*".join(re.escape(part.rstrip()) for part in line.split("...")) + r" *\n"
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n") is not None


def readme_examples() -> list[Example]:
    return examples((ROOT / "README.md").read_text(encoding="utf-8"))


def title(example: Example) -> str:
    return "python" if "-c" in example.command else " ".join(example.command[1:3])


@pytest.mark.parametrize("example", readme_examples(), ids=title)
def test_readme_example(example: Example, smollm2: Path):
    """`smollm2` is asked for so that the model is there: a download would fill the output."""
    run = subprocess.run(
        example.command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    expected, printed = example.expected, run.stdout
    if expected is not None and example.numbers_vary:
        expected, printed = (NUMBER.sub("#", text) for text in (expected, printed))
    assert expected is None or matches(expected, printed), printed


def test_the_readme_has_examples_of_both_kinds():
    assert {example.command[0] for example in readme_examples()} == {KVLOOM, sys.executable}


def test_fences_are_read():
    text = """
```python
print(1)
```

```text
1
```

```console
$ kvloom plan x --tp 2  # a comment
a ... c
$ kvloom plan y
```

<!-- numbers vary -->
```console
$ kvloom generate "two words"
3 tokens
```

<!-- not run: it runs this test -->
```console
$ scripts/test
```

```text
not the output of anything
```
"""
    program, plan, plan_y, generate = examples(text)
    assert program == Example([sys.executable, "-c", "print(1)\n"], "1\n")
    assert plan.command == [KVLOOM, "plan", "x", "--tp", "2"]
    assert plan.expected == "a ... c\n"
    assert plan_y == Example([KVLOOM, "plan", "y"], None, numbers_vary=False)
    assert generate == Example([KVLOOM, "generate", "two words"], "3 tokens\n", numbers_vary=True)


@pytest.mark.parametrize(
    ("expected", "printed", "is_equal"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a ... z\n", "a 12 z\n", True),
        ("a ... z\n", "a\nz\n", False),
        ("a\n...\nz\n", "a\nz\n", True),
        ("a\n...\nz\n", "a\nm\nn\nz\n", True),
        ("a\n...\nz\n", "a\nm\n", False),
        ("(x)\n", "(x)  \n", True),
    ],
)
def test_ellipsis_matches(expected: str, printed: str, is_equal: bool):
    assert matches(expected, printed) is is_equal
