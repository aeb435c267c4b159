"""Which formats and windows the chosen backend's model has."""

from __future__ import annotations

import pytest

from kvloom.config import EngineConfig
from kvloom.dtypes import DType
from kvloom.errors import ConfigError
from kvloom.models.parallel import TensorParallelRank
from kvloom.runner.backends import choose_backend, resolve_native_dtypes
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
    dtypes = resolve_native_dtypes(EngineConfig.from_options({"dtype": dtype}), stored)
    assert (dtypes.weights, dtypes.kv) == (expected, expected)


def test_a_dtype_that_the_native_backend_has_not_is_refused():
    with pytest.raises(ConfigError, match="float32 or bfloat16, not float16"):
        resolve_native_dtypes(EngineConfig.from_options({"dtype": "float16"}), {"F32"})


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
