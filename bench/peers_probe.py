"""What the machine can do right now: read bandwidth, and peaks of bf16 and 8-bit dot products."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peers_cells import OpsPerSecond

SOURCE = Path(__file__).with_suffix(".c")
READ_SECONDS = 0.3
PEAK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Rates:
    """All of it: bytes read from memory, and the arithmetic's peaks."""

    read_bytes_per_s: float
    peaks: OpsPerSecond


class Probe:
    """The probes of peers_probe.c, compiled for this machine when first asked for."""

    def __init__(self, num_threads: int) -> None:
        """Needs a C compiler named `cc` and an x86-64 processor."""
        self._num_threads = num_threads
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "probe.so"
            flags = ["-O3", "-shared", "-fPIC", "-pthread"]
            subprocess.run(["cc", *flags, "-o", library, SOURCE], check=True)
            self._library = ctypes.CDLL(str(library))
        for name in ("probe_read_bytes_per_s", "probe_bf16_flop_per_s", "probe_int8_op_per_s"):
            function = getattr(self._library, name)
            function.argtypes = [ctypes.c_int, ctypes.c_double]
            function.restype = ctypes.c_double
        self.read_bytes_per_s()  # touches the memory

    def read_bytes_per_s(self) -> float:
        """What all threads read from memory together, each a run of its own."""
        return float(self._library.probe_read_bytes_per_s(self._num_threads, READ_SECONDS))

    def rates(self) -> Rates:
        """One after another."""
        return Rates(self.read_bytes_per_s(), self.peaks())

    def peaks(self) -> OpsPerSecond:
        """Dot products that touch no memory; 0 where the processor lacks them."""
        return OpsPerSecond(
            float(self._library.probe_bf16_flop_per_s(self._num_threads, PEAK_SECONDS)),
            float(self._library.probe_int8_op_per_s(self._num_threads, PEAK_SECONDS)),
        )


def main() -> None:
    """Print the probes of as many threads as asked for (default 2)."""
    probe = Probe(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    for _ in range(3):
        peaks = probe.peaks()
        print(
            f"read {probe.read_bytes_per_s() / 1e9:.1f} GB/s, "
            f"bf16 {peaks.bf16 / 1e9:.0f} GFLOP/s, "
            f"int8 {peaks.int8 / 1e9:.0f} GOP/s"
        )


if __name__ == "__main__":
    main()
