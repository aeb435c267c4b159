"""Engines as processes: started once, asleep while another one runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# In a folder of its own: engines must not find our other scripts when they import by name.
WORKER = Path(__file__).parent / "peers_side" / "peers_worker.py"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TICK_SECONDS = 0.02  # what counting in ticks may be wrong by
EXIT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine.

    Attributes:
        python: of the environment the engine is installed in.
        kind: of peers_worker.ENGINES.
        options: for that engine, as JSON can hold them.
        environment: variables set for it.
    """

    python: str
    kind: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class EngineError(Exception):
    """An engine did not start, or did not answer."""


class EngineProcess:
    """A worker and all processes it starts, which are stopped (SIGSTOP) between its commands."""

    def __init__(self, name: str, command: EngineCommand, log: Path) -> None:
        """Start it; `start` waits until it is loaded."""
        self.name = name
        self._log = log
        arguments = [command.python, str(WORKER), command.kind, command.model]
        with log.open("w", encoding="utf-8") as log_file:
            self._process = subprocess.Popen(
                [*arguments, json.dumps(dict(command.options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **command.environment},
                cwd=log.parent,  # `python -m` looks for modules there, and vLLM uses it
                text=True,
                start_new_session=True,
            )

    def start(self) -> float:
        """Wait until it is loaded, and let it sleep; seconds it took."""
        seconds = float(self._receive()["load_seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Wake it for one command."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(dict(command)) + "\n")
        self._process.stdin.flush()
        answer = self._receive()
        self._signal(signal.SIGSTOP)
        return answer

    def cpu_seconds(self) -> float:
        """Processor time of the worker and the processes it started that still run."""
        stats = (read_stat(path) for path in Path("/proc").glob("[0-9]*"))
        ticks = (stat.ticks for stat in stats if stat and stat.session == self._process.pid)
        return sum(ticks) / TICKS_PER_SECOND

    def close(self) -> None:
        """End it and what it started."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._signal(signal.SIGKILL)  # what it started may be left
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.name} ended; {self._log} says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, number)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What /proc says of a process: its session, and processor ticks in user and system mode."""

    session: int
    ticks: int


def read_stat(process: Path) -> ProcessStat | None:
    """From a folder of /proc; None if the process has ended."""
    try:
        text = (process / "stat").read_text()
    except OSError:
        return None
    # The second field is a name in parentheses and may hold anything.
    fields = text.rpartition(")")[2].split()  # from the third field on
    return ProcessStat(session=int(fields[3]), ticks=int(fields[11]) + int(fields[12]))


def busy_seconds() -> float:
    """Processor time that this machine spent on anything since it started."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND
