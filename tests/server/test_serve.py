"""`kvloom serve` as a process: ready line, answers, Ctrl-C, and what goes wrong at the start."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvloom.cli.main import main
from kvloom.server.serving import bind
from kvloom.server.settings import ServerSettings

OPTIONS = ["--num-blocks", "50", "--backend", "reference", "--port", "0"]


def test_it_serves_until_interrupted(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "kvloom", "serve", str(tiny_folder), *OPTIONS]
    names = ["--served-model-name", "tiny", "--served-model-name", "other"]
    with subprocess.Popen(
        [*command, *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.fullmatch(r"kvloom: ready on (http://127\.0\.0\.1:\d+)\n", ready)
        assert found, ready
        assert httpx.get(f"{found[1]}/health").status_code == 200
        body = {"model": "other", "prompt": "x", "max_tokens": 3}
        answer = httpx.post(f"{found[1]}/v1/completions", json=body).json()
        assert answer["model"] == "tiny"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert '"path": "/v1/completions"' in errors
        assert "Traceback" not in errors


def test_an_address_in_use_shows_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no-such-folder", "--port", port]) == 1
    assert "in use" in capsys.readouterr().err


def test_small_writes_do_not_wait_for_each_other() -> None:
    """As tokens of a stream would: each connection sends what it has."""
    with (
        bind(ServerSettings(served_model_names=("m",), port=0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_model_that_cannot_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/folder", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvloom: error:")
    assert error.count("\n") == 1


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "one", "--model", "two"]) == 1
    assert "two models" in capsys.readouterr().err


def test_a_key_file_without_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("\n")
    assert main(["serve", "--api-key-file", str(tmp_path / "keys")]) == 1
    assert "holds no key" in capsys.readouterr().err
