"""Engines as processes, with a worker that answers without an engine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import peers_process
import pytest
from peers_process import EngineCommand, EngineError, EngineProcess, busy_seconds, read_stat

WORKER = """
import json, sys, time
print(json.dumps({"load_seconds": 0.5}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command == {}:
        sys.exit(3)
    end = time.process_time() + command["busy_seconds"]
    while time.process_time() < end:
        pass
    print(json.dumps({"arguments": sys.argv[1:], **command}), flush=True)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(peers_process, "WORKER", worker)
    command = EngineCommand(sys.executable, "kind", "model", {"a": 1}, {"B": "2"})
    process = EngineProcess("engine", command, tmp_path / "log")
    yield process
    process.close()


def state_of(engine):
    stat = Path(f"/proc/{engine._process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def wait_for_state(engine, state):
    end = time.monotonic() + 10
    while state_of(engine) != state and time.monotonic() < end:
        time.sleep(0.01)
    return state_of(engine)


def test_it_sleeps_between_commands(engine):
    assert engine.start() == 0.5
    assert wait_for_state(engine, "T") == "T"
    answer = engine.run({"busy_seconds": 0})
    assert answer["arguments"] == ["kind", "model", '{"a": 1}']
    assert wait_for_state(engine, "T") == "T"


def test_its_processor_time_is_its_own(engine):
    engine.start()
    busy, own = busy_seconds(), engine.cpu_seconds()
    engine.run({"busy_seconds": 0.3})
    assert engine.cpu_seconds() - own >= 0.28  # ticks are 10 ms
    assert busy_seconds() - busy >= 0.28


def test_an_engine_that_ends_is_an_error(engine):
    engine.start()
    with pytest.raises(EngineError, match="engine ended"):
        engine.run({})


def test_close_ends_a_sleeping_engine(engine):
    engine.start()
    engine.close()
    assert engine._process.returncode == 0


def test_stat_of_a_process():
    stat = read_stat(Path(f"/proc/{os.getpid()}"))
    assert stat.session == os.getsid(0)
    assert read_stat(Path("/proc/999999999")) is None


def test_a_process_may_be_named_anything(tmp_path):
    fields = ["S", "1", "7", "42", *"0000000", "300", "20", "0"]
    (tmp_path / "stat").write_text(f"9 (a) 1 (b) {' '.join(fields)}\n")
    stat = read_stat(tmp_path)
    assert (stat.session, stat.ticks) == (42, 320)
