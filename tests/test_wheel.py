"""The wheel that `pip install` builds holds every module of the package, and no other file."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_holds_the_package(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("kvloom-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "kvloom"
    files = {p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    expected = {p.relative_to(package.parent).as_posix() for p in files}
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert any(n.endswith("licenses/LICENSE") for n in names)
