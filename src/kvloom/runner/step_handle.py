"""A step on its way through the runner: prepared, started, sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.ops.base import Batch, Value
from kvloom.runner.input_batch import IntArray, RequestState, StepInputs
from kvloom.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of a step whose logits score the prompt of one request.

    Attributes:
        tokens: [num_tokens] their places in the flat batch.
        next_token_ids: the prompt token that follows each of them.
    """

    state: RequestState
    tokens: IntArray
    next_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step whose forward pass has started.

    Attributes:
        logits: [num_rows, vocab_size], for each entry of `sampled` one row and one per draft, in
            order of position, then those of `prompts`, then padding; None when nothing ran.
        sampled: requests whose next token is drawn.
        drafts: by request that has any.
        num_padded_tokens: tokens that the forward pass computes, padding included.
        are_best_only: the logits are kept as `Batch.wants_best_only` says.
    """

    logits: Value | None = None
    sampled: list[RequestState] = field(default_factory=list)
    drafts: Mapping[str, list[int]] = field(default_factory=dict)
    prompts: list[PromptTokens] = field(default_factory=list)
    num_padded_tokens: int = 0
    are_best_only: bool = False


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is ready to start.

    Attributes:
        handle: what is returned for it, the logits aside.
        batch: None where nothing is scheduled.
        late_tokens: places in `batch` of tokens that the step before samples, and whose they are.
    """

    output: SchedulerOutput
    handle: StepHandle
    batch: Batch | None = None
    late_tokens: Sequence[tuple[int, RequestState]] = ()


def unscored_prompt_tokens(inputs: StepInputs) -> list[PromptTokens]:
    """What this step adds to the prompt log-probabilities of those who ask for them.

    The logits at position p score the token at p + 1, so the last prompt position is not wanted.
    """
    found = []
    for i, state in enumerate(inputs.states):
        if state.sampling_params.prompt_logprobs is None:
            continue
        computed = int(inputs.num_computed_tokens[i])
        first = max(computed, state.num_prompt_logprobs)
        stop = min(int(inputs.seq_lens[i]), len(state.prompt_token_ids) - 1)
        if first < stop:
            tokens = np.arange(first, stop) - computed + inputs.query_start[i]
            found.append(PromptTokens(state, tokens, state.prompt_token_ids[first + 1 : stop + 1]))
            # Counted here and not when scored: every rank must want the same rows next time.
            state.num_prompt_logprobs = stop
    return found
