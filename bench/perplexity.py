"""What a format costs in text: perplexity, and the distance from bf16 of the same weights.

    bench/perplexity.py [--model MODEL] [--base OPTIONS] [MODE ...]

Base and modes are options of `LLM` as JSON. Without any, the base is bf16 and the modes are the
file's own format, read in large chunks (a prompt), in small ones (as decode steps have it, whose
kernels differ), and with an 8-bit KV cache. KL is that of the base's distribution from the mode's,
over the whole vocabulary, the mean over positions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom import LLM, SamplingParams
from kvloom.config import DEFAULT_MODEL

HERE = Path(__file__).parent
TEXTS = (HERE / "perplexity.txt", HERE.parent / "tests" / "golden" / "prompts.txt")
BETWEEN_PASSAGES = "\n---\n"
NUM_TOKENS = 2000
BASE = {"dtype": "bfloat16"}
# Fewer tokens per step than the kernels take for a prompt.
SMALL_STEP = {"max_num_batched_tokens": 32, "max_num_seqs": 32}
MODES = ({}, SMALL_STEP, {"kv_cache_dtype": "int8", **SMALL_STEP})

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a mode is from the base.

    Attributes:
        mean_kl: nats per token.
        top_1_share: positions where both would say the same token.
    """

    perplexity: float
    base_perplexity: float
    mean_kl: float
    top_1_share: float


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )


def compare(
    base: Sequence[Array], mode: Sequence[Array], passages: Sequence[list[int]]
) -> Distance:
    """From log-probabilities [num_tokens - 1, vocab_size] of each passage."""
    scores: list[Array] = []
    base_scores: list[Array] = []
    divergences: list[Array] = []
    agreements: list[Any] = []
    for theirs, ours, token_ids in zip(base, mode, passages, strict=True):
        rows, targets = np.arange(len(token_ids) - 1), token_ids[1:]
        scores.append(ours[rows, targets])
        base_scores.append(theirs[rows, targets])
        divergences.append((np.exp(theirs) * (theirs - ours)).sum(axis=-1, dtype=np.float64))
        agreements.append(ours.argmax(axis=-1) == theirs.argmax(axis=-1))
    return Distance(
        perplexity=float(np.exp(-np.concatenate(scores).mean(dtype=np.float64))),
        base_perplexity=float(np.exp(-np.concatenate(base_scores).mean(dtype=np.float64))),
        mean_kl=float(np.concatenate(divergences).mean()),
        top_1_share=float(np.concatenate(agreements).mean()),
    )


class LogitsTap:
    """Copies the logits that score prompts on their way to the sampler.

    The public log-probabilities stop at the best tokens; a divergence needs all of them.
    """

    def __init__(self, llm: LLM) -> None:
        self._executor: Any = llm._core.executor
        self._backend = self._executor._workers[0]._backend
        self._execute = self._executor.execute_model
        self._executor.execute_model = self._execute_model
        self._rows: list[Array] = []

    def take(self) -> Array:
        """All rows since the last call: [num_rows, vocab_size]."""
        rows, self._rows = self._rows, []
        return np.concatenate(rows)

    def _execute_model(self, output: Any) -> Any:
        handle = self._execute(output)
        if handle.prompts:
            logits = np.asarray(self._backend.to_host(handle.logits), np.float32)
            self._rows.append(logits[len(handle.sampled) :].copy())
        return handle


def read_logprobs(
    model: str, options: Mapping[str, Any], passages: Sequence[list[int]]
) -> list[Array]:
    """Log-probabilities of every token after each one of each passage but its last."""
    llm = LLM(model=model, has_prefix_cache=False, max_model_len=2048, **options)
    tap = LogitsTap(llm)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for passage in passages:
        llm.generate([passage], params, has_progress_bar=False)
        found.append(log_softmax(tap.take()))
        assert len(found[-1]) == len(passage) - 1
    llm.shutdown()
    return found


def read_passages(model: str) -> list[list[int]]:
    """Texts of this repository in tokens, NUM_TOKENS of them that are predicted."""
    from kvloom.tokenizer import load_tokenizer
    from kvloom.weights.checkpoint import open_checkpoint
    from kvloom.weights.source import resolve_model

    tokenizer = load_tokenizer(open_checkpoint(resolve_model(model)))
    passages = []
    num_left = NUM_TOKENS
    for path in TEXTS:
        for text in path.read_text(encoding="utf-8").split(BETWEEN_PASSAGES):
            token_ids = tokenizer.encode(text, add_special_tokens=True)[: num_left + 1]
            if len(token_ids) > 1:
                passages.append(token_ids)
                num_left -= len(token_ids) - 1
    if num_left:
        raise SystemExit(f"the texts are {num_left} tokens short of {NUM_TOKENS}")
    return passages


def main() -> None:
    """Print one row per mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help="options of LLM as JSON")
    parser.add_argument("--base", default=json.dumps(BASE), help="the same (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    arguments = parser.parse_args()
    modes = [json.loads(mode) for mode in arguments.modes] or MODES
    passages = read_passages(arguments.model)
    base = read_logprobs(arguments.model, json.loads(arguments.base), passages)
    print(f"{NUM_TOKENS} tokens of {arguments.model}, against {arguments.base}\n")
    print("| mode | perplexity | of the base's | KL | same best token |\n|---|---|---|---|---|")
    for options in modes:
        distance = compare(base, read_logprobs(arguments.model, options, passages), passages)
        change = distance.perplexity / distance.base_perplexity - 1
        print(
            f"| `{json.dumps(options)}` | {distance.perplexity:.3f} | {change:+.2%} "
            f"| {distance.mean_kl:.5f} | {distance.top_1_share:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
