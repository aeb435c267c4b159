"""The benchmarks are scripts beside one another: their folder is where they import from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))
