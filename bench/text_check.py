"""Whether an engine says what the model says: its text under float32 transformers.

Each engine answers the same chat prompts greedily. The mean log-probability that transformers, in
float32, gives to the tokens of an answer must be near that of transformers' own greedy answer.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).parent / "peers_side" / "text_check_oracle.py"
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Explain in two sentences why the sky is blue.",
    "Why do leaves fall in autumn?",
    "Tell me about the moon in three sentences.",
)
MAX_TOKENS = 64
TOLERANCE = 0.1
OWN = "transformers"


@dataclass(frozen=True, slots=True)
class Score:
    """Of one engine's answers.

    Attributes:
        logprobs: per answer, the log-probabilities of its tokens.
    """

    logprobs: Sequence[Sequence[float]]

    @property
    def mean_logprob(self) -> float:
        """Over all tokens of all answers; minus infinity if an answer is empty."""
        if not all(self.logprobs):
            return float("-inf")
        values = [value for answer in self.logprobs for value in answer]
        return sum(values) / len(values)


def is_right(score: Score, own: Score) -> bool:
    """Whether the texts count as the model's."""
    return abs(score.mean_logprob - own.mean_logprob) <= TOLERANCE


def score_texts(
    python: str, model: Path, prompts: Sequence[str], texts: Mapping[str, Sequence[str]]
) -> dict[str, Score]:
    """Score every engine's texts, and transformers' own under the name OWN.

    Args:
        python: of an environment that has transformers and torch.
        model: a Hugging Face folder.
        prompts: rendered chats, in which every special token is written out.
        texts: per engine, one answer per prompt.
    """
    question: dict[str, Any] = {
        "model": str(model),
        "prompts": list(prompts),
        "texts": {name: list(answers) for name, answers in texts.items()},
        "max_tokens": MAX_TOKENS,
        "own": OWN,
    }
    run = subprocess.run(
        [python, str(ORACLE)],
        input=json.dumps(question),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: Score(logprobs) for name, logprobs in json.loads(run.stdout).items()}


def report_lines(scores: Mapping[str, Score]) -> list[str]:
    """One line per engine."""
    own = scores[OWN]
    lines = [f"{OWN} in float32: mean log-probability {own.mean_logprob:.3f} of its own text"]
    for name, score in scores.items():
        if name != OWN:
            difference = score.mean_logprob - own.mean_logprob
            word = "right" if is_right(score, own) else "WRONG TEXT"
            lines.append(f"{name}: {score.mean_logprob:.3f} ({difference:+.3f}): {word}")
    return lines
