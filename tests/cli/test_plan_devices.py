"""`kvloom plan` over devices: the fewest that hold users, side by side, and the drawing."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvloom.cli.main import main
from kvloom.cli.plan import DEVICES as PLAN_DEVICES
from kvloom.cli.plan import make_plan
from kvloom.cli.plan_budget import MemorySource
from kvloom.cli.plan_draw import draw_svg, draw_text, segments_of
from kvloom.config import EngineConfig
from kvloom.kv.memory import GIB
from kvloom.simulate.devices import DEVICES
from plan_command import plan, plan_json, refusal

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
LLAMA_70B, GPT_OSS = (str(CONFIGS / f"{n}.json") for n in ("llama-3.3-70b", "gpt-oss-20b"))


@pytest.mark.parametrize(("kv_dtype", "num_requests"), [("bfloat16", 10), ("fp8", 20)])
def test_trainium2_worked_numbers(capsys, kv_dtype, num_requests):
    """24 GiB x 0.9 x 0.3 are 6.48 GiB; a token of 80 layers and one head of 128 takes 40,960 B."""
    args = (LLAMA_70B, "--device", "trn2", "--tp", "16", "--max-model-len", "16384")
    dtypes = ("--dtype", "bfloat16", "--kv-cache-dtype", kv_dtype)
    assert re.search(r"= for KV +6\.48 GiB", plan(capsys, *args, *dtypes))
    planned = plan_json(capsys, *args, *dtypes)
    assert int(planned["max_concurrency"]) == num_requests
    assert planned["kv_bytes_per_token"] == 40_960 * 10 // num_requests


def test_trainium_pads_steps_to_declared_shapes(capsys):
    """NEURON.md section 7; the defaults are 64 requests and 2,048 tokens."""
    args = (LLAMA_70B, "--tp", "16", "--max-model-len", "16384", "--device")
    text = plan(capsys, *args, "trn2")
    assert re.search(r"token counts +12  1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048\n", text)
    assert re.search(r"requests +7  1, 2, 4, 8, 16, 32, 64\n", text)
    assert re.search(r"context lengths +2  2048, 16384\n", text)
    assert re.search(r"prefill segment +2048  ", text)
    buckets = plan_json(capsys, *args, "trn3")["buckets"]
    assert buckets["num_reqs"] == [1, 2, 4, 8, 16, 32, 64]
    args = (LLAMA_70B, "--tp", "16", "--max-model-len", "16384", "--device", "h200")
    assert "Step shapes" not in plan(capsys, *args)
    assert plan_json(capsys, *args)["buckets"] is None


def test_plan_offers_the_catalogue():
    assert ("cpu", "cuda", *(name for name in DEVICES if name != "cpu")) == PLAN_DEVICES


def test_fp8_is_for_plans_of_other_devices(capsys):
    assert "no backend of this host" in refusal(capsys, LLAMA_70B, "--kv-cache-dtype", "fp8")


def test_every_device_of_the_catalogue_is_compared(capsys):
    answers = plan_json(capsys, LLAMA_70B, "--compare", "all")
    assert [a["device"] for a in answers] == [n for n in DEVICES if n != "cpu"]
    for answer in answers:
        tp = answer["tensor_parallel_size"]
        assert answer["num_devices"] == tp
        args = (LLAMA_70B, "--device", answer["device"])
        planned = plan_json(capsys, *args, "--tp", str(tp))
        assert planned["max_model_len"] == answer["max_context"] == answer["context"]
        assert int(planned["max_concurrency"]) == answer["num_held"]
        if tp > 1:  # half as many do not hold one request
            assert main(["plan", *args, "--tp", str(tp // 2)]) == 1
            capsys.readouterr()


def test_the_fewest_devices_hold_all_users(capsys):
    args = (GPT_OSS, "--compare", "h100", "--for-users", "700", "--context", "8192")
    answers = plan_json(capsys, *args)
    numbers = [answer["num_devices"] for answer in answers]
    assert numbers == sorted(numbers)
    expected = {}
    for tp in (1, 2, 4):
        at_size = (GPT_OSS, "--device", "h100", "--tp", str(tp), "--max-model-len", "8192")
        held = int(plan_json(capsys, *at_size)["max_concurrency"])
        theirs = plan_json(capsys, *at_size, "--layout", "vllm")
        usable = (theirs["num_blocks"] - 1) / theirs["num_blocks"]
        num_replicas = -(-700 // held)
        expected[tp] = (
            num_replicas,
            num_replicas * held,
            num_replicas * int(theirs["max_concurrency"] * usable),
        )
        if num_replicas == 1:
            break
    found = {
        a["tensor_parallel_size"]: (a["num_replicas"], a["num_held"], a["num_held_by_vllm"])
        for a in answers
    }
    assert found == expected
    best = answers[0]
    text = plan(capsys, *args)
    assert f"{best['num_devices']} x h100, --tp {best['tensor_parallel_size']}" in text
    assert "in vLLM" in text


def test_as_many_users_as_fit_need_no_second_replica(capsys):
    at_size = (LLAMA_70B, "--device", "h200", "--tp", "2", "--max-model-len", "8192")
    held = int(plan_json(capsys, *at_size)["max_concurrency"])
    for num_users, num_replicas in ((held, 1), (held + 1, 2)):
        args = (LLAMA_70B, "--compare", "h200", "--for-users", str(num_users), "--context", "8192")
        answers = plan_json(capsys, *args)
        (answer,) = [a for a in answers if a["tensor_parallel_size"] == 2]
        assert answer["num_replicas"] == num_replicas


def test_equal_layers_need_no_second_layout(capsys):
    args = (LLAMA_70B, "--compare", "h200", "--for-users", "5", "--context", "8192")
    assert all(a["num_held_by_vllm"] is None for a in plan_json(capsys, *args))
    assert "in vLLM" not in plan(capsys, *args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--compare", "h100,h1000"), "unknown device 'h1000'"),
        (("--for-users", "5"), "--context"),
        (("--for-users", "0", "--context", "100"), "at least 1"),
        (("--compare", "all", "--tp", "2"), "leave out --tp"),
        (("--compare", "all", "--memory", "1GiB"), "leave out --memory"),
        (("--compare", "tpu-v5e", "--context", "1000000"), "was made for at most"),
    ],
)
def test_refusals(capsys, args, reason):
    assert reason in refusal(capsys, LLAMA_70B, *args)


PLANNED = {
    "h100": (MemorySource("h100"), "gemma-3-27b-text", 2, DEVICES["h100"].memory_bytes),
    "trn2": (MemorySource("trn2"), "llama-3.1-8b", 4, 24 * GIB),
    "trn3": (MemorySource("trn3", headroom_bytes=8 * GIB), "llama-3.1-8b", 2, 36 * GIB),
    "given": (MemorySource("cuda", 9 * GIB), "gpt-oss-20b", 1, None),
}


@pytest.mark.parametrize("case", PLANNED)
def test_the_drawing_leaves_no_byte_out(case):
    source, model, num_ranks, whole = PLANNED[case]
    options = {"model": str(CONFIGS / f"{model}.json"), "max_model_len": 8192}
    config = EngineConfig.from_options({**options, "tensor_parallel_size": num_ranks})
    planned = make_plan(config, source)
    segments = segments_of(planned)
    if whole is None:
        whole = 9 * GIB + planned.weights_bytes
    assert sum(segment.num_bytes for segment in segments) == whole
    by_mark = {segment.mark: segment.num_bytes for segment in segments}
    assert by_mark["W"] == planned.weights_bytes
    plan, groups = planned.plan, [s for s in segments if s.mark.isdigit()]
    assert len(groups) == len(plan.group_costs)
    for segment, cost in zip(groups, plan.group_costs, strict=True):
        share = cost.num_steady_blocks / plan.num_blocks_per_request
        num_blocks = (plan.num_blocks - 1 - plan.num_reserved_blocks) * share
        assert abs(segment.num_bytes / plan.block_bytes[0] - num_blocks) <= 1
    assert by_mark["N"] == plan.block_bytes[0]

    text = draw_text(segments)
    (bar,) = re.findall(r"\[(.*)\]", text)
    assert len(bar) == 64
    assert bar.count("W") == pytest.approx(64 * planned.weights_bytes / whole, abs=1)
    svg = ElementTree.fromstring(draw_svg("a & b", segments))
    rects = [r for r in svg.findall("{*}rect") if r.get("y") == "40"]
    assert sum(float(r.get("width")) for r in rects) == pytest.approx(720, abs=0.1)


def test_drawings_are_printed_and_written(capsys, tmp_path):
    file = tmp_path / "plan.svg"
    text = plan(capsys, GPT_OSS, "--device", "h100", "--draw", "--svg", str(file))
    assert "Memory of one rank: 79.65 GiB" in text
    assert "gpt_oss" in ElementTree.parse(file).getroot().find("{*}text").text
