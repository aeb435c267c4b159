"""Speed of the default model on each backend: prefill, and decode alone and in a batch.

The memory bandwidth of shared machines drifts by a factor of two; ratios to other engines measured
in the same run are `bench/peers.py`'s matter.
"""

from __future__ import annotations

import time
from typing import Any

from report import print_row

from kvloom import LLM, SamplingParams

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 48
SETUPS: dict[str, dict[str, Any]] = {
    "native, 4-bit as the file": {"backend": "native"},
    "native, bfloat16": {"backend": "native", "dtype": "bfloat16"},
    "reference, float32": {"backend": "reference"},
}


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
    """Print one row per backend and kind of work."""
    for name, options in SETUPS.items():
        llm = LLM(max_model_len=1024, has_prefix_cache=False, **options)
        seconds_of(llm, 8, 16, 4)  # warm-up
        seconds = seconds_of(llm, 1, PROMPT_TOKENS, 1)
        rate = PROMPT_TOKENS / seconds
        print_row(f"{name}: prefill, one prompt of {PROMPT_TOKENS}", f"{rate:.0f} tokens/s")
        for num_requests in (1, 8):
            # The difference of two lengths leaves prefill out.
            short, long = (
                seconds_of(llm, num_requests, 16, num_tokens)
                for num_tokens in (1, 1 + OUTPUT_TOKENS)
            )
            rate = num_requests * OUTPUT_TOKENS / (long - short)
            print_row(f"{name}: decode, {num_requests} at once", f"{rate:.1f} tokens/s")
        llm.shutdown()
        del llm  # its memory must not count against the next one's


if __name__ == "__main__":
    main()
