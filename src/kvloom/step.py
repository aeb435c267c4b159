"""The contract between scheduler and workers: one step as plain data.

Only these cross to a worker. `block_ids` and `new_block_ids` have one list per KV cache group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloom.request import ResolvedSamplingParams

# Rows of logits a step may have beyond one per request, for scoring prompts and for drafts. Each
# takes a float per token of the vocabulary, so that the bound, and not the token budget, decides
# their memory.
MAX_EXTRA_LOGITS_ROWS = 256


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request a worker sees for the first time (or again, after it finished and was re-added).

    Attributes:
        num_computed_tokens: leading tokens whose KV is already in `block_ids`.
        mm_features, lora_request, prompt_embeds_shape: empty until the features exist.
    """

    req_id: str
    prompt_token_ids: list[int]
    mm_features: list[Any]
    sampling_params: ResolvedSamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: Any | None = None
    prompt_embeds_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Diffs of requests that workers already know; all lists run parallel to `req_ids`.

    Attributes:
        resumed_from_preemption: True where `new_block_ids` replace the table; else they append.
        new_token_ids: tokens the worker does not know yet; empty where it sampled them itself.
        num_computed_tokens: tokens whose KV is stored before this step; the worker knows them all,
            and those that this step computes, once it has sampled the steps before.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: who runs, how many tokens each, and where their blocks are.

    Attributes:
        num_scheduled_tokens: by request, drafts included. The drafts, and the tokens beyond one
            each of requests that ask for prompt log-probabilities, are at most
            `MAX_EXTRA_LOGITS_ROWS`.
        scheduled_spec_decode_tokens: by request that has any, drafts: guessed tokens that are
            computed behind all known ones. They are no known tokens: what is sampled decides.
        num_common_prefix_blocks: per group, the leading blocks, full or not, that every running
            request holds; none where a first column is null.
        finished_req_ids: requests that ended since the last step; workers drop their state.
        block_copies: (source, destination) block ids per copy, made in this order, before the
            forward pass.
        structured_output_request_ids: requests that a TokenMask may restrict, such as by a grammar,
            with their `rows` there; -1 where that mask alone will say.
        grammar_bitmask: None: that mask is made while the step runs, and given to `sample_tokens`.
        scheduled_encoder_inputs, free_encoder_mm_hashes, kv_connector_metadata: empty until the
            features exist.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    num_common_prefix_blocks: list[int]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    structured_output_request_ids: dict[str, int]
    grammar_bitmask: Any | None
    kv_connector_metadata: Any | None
    block_copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The only tokens that some requests of a step may sample, such as those of a grammar.

    Attributes:
        rows: the row of `bits` that a request obeys, and behind it one per draft, in their order;
            a request that is absent may sample any token.
        bits: uint32 [num_rows, cdiv(vocab_size, 32)]; bit i % 32 of word i // 32 is token i.
    """

    rows: dict[str, int]
    bits: Any


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the token at this position, with its `logprob` and `rank` (1 is most likely).
        top: the most likely tokens with their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step computed.

    Attributes:
        sampled_token_ids: new tokens of each request that reached the end of its known tokens, the
            last one behind the drafts that were accepted; requests in the middle of their prompt
            are absent.
        logprobs: per request that asks for them, one entry per sampled token.
        prompt_logprobs: per request that asks for them, the entries this step added, in order; the
            first prompt token has none.
        errors: requests that could not be sampled (NaN logits, ...), with the reason.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def appended_token_ids(self) -> dict[str, list[int]]:
        """What workers go on with: token 0 for requests with an error, which a step may still name.

        They have ended; nobody reads what is computed behind it.
        """
        if not self.errors:
            return self.sampled_token_ids
        return self.sampled_token_ids | {req_id: [0] for req_id in self.errors}


@dataclass(slots=True)  # one per request and step: making a frozen one takes three times as long
class RequestEvent:
    """What one step changed for one request, as the scheduler reports it to the engine.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error" on the last event, else None.
        stop_reason: the stop token id or string that ended the request; None for EOS.
        num_cached_tokens: prompt tokens the prefix cache saved.
        error: the reason when finish_reason is "error".
    """

    req_id: str
    new_token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
