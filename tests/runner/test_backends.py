"""Which formats and windows the chosen backend's model has."""

from __future__ import annotations

import pytest

from kvloom.config import EngineConfig
from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.models.parallel import TensorParallelRank
from kvloom.runner.backends import choose_backend, resolve_native_dtypes
from tiny_models import CASES


@pytest.mark.parametrize(("max_model_len", "window"), [("auto", 16), (17, 16), (16, None)])
def test_a_window_that_no_request_outgrows_is_none(fakes, max_model_len, window):
    """A query sees 16 keys, and a request of 16 tokens has no more."""
    checkpoint = fakes.checkpoint(CASES["mistral_gqa"] | {"sliding_window": 16})
    config = EngineConfig.from_options({"max_model_len": max_model_len, "backend": "reference"})
    model = choose_backend(config, checkpoint, TensorParallelRank(0, 1)).model
    assert {layer.sliding_window_size for layer in model.get_kv_spec().layers} == {window}
    assert model.max_model_len == 64


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
    dtypes = resolve_native_dtypes(EngineConfig.from_options({"dtype": dtype}), stored)
    assert (dtypes.weights, dtypes.kv) == (expected, expected)


def test_a_dtype_that_the_native_backend_has_not_is_refused():
    with pytest.raises(ConfigError, match="float32 or bfloat16, not float16"):
        resolve_native_dtypes(EngineConfig.from_options({"dtype": "float16"}), {"F32"})
