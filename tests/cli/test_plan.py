"""`kvloom plan`: vLLM's block counts, the JSON keys, the report and the refusals."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from kvloom import LLM
from kvloom.cli.main import main
from kvloom.cli.plan import byte_count
from kvloom.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from kvloom.ops.isa import built_isas
from plan_command import plan_json, refusal

DATA = Path(__file__).parents[1] / "data"
CONFIGS = DATA / "model_configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")
GIB = 1 << 30


UNIFORM = ("llama-3.1-8b", "llama-3.3-70b", "qwen2.5-0.5b", "qwen3-8b")


def vllm_rows() -> list[list]:
    """Of models whose layers are alike: there both plan the same."""
    rows = json.loads((DATA / "vllm_plans.json").read_text())["rows"]
    return [row for row in rows if row[0] in UNIFORM]


@pytest.mark.parametrize("row", vllm_rows(), ids=lambda row: "-".join(map(str, row[:4])))
def test_blocks_equal_those_of_vllm(capsys, row):
    model, tp, max_model_len, memory_bytes, num_blocks, concurrency, _ = row
    args = [
        str(CONFIGS / f"{model}.json"),
        *("--tp", str(tp), "--max-model-len", str(max_model_len)),
        *("--memory", str(memory_bytes), "--block-size", "16", "--max-num-batched-tokens", "2048"),
    ]
    if num_blocks is None:
        assert "the largest length that fits is" in refusal(capsys, *args)
        return
    plan = plan_json(capsys, *args)
    assert plan["num_blocks"] == num_blocks
    # vLLM counts its null block among those that hold requests.
    usable = concurrency * (num_blocks - 1) / num_blocks
    assert plan["max_concurrency"] == pytest.approx(usable, abs=1e-3)


def test_reference_rows_hold_plans_and_refusals():
    rows = vllm_rows()
    assert len(rows) == 56
    assert sum(row[4] is None for row in rows) == 6


def test_json_has_the_promised_keys(capsys):
    plan = plan_json(capsys, LLAMA, "--memory", "8GiB", "--tp", "2", "--max-model-len", "4096")
    assert list(plan) == [
        "max_model_len",
        "block_size",
        "num_blocks",
        "max_concurrency",
        "padding_percent",
        "weights_bytes",
        "buckets",
        "kv_bytes_per_token",
        "workers",
    ]
    assert (plan["max_model_len"], plan["block_size"], plan["num_blocks"]) == (4096, 16, 8192)
    assert plan["padding_percent"] == 0.0
    assert plan["kv_bytes_per_token"] == 32 * 2 * 4 * 128 * 2  # of one rank
    assert len(plan["workers"]) == 2


def test_json_workers_have_the_fields_of_the_dataclasses(capsys):
    plan = plan_json(capsys, LLAMA, "--memory", "8GiB", "--tp", "2", "--max-model-len", "4096")

    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    for worker in plan["workers"]:
        assert set(worker) == names(KVCacheConfig)
        (group,) = worker["kv_cache_groups"]
        assert set(group) == names(KVCacheGroupSpec)
        assert len(group["layer_names"]) == 32
        assert set(group["kv_cache_spec"]) == names(FullAttentionSpec)
        assert group["kv_cache_spec"]["dtype"] == "bfloat16"
        assert group["kv_cache_spec"]["num_kv_heads"] == 4
        assert group["kv_cache_spec"]["num_global_kv_heads"] == 8
        assert len(worker["kv_cache_tensors"]) == 32
        for tensor in worker["kv_cache_tensors"]:
            assert set(tensor) == names(KVCacheTensor)
            assert tensor["size"] == 32_768 * 8192


def test_weights_are_counted_without_being_read(capsys):
    """Llama-3.1-8B has 8,030,261,248 parameters; here all of them in bfloat16 on one rank."""
    plan = plan_json(capsys, LLAMA, "--memory", "8GiB")
    assert plan["weights_bytes"] == 2 * 8_030_261_248
    in_float32 = plan_json(capsys, LLAMA, "--memory", "8GiB", "--dtype", "float32")
    assert in_float32["weights_bytes"] == 4 * 8_030_261_248
    assert in_float32["kv_bytes_per_token"] == 2 * plan["kv_bytes_per_token"]


def test_kv_dtype_is_its_own(capsys):
    plain = plan_json(capsys, LLAMA, "--memory", "8GiB")
    small = plan_json(capsys, LLAMA, "--memory", "8GiB", "--kv-cache-dtype", "int8")
    assert small["weights_bytes"] == plain["weights_bytes"]
    assert small["kv_bytes_per_token"] == plain["kv_bytes_per_token"] // 2 * 34 // 32
    assert "unknown dtype" in refusal(capsys, LLAMA, "--kv-cache-dtype", "fp7")


def test_the_suggested_length_works(capsys):
    args = [LLAMA, "--memory", "8GiB", "--max-model-len"]
    message = refusal(capsys, *args, "131072")
    length = int(re.search(r"largest length that fits is (\d+)", message)[1])
    assert plan_json(capsys, *args, str(length))["max_model_len"] == length
    assert plan_json(capsys, *args, "auto")["max_model_len"] == length
    refusal(capsys, *args, str(length + 1))
    assert "at most 131072" in refusal(capsys, *args, "131073")


def test_h100_is_a_share_of_the_device_less_weights(capsys):
    plan = plan_json(capsys, LLAMA, "--device", "h100")
    left = int(81_559 * 2**20 * 0.9) - plan["weights_bytes"]
    assert plan["num_blocks"] == left // (16 * plan["kv_bytes_per_token"])
    more = plan_json(capsys, LLAMA, "--device", "h200")
    assert more["num_blocks"] > plan["num_blocks"]


def test_trn2_holds_ten_requests_of_llama_70b_over_16_ranks(capsys):
    args = [str(CONFIGS / "llama-3.3-70b.json"), "--tp", "16", "--max-model-len", "16384"]
    plan = plan_json(capsys, *args, "--device", "trn2")
    assert plan["block_size"] == 32
    assert plan["kv_bytes_per_token"] == 40_960
    assert int(plan["max_concurrency"]) == 10
    assert plan["num_blocks"] * 32 == pytest.approx(169_900, rel=1e-3)
    assert plan_json(capsys, *args, "--device", "trn3")["num_blocks"] > plan["num_blocks"]
    assert plan_json(capsys, *args, "--device", "trn2", "--block-size", "16")["block_size"] == 16


def test_trn_minimum_is_refused(capsys):
    args = [LLAMA, "--dtype", "float32", "--device"]  # 29.9 GiB of weights
    message = refusal(capsys, *args, "trn2")
    assert plan_json(capsys, *args, "trn3")["num_blocks"] > 1
    assert "minimum is 1.00 GiB" in message


def test_cpu_plans_with_the_memory_of_this_host(capsys, monkeypatch):
    monkeypatch.setattr("kvloom.kv.host_memory.read_available_host_bytes", lambda: 64 * GIB)
    for tp in (1, 2):
        plan = plan_json(capsys, LLAMA, "--tp", str(tp))
        left = 32 * GIB // tp - plan["weights_bytes"]
        assert plan["num_blocks"] == left // (16 * plan["kv_bytes_per_token"])
    monkeypatch.setattr("kvloom.kv.host_memory.read_available_host_bytes", lambda: 4 * GIB)
    assert "no memory for KV" in refusal(capsys, LLAMA)


def test_cuda_asks_for_a_size(capsys):
    assert "--memory" in refusal(capsys, LLAMA, "--device", "cuda")
    plan = plan_json(capsys, LLAMA, "--device", "cuda", "--memory", "40GiB")
    assert plan["num_blocks"] == 20_480


def test_memory_beyond_the_device_is_refused(capsys):
    plan_json(capsys, LLAMA, "--device", "h100", "--memory", "60GiB")
    message = refusal(capsys, LLAMA, "--device", "h100", "--memory", "70GiB")
    assert "more than the 79.65 GiB" in message


@pytest.mark.parametrize("tp", ["3", "12"])
def test_tensor_parallel_sizes_that_do_not_fit_are_refused(capsys, tp):
    message = refusal(capsys, LLAMA, "--memory", "8GiB", "--tp", tp)
    assert "1, 2, 4, 8, 16, 32" in message


GEMMA = [str(CONFIGS / "gemma-3-270m.json"), "--memory", "40GiB", "--max-model-len", "4096"]


def test_layers_that_differ_are_groups_in_one_tensor(capsys):
    plan = plan_json(capsys, *GEMMA)
    [worker] = plan["workers"]
    windows, full = worker["kv_cache_groups"]
    assert (len(windows["layer_names"]), len(full["layer_names"])) == (15, 3)
    assert windows["kv_cache_spec"]["sliding_window"] == 512
    assert (windows["kv_cache_spec"]["block_size"], full["kv_cache_spec"]["block_size"]) == (16, 80)
    assert plan["block_size"] == 16  # as configured
    block_bytes = 15 * 16 * 2 * 256 * 2
    assert plan["num_blocks"] == 40 * GIB // block_bytes
    [tensor] = worker["kv_cache_tensors"]
    assert tensor["size"] == plan["num_blocks"] * block_bytes
    assert tensor["shared_by"] == [f"layers.{i}.self_attn" for i in range(18)]
    assert plan["max_concurrency"] == (plan["num_blocks"] - 1 - 128) / (33 + 52)


def test_the_report_has_the_arithmetic_of_groups(capsys):
    assert main(["plan", *GEMMA]) == 0
    report = capsys.readouterr().out
    for fact in (
        r"group 0 .* 15 layers  in blocks of 16 tokens: 245,760 B",
        r"group 1 .* 3 layers  in blocks of 80 tokens: 245,760 B",
        r"blocks of a request .* 85  33 \+ 52, for 4095 stored tokens",
        r"reserve .* 128  128 \+ 0, once for all requests: windows with 2048 tokens in flight",
        r"max_concurrency .* 2054\.506  \(174,761 - 128\) / 85 requests",
    ):
        assert re.search(fact, report), fact


def test_the_layout_of_vllm_is_for_comparison(capsys):
    plan = plan_json(capsys, *GEMMA, "--layout", "vllm")
    assert plan["num_blocks"] == 873_813
    assert plan["max_concurrency"] == pytest.approx(823.575, abs=1e-3)
    assert [len(g["layer_names"]) for g in plan["workers"][0]["kv_cache_groups"]] == [3] * 6
    assert main(["plan", *GEMMA, "--layout", "vllm"]) == 0
    assert "873,813 / 1,061 requests of that length; vLLM counts" in capsys.readouterr().out


def test_a_folder_needs_no_weights(capsys, tmp_path):
    shutil.copy(LLAMA, tmp_path / "config.json")
    assert plan_json(capsys, str(tmp_path), "--memory", "8GiB")["num_blocks"] == 4096


def test_the_default_model_is_planned_from_its_file(capsys, smollm2):
    plan = plan_json(capsys, str(smollm2), "--memory", "1GiB")
    assert plan["max_model_len"] == 8192
    assert plan["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2  # a quantised file: KV in bfloat16
    exact = plan_json(capsys, str(smollm2), "--memory", "1GiB", "--dtype", "float32")
    assert exact["kv_bytes_per_token"] == 2 * plan["kv_bytes_per_token"]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_weights_of_a_file_are_what_the_engine_holds(capsys, smollm2, dtype):
    """134,479,872 values in matrices and 35,136 in norms, which stay float32; Q4 takes 20/32 B."""
    plan = plan_json(capsys, str(smollm2), "--memory", "1GiB", "--dtype", dtype)
    bits = {"auto": 5, "bfloat16": 16, "float32": 32}[dtype]
    least = 134_479_872 * bits // 8 + 4 * 35_136
    if built_isas():
        llm = LLM(model=str(smollm2), dtype=dtype, num_blocks=10, max_model_len=64)
        [budget] = llm._core.executor.memory_budgets
        assert plan["weights_bytes"] == budget.use.weights_bytes
        llm.shutdown()
    assert least <= plan["weights_bytes"] <= 1.3 * least  # the embedding may be another format
    elsewhere = plan_json(capsys, str(smollm2), "--device", "h100", "--dtype", "bfloat16")
    assert elsewhere["weights_bytes"] == 2 * (134_479_872 + 35_136)


def test_text_shows_the_arithmetic(capsys):
    assert main(["plan", LLAMA, "--device", "h100", "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(re.sub(" +", " ", line) for line in lines)
    for fact in (
        "llama-3.1-8b.json (llama): weights bfloat16, KV bfloat16, one of 2 rank(s)",
        "device memory 79.65 GiB",
        "x share 0.9 71.68 GiB",
        "- weights 7.48 GiB",
        "32 x FullAttentionSpec 32,768 B",
        "16 tokens x 4 of 8 KV heads x (128 + 128) bfloat16",
        "num_blocks 65,744 68,938,201,497 B // 1,048,576 B",
        "usable blocks 65,743",
        "32 x tensor 2,154,299,392 B 32,768 B x num_blocks",
        "KV per token 65,536 B",
        "padding 0.00 %",
        "max_model_len 131072 what the model was made for",
        "blocks of a request 8,192 for 131071 stored tokens",
        "max_concurrency 8.025 65,743 / 8,192",
    ):
        assert fact in text
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize(
    ("length", "note"),
    [
        ("auto", "the largest that fits; the model was made for 131072"),
        ("4096", "as asked; the model was made for 131072"),
    ],
)
def test_text_says_where_the_length_comes_from(capsys, length, note):
    assert main(["plan", LLAMA, "--memory", "8GiB", "--max-model-len", length]) == 0
    assert note in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--block-size", "24"], ["--max-model-len", "1"]])
def test_values_that_cannot_be_are_refused(capsys, option):
    assert option[0].strip("-").replace("-", "_") in refusal(capsys, LLAMA, *option)


@pytest.mark.parametrize("option", [["--layout", "x"], ["--device", "tpu"], ["--memory", "x"]])
def test_options_that_are_not_there_are_refused(capsys, option):
    with pytest.raises(SystemExit):
        main(["plan", LLAMA, *option])
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GiB", 40 * GIB),
        ("1.5 GiB", GIB * 3 // 2),
        ("512MB", 512_000_000),
        ("1000", 1000),
        ("8B", 8),
        ("999999TB", 999_999 * 10**12),
    ],
)
def test_byte_count(text, num_bytes):
    assert byte_count(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1gib", "1 G i B", "1e9", "40G", "40\u0663GiB"]
)
def test_byte_count_refuses_what_it_does_not_know(text):
    with pytest.raises(argparse.ArgumentTypeError, match="GiB"):
        byte_count(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "2000000TiB", f"{1 << 60}"])
def test_byte_count_refuses_what_no_memory_has(text):
    with pytest.raises(argparse.ArgumentTypeError, match="more than any memory"):
        byte_count(text)
