"""The command as a shell sees it: streams that fail, exit codes, and one line for every error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom.cli.main import main
from tiny_folder import make_tiny_folder

LLAMA = str(Path(__file__).parents[1] / "data" / "model_configs" / "llama-3.1-8b.json")
PLAN = f"plan {LLAMA} --memory 8GiB"
KVLOOM = f"{sys.executable} -m kvloom"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_folder(tmp_path_factory.mktemp("model")))


def shell(command: str, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a bash command, as bytes read as latin-1."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, env=kept | env, check=False
    )
    return run.returncode, run.stdout.decode("latin-1"), run.stderr.decode("latin-1")


def assert_one_line(stderr: str, *words: str) -> None:
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("kvloom"), stderr
    for word in words:
        assert word in stderr


def usage_error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert_one_line(message, "--help")
    return message


def test_a_reader_that_leaves_ends_the_command_as_sigpipe_would(tiny: str):
    for command in (PLAN, f"generate hi --model {tiny} --max-tokens 9"):
        code, _, stderr = shell(f"{KVLOOM} {command} | true")
        assert code == 128 + signal.SIGPIPE
        assert "Error" not in stderr


def test_output_that_cannot_be_written(tiny: str):
    for command in (PLAN, f"generate hi --model {tiny} --max-tokens 9"):
        code, _, stderr = shell(f"{KVLOOM} {command} >/dev/full")
        assert code == 1
        assert_one_line(stderr, "No space left on device")


@pytest.mark.parametrize(
    ("command", "words"), [(f"{PLAN} >&-", "stdout is closed"), ("generate - <&-", "stdin is")]
)
def test_closed_streams(command: str, words: str):
    code, _, stderr = shell(f"{KVLOOM} {command}")
    assert code == 1
    assert_one_line(stderr, words)


def test_closed_stderr_is_no_reason_to_fail():
    code, stdout, _ = shell(f"{KVLOOM} {PLAN} 2>&-")
    assert code == 0
    assert "num_blocks" in stdout


def test_text_must_be_utf8():
    for command in ("printf 'caf\\xe9' | KVLOOM generate -", "KVLOOM generate $'caf\\xe9'"):
        code, _, stderr = shell(command.replace("KVLOOM", KVLOOM))
        assert code == 1
        assert_one_line(stderr, "not UTF-8", " 3)")


def test_answers_are_printed_in_any_encoding(tiny: str):
    """The tiny model's bytes are mostly no UTF-8, so its text is full of U+FFFD."""
    options = f"--model {tiny} --max-tokens 40 --temperature 3 --ignore-eos"
    code, stdout, stderr = shell(f"{KVLOOM} generate hi {options}", PYTHONIOENCODING="utf-8")
    assert code == 0, stderr
    assert "\xef\xbf\xbd" in stdout
    code, in_ascii, stderr = shell(f"{KVLOOM} generate hi {options}", PYTHONIOENCODING="ascii")
    assert code == 0, stderr
    assert in_ascii.isascii()
    assert "?" in in_ascii


def test_stdin_and_an_argument_are_the_same_prompt(tiny: str):
    options = f"--model {tiny} --max-tokens 1 --num-blocks 40"
    outputs = {
        shell(command.replace("KVLOOM", f"{KVLOOM} generate").replace("OPT", options))[1:]
        for command in (
            "KVLOOM 'two words' OPT 2>&1 | grep -o 'of .* prompt tokens'",
            "echo two words | KVLOOM - OPT 2>&1 | grep -o 'of .* prompt tokens'",
        )
    }
    assert len(outputs) == 1
    ((counts, _),) = outputs
    assert "prompt tokens" in counts


def test_only_one_newline_is_taken_off(monkeypatch: pytest.MonkeyPatch):
    from io import BytesIO, TextIOWrapper

    from kvloom.cli.generate import _read_stdin

    for raw, text in ((b"a\n\n", "a\n"), (b"a\r\n", "a"), (b"\na", "\na"), (b"a\r", "a\r")):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(raw), "ascii"))
        assert _read_stdin() == text


def raising(error: BaseException) -> Callable[..., int]:
    def run(*_: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError("Unable to allocate 9 TiB"), 1, ["Unable to allocate", "--memory-share"]),
        (PermissionError(13, "Permission denied", "/x"), 1, ["/x: Permission denied"]),
        (KeyboardInterrupt(), 130, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_system_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: list[str],
):
    monkeypatch.setattr("kvloom.cli.plan.run", raising(error))
    assert main(["plan", LLAMA]) == code
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words)


def test_an_interrupt_while_commands_are_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvloom.cli.main.make_parser", raising(KeyboardInterrupt()))
    assert main(["plan", LLAMA]) == 130
    code, stdout, _ = shell(f"{sys.executable} -X importtime -c 'import kvloom.cli.main' 2>&1")
    assert code == 0
    assert "kvloom.cli.plan" not in stdout


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert "COMMAND" in usage_error(capsys)
    assert "required: prompt" in usage_error(capsys, "generate")
    assert "--nope" in usage_error(capsys, "generate", "hi", "--nope")
    assert "quote" not in usage_error(capsys, "plan", LLAMA, "more")
    message = usage_error(capsys, "generate", "What", "is", "a", "KV", "cache?")
    assert "is a KV cache?; quote the prompt" in message


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_auto_is_written_as_it_is(capsys: pytest.CaptureFixture[str], command: str):
    message = usage_error(capsys, command, "x", "--max-model-len", "Auto")
    assert 'give a number or "auto"' in message


def test_the_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]):
    from importlib.metadata import version

    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"kvloom {version('kvloom')}\n"


def test_every_sampling_option_is_explained(capsys: pytest.CaptureFixture[str]):
    """An option without help is a line of its own, with nothing on the next."""
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    lines = capsys.readouterr().out.partition("\nsampling:")[2].splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  --"):
            has_help = "  " in line.strip() or following.startswith("      ")
            assert has_help, line


def test_the_figures_say_when_there_is_no_prefix_cache(
    capsys: pytest.CaptureFixture[str], tiny: str
):
    args = ["generate", "hi", "--model", tiny, "--max-tokens", "2"]
    assert main(args) == 0
    assert "prompt tokens from the prefix cache" in capsys.readouterr().err
    assert main([*args, "--no-prefix-cache"]) == 0
    message = capsys.readouterr().err
    assert "prefix cache off" in message
    assert "from the prefix cache" not in message


def test_static_shapes_change_figures_and_no_text(capsys: pytest.CaptureFixture[str], tiny: str):
    """The prompt takes a step of 64, the two tokens behind it one of 1 each."""
    args = ["generate", "abc", "--model", tiny, "--max-tokens", "3", "--ignore-eos"]
    assert main(args) == 0
    plain = capsys.readouterr()
    assert "static" not in plain.err
    buckets = ["--num-batched-tokens-buckets", "1,4,64", "--num-seqs-buckets", "1,8"]
    assert main([*args, *buckets, "--static-shapes", "--context-len-buckets", "32,128"]) == 0
    padded = capsys.readouterr()
    assert padded.out == plain.out
    [num_prompt] = re.findall(r"of (\d+) prompt tokens", padded.err)
    figures = f"static shapes: {64 - int(num_prompt)} of 66 tokens computed are padding"
    assert figures in padded.err
    assert main([*args, "--num-seqs-buckets", "8,1"]) == 1
    assert_one_line(capsys.readouterr().err, "give positive numbers that ascend")


def test_drafts_change_figures_and_no_text(capsys: pytest.CaptureFixture[str], tiny: str):
    args = ["generate", "abcabcabc", "--model", tiny, "--max-tokens", "40", "--ignore-eos"]
    assert main(args) == 0
    plain = capsys.readouterr()
    assert "drafts" not in plain.err
    assert main([*args, "--num-draft-tokens", "3", "--min-ngram-tokens", "1"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    [(num_accepted, num_drafts)] = re.findall(r"drafts: (\d+) of (\d+) accepted", drafted.err)
    assert 0 < int(num_accepted) < int(num_drafts)
    assert main([*args, "--max-ngram-tokens", "1"]) == 1
    assert_one_line(capsys.readouterr().err, "give at least min_ngram_tokens, which is 2")


def test_answers_keep_to_a_schema_or_an_expression(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
):
    args = ["generate", "hi", "--model", tiny, "--max-tokens", "40"]
    assert main([*args, "--regex", "(ab|cd){4}"]) == 0
    assert re.fullmatch("(ab|cd){4}\n", capsys.readouterr().out)
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["one", 2]}')
    assert main([*args, "--json-schema", str(schema)]) == 0
    assert capsys.readouterr().out in ('"one"\n', "2\n")
    schema.write_text('{"type": "nothing"}')
    assert main([*args, "--json-schema", str(schema)]) == 1
    assert_one_line(capsys.readouterr().err, "Invalid type: nothing")
    assert main([*args, "--json-schema", str(tmp_path / "missing.json")]) == 1
    assert_one_line(capsys.readouterr().err, "missing.json cannot be read")


def test_verbose_names_what_runs(tmp_path: Path):
    """The native backend needs heads of multiples of 16."""
    model = make_tiny_folder(tmp_path, head_dim=16)
    command = f"{KVLOOM} generate hi --model {model} --max-tokens 1 --verbose"
    code, _, stderr = shell(f"{command} --backend reference --kv-cache-dtype bfloat16")
    assert code == 0, stderr
    assert "backend reference: computed in float32, KV bfloat16" in stderr
    code, _, stderr = shell(f"{command} --threads 2 --dtype bfloat16", KVLOOM_ISA="generic")
    assert code == 0, stderr
    assert "native library: generic" in stderr
    assert "weights bfloat16, computed in bfloat16, KV bfloat16, 2 threads" in stderr
