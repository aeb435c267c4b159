"""What the vLLM plugin's texts are compared with: prompts, and transformers' greedy continuations.

A GGUF file is written as a Hugging Face folder in float32, which vLLM reads, and the answers come
from transformers over the same weights: `scripts/golden_vllm` keeps them in `golden/vllm.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 129, 300, 600, 1100)
NUM_NEW_TOKENS = 16
MAX_SCORED = 65  # longer prompts have no log-probabilities of their own here
GOLDEN = Path(__file__).parent / "golden" / "vllm.json"
_TEXT = Path(__file__).parent / "golden" / "prompts.txt"


class Case(NamedTuple):
    """A prompt and its greedy continuation.

    Attributes:
        logprobs: of each token of the continuation.
        prompt_logprobs: of each prompt token but the first; empty for long prompts.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]


def read_cases(model: str) -> list[Case]:
    """The answers for `model`, by length of the prompt."""
    return [Case(**case) for case in json.loads(GOLDEN.read_text(encoding="utf-8"))[model]]


def load_model(gguf: Path) -> Any:
    """transformers' model in float32."""
    return AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def make_float32_folder(gguf: Path, folder: Path) -> Path:
    """Write weights and tokenizer to `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    load_model(gguf).save_pretrained(folder)
    return folder


def derive_cases(gguf: Path) -> list[Case]:
    """The prompts, each from elsewhere in one text, and what the model makes of them."""
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    ids = tokenizer(_TEXT.read_text(encoding="utf-8")).input_ids
    ids *= max(LENGTHS) // len(ids) + 2
    model = load_model(gguf)
    prompts = [ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]
    return [follow(model, prompt, _generate(model, prompt)) for prompt in prompts]


@torch.inference_mode()
def follow(model: Any, prompt: list[int], tokens: list[int]) -> Case:
    """The best token and its log-probability at each step along a text, and the prompt's own."""
    scored = prompt[1:] if len(prompt) <= MAX_SCORED else []
    text = prompt + tokens[:-1]
    num_rows = len(text) if scored else len(tokens)
    scores = model(torch.tensor([text]), logits_to_keep=num_rows).logits[0].log_softmax(-1)
    best = scores[-len(tokens) :].max(dim=-1)
    return Case(
        prompt,
        best.indices.tolist(),
        [_rounded(value) for value in best.values],
        [_rounded(scores[i, token]) for i, token in enumerate(scored)],
    )


@torch.inference_mode()
def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=NUM_NEW_TOKENS,
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


def _rounded(logprob: Any) -> float:
    return round(float(logprob), 5)
