"""scripts/demo, between a set-up and a command that only says what it was given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    for name, text in (("scripts/setup", ""), (".venv/bin/kvloom", "printf '%s\\n' \"$@\"")):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    return Path(shutil.copy(DEMO, tmp_path / "scripts" / "demo"))


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ([], None),
        (["hi"], "hi"),
        (["-"], "-"),
        (["hi", "--max-tokens", "3"], "hi"),
        (["--max-tokens", "3"], None),
        (["--max-tokens=3"], None),
    ],
)
def test_the_prompt_may_be_left_out(demo: Path, given: list[str], prompt: str | None):
    run = subprocess.run([demo, *given], capture_output=True, text=True, check=True)
    _, command, *args = run.stdout.splitlines()
    options = given if prompt is None else given[1:]
    assert command == "generate"
    assert args[1:] == options
    assert args[0] == prompt if prompt else args[0].startswith("Explain")
