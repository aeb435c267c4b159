"""What `kvloom plan` prints, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloom.cli.main import main


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Its text."""
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


def plan_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """What it prints as JSON."""
    return json.loads(plan(capsys, *args, "--json"))


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Its message, beside which nothing is printed."""
    assert main(["plan", *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err
