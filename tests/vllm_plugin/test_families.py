"""Tiny random models of every family: under vLLM, too, log-probabilities are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm import SamplingParams

from tiny_families import ALL_CASES, GOLDEN_FILES
from tiny_models import BASE, GOLDEN_ROWS, NUM_TOKENS, make_token_ids, make_weights, tensor_shapes

GOLDEN = Path(__file__).parent.parent / "golden"
# vLLM looks up a model by the name of its class in transformers.
ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def make_folder(case: str, folder: Path) -> Path:
    """The case's config and weights."""
    config = ALL_CASES[case]
    names = {"architectures": [ARCHITECTURES[config["model_type"]]], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**config, **names}))
    save_file(make_weights(tensor_shapes(config)), folder / "model.safetensors")
    return folder


def golden_logprobs(case: str) -> np.ndarray:
    """[num_rows, vocab_size], of the positions GOLDEN_ROWS."""
    [name] = [name for name, cases in GOLDEN_FILES.items() if case in cases]
    with np.load(GOLDEN / f"{name}.npz") as file:
        logits = file[case].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# vLLM takes seconds to look at a class it has not seen: one hybrid model stands for all.
ALWAYS = "gemma3_pattern"


@pytest.mark.parametrize(
    "case",
    [case if case == ALWAYS else pytest.param(case, marks=pytest.mark.full) for case in ALL_CASES],
)
def test_a_prompt_in_chunks_scores_as_in_transformers(
    case: str, tmp_path: Path, make_llm: Callable[..., Any]
) -> None:
    vocab_size = BASE["vocab_size"]
    llm = make_llm(
        make_folder(case, tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=NUM_TOKENS + 1,
        max_num_seqs=2,
        max_num_batched_tokens=7,
        max_logprobs=vocab_size,
    )
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=vocab_size, logprobs=vocab_size
    )
    [output] = llm.generate({"prompt_token_ids": make_token_ids(case)}, params, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    found = [[row[token].logprob for token in range(vocab_size)] for row in rows[GOLDEN_ROWS]]
    np.testing.assert_allclose(found, golden_logprobs(case), rtol=0, atol=1e-4)
