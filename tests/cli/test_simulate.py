"""`kvloom simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli.main import main

DATA = Path(__file__).parents[1] / "data"
LLAMA = str(DATA / "model_configs" / "llama-3.1-8b.json")
TRACE = str(DATA / "mooncake_conversation_300.jsonl")
SMALL = ("--num-requests", "20", "--rate", "50", "--prompt-tokens", "40-80", "--output-tokens", "8")


def simulate(capsys, *args: str) -> str:
    assert main(["simulate", LLAMA, *args]) == 0
    return capsys.readouterr().out


def refusal(capsys, *args: str) -> str:
    assert main(["simulate", LLAMA, *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_text_has_the_numbers_of_the_json(capsys):
    args = (*SMALL, "--prefix-tokens", "64", "--ttft-limit", "0.05")
    data = json.loads(simulate(capsys, *args, "--json"))
    text = simulate(capsys, *args)
    assert data["num_requests"] == 20
    assert f"{data['output_tokens_per_second']:,.1f} tokens/s" in text
    assert f"{data['hit_share']:.1%}" in text
    assert data["hit_share"] > 0.2
    assert "first token within 0.05 s" in text
    assert "NVIDIA H100 datasheet" in text
    assert [s["seconds"] for s in data["timeline"]] == sorted(
        s["seconds"] for s in data["timeline"]
    )


def test_the_same_command_prints_the_same(capsys):
    assert simulate(capsys, *SMALL, "--seed", "3") == simulate(capsys, *SMALL, "--seed", "3")
    assert simulate(capsys, *SMALL, "--seed", "3") != simulate(capsys, *SMALL, "--seed", "4")


def test_a_trace_is_read(capsys):
    args = ("--trace", TRACE, "--num-requests", "5", "--shrink", "8", "--replicas", "2", "--json")
    rows = [json.loads(line) for line in Path(TRACE).read_text().splitlines()[:5]]
    data = json.loads(simulate(capsys, *args))
    num_output = sum(max(row["output_length"] // 8, 1) for row in rows)
    assert data["output_tokens_per_second"] * data["seconds"] == pytest.approx(num_output)


def test_a_sweep_is_the_runs_it_is_made_of(capsys):
    sweep = ("--sweep", "tp=1,2", "--sweep", "max-num-seqs=1,64")
    rows = json.loads(simulate(capsys, *SMALL, *sweep, "--json"))
    assert [(row["tp"], row["max_num_seqs"]) for row in rows] == [
        ("1", "1"),
        ("1", "64"),
        ("2", "1"),
        ("2", "64"),
    ]
    alone = json.loads(simulate(capsys, *SMALL, "--tp", "2", "--max-num-seqs", "1", "--json"))
    assert rows[2] == {"tp": "2", "max_num_seqs": "1", **alone}
    table = simulate(capsys, *SMALL, *sweep)
    assert f"{alone['output_tokens_per_second']:,.0f}" in table.splitlines()[5]


def test_a_sweep_says_which_value_cannot_run(capsys):
    args = (*SMALL, "--device", "tpu-v5e", "--sweep", "tp=1,8")
    table = simulate(capsys, *args).splitlines()
    assert "cannot run" in table[3]
    assert "cannot run" not in table[4]
    first, second = json.loads(simulate(capsys, *args, "--json"))
    assert "use more ranks" in first["error"]
    assert "error" not in second


def test_the_page_is_written(capsys, tmp_path):
    page = tmp_path / "report.html"
    simulate(capsys, *SMALL, "--html", str(page))
    assert page.read_text().count("<svg") == 5
    simulate(capsys, *SMALL, "--sweep", "tp=1,2", "--html", str(page))
    assert page.read_text().count("<svg") == 10


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--device", "h1000"), "choose one of cpu, a100, h100"),
        (("--routing", "random"), "choose one of round-robin"),
        (("--replicas", "0"), "give at least 1"),
        (("--trace", "/nowhere.csv"), "No such file"),
        (("--trace", LLAMA), "no trace that kvloom reads"),
        (("--sweep", "seed=1,2"), "give OPTION=V,V,... with one of block-size"),
        (("--sweep", "tp=1,two"), "two"),
        (("--prompt-tokens", "9-3"), "LOW-HIGH"),
        (("--profile", LLAMA), "--save-profile"),
        (("--trace", "x.csv", "--rate", "2", "--seed", "1"), "--rate and --seed are for made-up"),
        (("--speed", "2"), "--speed are for a --trace"),
        (("--trace", TRACE, "--output-tokens", "5"), "leave --output-tokens out"),
        (("--block-size", "0"), "give at least 1"),
        (("--memory-share", "0"), "memory_share is 0"),
        (("--max-model-len", "1000000"), "was made for at most"),
        (("--device", "tpu-v5e"), "use more ranks"),
    ],
)
def test_refusals_say_what_to_do(capsys, args, reason):
    assert reason in refusal(capsys, *args)


def test_nothing_but_the_standard_library_is_needed():
    heavy = ("numpy", "torch", "gguf", "rich", "jinja2", "tokenizers", "huggingface_hub")
    program = (
        "import sys; from kvloom.cli.main import main; "
        f"main(['simulate', {LLAMA!r}, '--num-requests', '2']); "
        f"sys.exit(', '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
