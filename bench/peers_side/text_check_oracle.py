"""Scores texts with transformers in float32: one JSON object in, one out. See text_check.py.

Runs in an environment of its own, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers


def token_logprobs(model: Any, prompt_ids: list[int], ids: list[int]) -> list[float]:
    """Log-probability of each of `ids` after the prompt and those before it."""
    if not ids:
        return []
    tokens = torch.tensor([prompt_ids + ids])
    with torch.inference_mode():
        logits = model(tokens, logits_to_keep=len(ids) + 1).logits[0, :-1]
    logprobs = torch.log_softmax(logits, dim=-1)  # [num_ids, vocab_size]
    return logprobs[torch.arange(len(ids)), torch.tensor(ids)].tolist()


def greedy_text(model: Any, tokenizer: Any, prompt_ids: list[int], max_tokens: int) -> str:
    """What transformers answers."""
    tokens = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0, len(prompt_ids) :], skip_special_tokens=True))


def main() -> None:
    """Read the question, write the scores."""
    question = json.load(sys.stdin)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = question["model"]
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    prompts = [encode(prompt) for prompt in question["prompts"]]
    max_tokens = question["max_tokens"]
    own = [greedy_text(model, tokenizer, prompt, max_tokens) for prompt in prompts]
    answers = {question["own"]: own, **question["texts"]}
    scores = {
        name: [
            token_logprobs(model, prompt, encode(text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        for name, texts in answers.items()
    }
    json.dump(scores, sys.stdout)


if __name__ == "__main__":
    main()
