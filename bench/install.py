"""What `pip install` of kvloom puts on the disk: a new environment, measured package by package."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, distributions
from pathlib import Path

from report import print_row

ROOT = Path(__file__).parent.parent
BROUGHT_BY_VENV = {"pip", "setuptools"}
MIB = 1024 * 1024


def num_bytes(distribution: Distribution) -> int:
    """Bytes of the files a distribution installed, compiled modules included."""
    paths = [Path(str(distribution.locate_file(f))) for f in distribution.files or []]
    return sum(path.stat().st_size for path in paths if path.exists())


def main() -> None:
    """Print the total as a row, then the packages, largest first."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-qq", str(ROOT)], check=True)
        major, minor = sys.version_info[:2]
        site = Path(folder) / "lib" / f"python{major}.{minor}" / "site-packages"
        sizes = {d.name: num_bytes(d) for d in distributions(path=[str(site)])}
        subprocess.run([Path(folder) / "bin" / "kvloom", "--help"], check=True, capture_output=True)
    own = {name: size for name, size in sizes.items() if name not in BROUGHT_BY_VENV}
    print_row("installed, without the model", f"{sum(own.values()) / MIB:.0f} MiB")
    for name, size in sorted(own.items(), key=lambda item: -item[1]):
        if size >= MIB:
            print(f"    {size / MIB:6.1f} MiB  {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
