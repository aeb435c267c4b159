"""The wheel holds every module of the package, the native modules, and no other file."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from kvloom.ops.isa import built_isas

ROOT = Path(__file__).parent.parent


def test_wheel_holds_the_package(tmp_path: Path):
    """Built where scripts/setup compiled, so that only the packing is done anew."""
    major, minor = sys.version_info[:2]
    (build_dir,) = (ROOT / "build").glob(f"editable-cp{major}{minor}-*")
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(tmp_path), f"-Cbuild-dir={build_dir}", str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("kvloom-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "kvloom"
    files = {p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    expected = {p.relative_to(package.parent).as_posix() for p in files}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = ["_cpu", *(f"_native_{isa}" for isa in built_isas())]
    expected |= {f"kvloom/{module}{suffix}" for module in modules}
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert any(n.endswith("licenses/LICENSE") for n in names)
