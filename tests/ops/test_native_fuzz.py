"""Hostile calls end in errors, never in a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.ops.isa import built_isas

SECONDS = 10


@pytest.mark.skipif(not built_isas(), reason="the native library is not built")
@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_calls_are_refused(seed: int, scale: int) -> None:
    seconds = SECONDS if scale == 1 else 300
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, str(tests / "native_fuzz.py"), str(seconds), str(seed)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    num_computed, num_refused = map(int, result.stdout.split())
    assert num_computed > 100
    assert num_refused > 100
