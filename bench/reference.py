"""Speed of the reference backend on the default model: prefill, and decode alone and in a batch."""

from __future__ import annotations

import time

from report import print_row

from kvloom import LLM, SamplingParams

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 48


def seconds_of(llm: LLM, num_requests: int, prompt_tokens: int, output_tokens: int) -> float:
    """Wall time of one greedy batch of unlike prompts, each run to its full length."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    prompts = [
        [(7919 * i + 31 * j) % 40_000 + 100 for j in range(prompt_tokens)]
        for i in range(num_requests)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, has_progress_bar=False)
    return time.perf_counter() - start


def main() -> None:
    """Print one row per kind of work."""
    llm = LLM(backend="reference", max_model_len=1024, has_prefix_cache=False)
    seconds_of(llm, 1, 16, 4)  # warm-up
    seconds = seconds_of(llm, 1, PROMPT_TOKENS, 1)
    print_row(f"prefill, one prompt of {PROMPT_TOKENS}", f"{PROMPT_TOKENS / seconds:.0f} tokens/s")
    for num_requests in (1, 8):
        # The difference of two lengths leaves prefill out.
        short, long = (
            seconds_of(llm, num_requests, 16, num_tokens) for num_tokens in (1, 1 + OUTPUT_TOKENS)
        )
        rate = num_requests * OUTPUT_TOKENS / (long - short)
        print_row(f"decode, {num_requests} at once", f"{rate:.1f} tokens/s")


if __name__ == "__main__":
    main()
