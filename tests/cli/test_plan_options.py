"""`kvloom plan`: where memory and formats come from, and remedies that can be followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plan_command import plan_json, refusal

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")
GIB = 1 << 30
BLOCK = 16 * 131_072  # of llama-3.1-8b: 32 layers x 2 x 8 heads x 128 values x 2 bytes a token
WEIGHTS = 2 * 8_030_261_248


@pytest.fixture
def host_of(monkeypatch):
    def be(num_bytes: int) -> None:
        monkeypatch.setattr("kvloom.kv.host_memory.read_available_host_bytes", lambda: num_bytes)

    return be


def with_field(tmp_path: Path, name: str, value: object) -> str:
    config = json.loads(Path(LLAMA).read_text())
    for other in ("dtype", "torch_dtype") if name.endswith("dtype") else ():
        config.pop(other, None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {name: value}))
    return str(path)


def test_a_share_of_the_host(capsys, host_of):
    host_of(64 * GIB)
    plan = plan_json(capsys, LLAMA, "--memory-share", "0.75")
    assert plan["num_blocks"] == (48 * GIB - WEIGHTS) // BLOCK


def test_a_share_of_a_device(capsys):
    plan = plan_json(capsys, LLAMA, "--device", "h100", "--memory-share", "0.5")
    assert plan["num_blocks"] == (int(81_559 * 2**20 * 0.5) - WEIGHTS) // BLOCK
    plan = plan_json(capsys, LLAMA, "--device", "trn3", "--memory-share", "1", "--block-size", "16")
    assert plan["num_blocks"] == int(36 * GIB * 0.3) // BLOCK


def test_a_headroom_takes_the_place_of_the_cap(capsys):
    args = [LLAMA, "--device", "trn3", "--block-size", "16"]
    plan = plan_json(capsys, *args, "--headroom", "8GiB")
    assert plan["num_blocks"] == (28 * GIB - WEIGHTS) // BLOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--memory 1GiB --memory-share 0.5", "--memory and --memory-share"),
        ("--device trn2 --memory 1GiB --headroom 1GiB", "--memory and --headroom"),
        ("--device trn2 --memory-share 0.5 --headroom 1GiB", "--memory-share and --headroom"),
        ("--headroom 1GiB", "--headroom is for trn2 and trn3, not cpu"),
        ("--device cuda --memory-share 0.5", "--device cuda names no size"),
        ("--memory-share 0", "memory_share is 0"),
        ("--memory-share nan", "memory_share is nan"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(capsys, options, message):
    assert message in refusal(capsys, LLAMA, *options.split())


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ("--device cpu", ["--memory-share 0.9", "--memory 20GiB"]),
        ("--device h100 --memory-share 0.1", ["--memory-share 0.5", "--memory-share 0.1 --tp 8"]),
        ("--device trn2 --headroom 10GiB", ["--headroom 1GiB", "--headroom 10GiB --tp 8"]),
        ("--device trn2 --memory-share 0.6", ["--headroom 5GiB", "--tp 4"]),
        ("--memory 1MiB", ["--memory 1GiB"]),
    ],
)
def test_every_remedy_can_be_followed(capsys, host_of, options, remedies):
    host_of(24 * GIB)
    message = refusal(capsys, LLAMA, *options.split())
    device = options.split()[:2] if "--device" in options else []
    for remedy in remedies:
        option = remedy.split()[-2] if "--tp" in remedy else remedy.split()[0]
        assert option.strip("-") in message or "tensor-parallel ranks" in message
        plan_json(capsys, LLAMA, *device, *remedy.split())


def test_ranks_are_no_remedy_on_one_host(capsys, host_of):
    """Ranks share its memory, so each has as much less as its weights are less."""
    host_of(24 * GIB)
    assert "--tp" not in refusal(capsys, LLAMA)
    refusal(capsys, LLAMA, "--tp", "2")


def test_a_length_just_too_long_shows_the_difference(capsys):
    """1 GiB is 512 blocks of 2 MiB, of which one is reserved; 8192 stored tokens need all."""
    message = refusal(capsys, LLAMA, "--memory", "1GiB", "--max-model-len", "8193")
    assert "needs 513 blocks" in message
    assert "has 512 of 2.00 MiB" in message


def test_the_most_that_a_device_leaves_is_named(capsys):
    args = [LLAMA, "--device", "h100", "--memory"]
    left = 81_559 * 2**20 - WEIGHTS
    assert f"at most {left}," in refusal(capsys, *args, str(left + 1))
    assert plan_json(capsys, *args, str(left))["num_blocks"] == left // BLOCK


@pytest.mark.parametrize("value", [3, ["a"], {}, 0, False, "float8"])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_config_dtype_that_is_none_is_refused(capsys, tmp_path, name, value):
    model = with_field(tmp_path, name, value)
    message = refusal(capsys, model, "--memory", "32GiB")
    assert f"the config's {name}: unknown dtype {value!r}" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rms_norm_eps", "x"),
        ("rope_theta", -1),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
    ],
)
def test_a_malformed_config_is_one_message(capsys, tmp_path, name, value):
    message = refusal(capsys, with_field(tmp_path, name, value), "--memory", "32GiB")
    assert "the config's" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("stored", "options", "expected"),
    [
        ("bfloat16", "", "bfloat16"),
        ("float16", "", "bfloat16"),
        ("float32", "", "float32"),
        ("float32", "--dtype bfloat16", "bfloat16"),
        ("bfloat16", "--dtype float32", "float32"),
        ("float32", "--kv-cache-dtype bfloat16", "bfloat16"),
        ("float16", "--device h100", "float16"),
    ],
)
def test_this_host_stores_what_the_engine_stores(capsys, tmp_path, stored, options, expected):
    """The native backend computes float32 exactly, and all else in bfloat16; it has no float16."""
    model = with_field(tmp_path, "torch_dtype", stored)
    plan = plan_json(capsys, model, "--memory", "32GiB", *options.split())
    (group,) = plan["workers"][0]["kv_cache_groups"]
    assert group["kv_cache_spec"]["dtype"] == expected


def test_a_dtype_that_this_host_does_not_compute_in_is_refused(capsys):
    assert "float32 or bfloat16" in refusal(capsys, LLAMA, "--dtype", "float16")
    plan_json(capsys, LLAMA, "--dtype", "float16", "--device", "h100")
