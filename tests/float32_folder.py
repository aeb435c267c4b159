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
    return [_answer(model, ids[7 * i : 7 * i + length]) for i, length in enumerate(LENGTHS)]


@torch.inference_mode()
def _answer(model: Any, prompt: list[int]) -> Case:
    result = model(torch.tensor([prompt]), use_cache=True)
    scores = result.logits[0].log_softmax(-1)  # [num_tokens, vocab_size]
    scored = prompt[1:] if len(prompt) <= MAX_SCORED else []
    prompt_logprobs = [_rounded(scores[i, token]) for i, token in enumerate(scored)]
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        tokens.append(int(scores[-1].argmax()))
        logprobs.append(_rounded(scores[-1].max()))
        if len(tokens) == NUM_NEW_TOKENS:
            return Case(prompt, tokens, logprobs, prompt_logprobs)
        last = torch.tensor([tokens[-1:]])
        result = model(last, past_key_values=result.past_key_values, use_cache=True)
        scores = result.logits[0].log_softmax(-1)


def _rounded(logprob: Any) -> float:
    return round(float(logprob), 5)
