"""Fixtures of the tests that run inside vLLM; without vLLM there are none."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if not HAS_VLLM:
    collect_ignore_glob = ["test_*.py"]

# Tests run beside each other, one for each core.
ONE_THREAD = {"num_threads": 1}
# A model of which vLLM reads nothing but this.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 997,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def pytest_configure(config: pytest.Config) -> None:
    if HAS_VLLM:  # vLLM and torch warn of much that is not ours
        config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """No look-ups on the net, and one process unless a test asks for two."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        # Processes that vLLM starts import the tests' own workers.
        paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights and tokenizer."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


@contextmanager
def _llms() -> Iterator[Callable[..., Any]]:
    from vllm import LLM

    made = []

    defaults = {"kv_cache_memory_bytes": 1 << 28, "additional_config": ONE_THREAD}

    def make(model: Path, **options: Any) -> Any:
        made.append(LLM(model=str(model), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def make_llm() -> Iterator[Callable[..., Any]]:
    """vLLM's LLM, ended after the test."""
    with _llms() as make:
        yield make


@pytest.fixture(scope="module")
def llm(smollm2_float32: Path) -> Iterator[Any]:
    """SmolLM2 for all tests of a module."""
    with _llms() as make:
        yield make(
            smollm2_float32,
            max_model_len=1200,
            max_num_seqs=16,
            dtype="float32",
            # White space may go on until the tokens run out.
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )


@pytest.fixture(scope="session")
def smollm2_float32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face folder in float32."""
    return _float32_folder(smollm2, "smollm2", tmp_path_factory)


@pytest.fixture(scope="session")
def gemma3_float32(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for Gemma 3 270M, whose layers are of two kinds."""
    path = models_dir / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not there; run scripts/fetch_models")
    return _float32_folder(path, "gemma3", tmp_path_factory)


def _float32_folder(gguf: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for all of pytest's processes: it takes long."""
    from filelock import FileLock

    from float32_folder import make_float32_folder

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all processes of this run
    with FileLock(root / f"{name}.lock"):
        if not (root / name).exists():
            make_float32_folder(gguf, root / name)
    return root / name
