"""What drafts save at one request: the default model with and without them, in turn.

Texts are compared first: they must be equal. The ratio of each round is of two runs next to each
other, so that a memory bandwidth that drifts moves both; the probe beside it says how much it did.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from peers_probe import Probe
from report import print_row

from kvloom import LLM, SamplingParams

NUM_DRAFT_TOKENS = 8
NUM_ROUNDS = 5
OUTPUT_TOKENS = 128
TEXT = (Path(__file__).parent / "perplexity.txt").read_text("utf-8")[:1200]
TASKS = {
    "a summary that quotes its prompt": "Summarize this text by quoting its most important "
    f"sentences word for word:\n\n{TEXT}",
    "a story, which repeats little": "Tell me a story about a lighthouse keeper and a storm.",
}
SETUPS: dict[str, dict[str, Any]] = {"4-bit as the file": {}, "bfloat16": {"dtype": "bfloat16"}}


def answer(llm: LLM, task: str) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    first, token_ids = 0.0, []
    for delta in llm.stream([{"role": "user", "content": task}], params):
        first = first or time.perf_counter()
        token_ids += delta.token_ids
    return time.perf_counter() - first, token_ids


def main() -> None:
    """Print one row per setup and task."""
    probe = Probe(len(os.sched_getaffinity(0)))
    for setup, options in SETUPS.items():
        plain = LLM(max_model_len=1024, **options)
        drafting = LLM(max_model_len=1024, num_draft_tokens=NUM_DRAFT_TOKENS, **options)
        for name, task in TASKS.items():
            if answer(plain, task)[1] != answer(drafting, task)[1]:
                raise SystemExit(f"{setup}, {name}: the text with drafts is another one")
            before = drafting.stats.scheduler
            ratios, bandwidths = [], []
            for _ in range(NUM_ROUNDS):
                bandwidths.append(probe.read_bytes_per_s() / 1e9)
                ratios.append(answer(plain, task)[0] / answer(drafting, task)[0])
            after = drafting.stats.scheduler
            num_drafts = after.num_draft_tokens - before.num_draft_tokens
            num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
            print_row(
                f"{NUM_DRAFT_TOKENS} drafts at one request, {setup}: {name}",
                f"{median(ratios):.2f} times as fast as without ({min(ratios):.2f} to "
                f"{max(ratios):.2f}; {num_accepted} of {num_drafts} accepted; "
                f"{min(bandwidths):.0f} to {max(bandwidths):.0f} GB/s)",
            )
        plain.shutdown()
        drafting.shutdown()
        del plain, drafting  # their memory must not count against the next ones'


if __name__ == "__main__":
    main()
