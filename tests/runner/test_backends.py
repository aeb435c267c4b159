"""Which formats and windows the chosen backend's model has."""

from __future__ import annotations

import sys

import pytest

from kvloom.config import EngineConfig
from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.models.parallel import TensorParallelRank
from kvloom.runner.backends import choose_backend, resolve_file_dtypes
from kvloom.weights.checkpoint import open_checkpoint
from tiny_folder import make_tiny_folder
from tiny_variants import VARIANT_CASES


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        ("auto", {"F32"}, DType.FLOAT32),
        ("auto", {"F32", "Q8_0"}, DType.BFLOAT16),
        ("auto", {"BF16"}, DType.BFLOAT16),
        ("torch.float32", {"BF16"}, DType.FLOAT32),
        ("bfloat16", {"F32"}, DType.BFLOAT16),
    ],
)
def test_native_formats(dtype, stored, expected):
    """Only a file of float32 values, or a user who asks for it, is worth twice the bytes."""
    dtypes = resolve_file_dtypes(EngineConfig.from_options({"dtype": dtype}), stored)
    assert (dtypes.weights, dtypes.kv) == (expected, expected)


def test_a_dtype_that_the_native_backend_has_not_is_refused():
    with pytest.raises(ConfigError, match="float32 or bfloat16, not float16"):
        resolve_file_dtypes(EngineConfig.from_options({"dtype": "float16"}), {"F32"})


@pytest.mark.parametrize(("asked", "kind"), [("auto", "long"), (17, "long"), (16, "short")])
def test_the_longest_request_asked_for_decides_the_rope(tmp_path, asked, kind):
    """A model for 64 tokens that was trained on 16, and rotates otherwise beyond them."""
    folder = make_tiny_folder(tmp_path, **VARIANT_CASES["phi3_long"])
    config = EngineConfig.from_options({"backend": "reference", "max_model_len": asked})
    choice = choose_backend(config, open_checkpoint(folder), TensorParallelRank())
    factors = VARIANT_CASES["phi3_long"]["rope_scaling"][f"{kind}_factor"]
    plain = [100.0 ** (-2 * i / 8) for i in range(4)]
    frequencies = choice.model.layers[0].attention.rope.inv_freq
    assert frequencies == pytest.approx([f / d for f, d in zip(plain, factors, strict=True)])


def choose(folder, **options):
    config = EngineConfig.from_options(options)
    return choose_backend(config, open_checkpoint(folder), TensorParallelRank())


def test_torch_that_is_not_installed_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("kvloom.ops.torch_")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"needs torch; install it with: pip install 'kvloom\["):
        choose(make_tiny_folder(tmp_path), backend="torch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "tensor_parallel_size": 2}, "tensor_parallel_size to 1"),
        ({"device": "neuron"}, "set kv_cache_bytes"),
    ],
)
def test_what_a_device_cannot_do_is_refused(tmp_path, options, message):
    config = EngineConfig.from_options(options)
    rank = TensorParallelRank(0, config.parallel.tensor_parallel_size)
    with pytest.raises(ConfigError, match=message):
        choose_backend(config, open_checkpoint(make_tiny_folder(tmp_path)), rank)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "multiples of 32, not 8"),
        ({"dtype": "float16"}, "torch backend computes in float32 or bfloat16, not float16"),
        ({"kv_cache_dtype": "fp8"}, "does not store fp8"),
        ({"device": "neuron", "kv_cache_bytes": 1 << 20}, "has no device 'neuron'"),
    ],
)
def test_what_torch_cannot_do_is_refused_before_weights_are_read(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        choose(make_tiny_folder(tmp_path), **{"backend": "torch", **options})


@pytest.mark.torch
def test_torch_takes_the_formats_and_threads_asked_for(tmp_path):
    import torch

    folder = make_tiny_folder(tmp_path)
    num_threads = torch.get_num_threads()
    try:
        choice = choose(folder, backend="torch", num_threads=3, dtype="bfloat16")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(num_threads)
    assert choice.backend.dtype == torch.bfloat16
    assert {spec.dtype for spec in choice.model.get_kv_spec().layers} == {DType.BFLOAT16}
    exact = choose(folder, backend="torch", kv_cache_dtype="bfloat16")  # a file of float32 values
    assert exact.backend.dtype == torch.float32
    assert {spec.dtype for spec in exact.model.get_kv_spec().layers} == {DType.BFLOAT16}
