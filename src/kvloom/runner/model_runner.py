"""Runs a model over a paged KV cache: the worker's side of the four integration points.

Plan:       get_kv_cache_spec, profile_run
Initialise: initialize_kv_cache, bind_kv_cache
Run:        execute_model (with _build_attention_metadata), then sample_tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from kvloom.errors import CapacityError, ConfigError
from kvloom.kv.memory import format_bytes
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import KVCacheConfig, KVCacheSpec
from kvloom.ops.base import (
    AttentionMetadata,
    Backend,
    Batch,
    Communicator,
    EagerBackend,
    StepSizes,
    Value,
)
from kvloom.runner.input_batch import (
    InputBatch,
    IntArray,
    RequestState,
    RunnerLimits,
    StepInputs,
)
from kvloom.runner.profile import count_least_activation_bytes, measure_peak_activation_bytes
from kvloom.sampling.logits import FloatArray
from kvloom.sampling.sampler import Sampler, SampleResult, SamplingRow
from kvloom.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs

if TYPE_CHECKING:
    from kvloom.models.base import Model


class TokenSampler(Protocol):
    """What the runner asks of a sampler: the methods of `kvloom.sampling.sampler.Sampler`."""

    def sample(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> SampleResult:
        """Choose one token per row of `logits` [num_rows, vocab_size]."""

    def prompt_logprobs(
        self, logits: FloatArray, next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score each prompt token by the row of `logits` of the position before it."""


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
        logits: [num_rows, vocab_size], one row per entry of `sampled`, then those of `prompts`;
            None when nothing ran.
        sampled: requests whose next token is drawn.
    """

    logits: Value | None = None
    sampled: list[RequestState] = field(default_factory=list)
    prompts: list[PromptTokens] = field(default_factory=list)


class ModelRunner:
    """Runs one rank's model, step by step, on what the scheduler sends."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        communicator: Communicator,
        limits: RunnerLimits,
        sampler: TokenSampler | None = None,
    ) -> None:
        """Without a sampler the runner takes the reference's."""
        self.model = model
        self.limits = limits
        self._backend = backend
        self._communicator = communicator
        self._executable = backend.compile(
            model,
            communicator,
            StepSizes(
                max_num_tokens=limits.max_num_batched_tokens,
                max_num_reqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                block_size=limits.block_size,
            ),
        )
        self._sampler: TokenSampler = sampler or Sampler(model.vocab_size)
        self._batch: InputBatch  # made with the KV cache, once it is known that memory suffices
        self._tensor_storages: list[Any] = []  # one view per KV cache tensor: block copies use it

    # --- plan -------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The spec of every attention layer of this rank, by layer name."""
        layers = self.model.get_kv_spec().layers
        return {layer.name: make_kv_cache_spec(layer, self.limits.block_size) for layer in layers}

    def profile_run(self, available_bytes: int | None = None) -> int:
        """Bytes the largest step needs beyond weights and KV cache, the batch's arrays included.

        The executable knows, or else they are measured on a dummy batch, unless it is certain that
        `available_bytes` do not suffice. Rows of logits that score prompts are not counted.

        Raises:
            CapacityError: they do not; nothing was allocated.
        """
        batch_bytes = self.limits.batch_bytes
        if (known_bytes := self._executable.activation_bytes) is not None:
            return known_bytes + batch_bytes
        least_bytes = batch_bytes + count_least_activation_bytes(
            self.model, self._communicator, self.limits
        )
        if available_bytes is not None and least_bytes > available_bytes:
            raise CapacityError(
                f"a step of {self.limits.max_num_batched_tokens} tokens and "
                f"{self.limits.max_num_seqs} requests takes at least {format_bytes(least_bytes)}, "
                f"but only {format_bytes(available_bytes)} of host memory is available now; lower "
                "max_num_batched_tokens or max_num_seqs"
            )
        eager = cast(EagerBackend, self._backend)
        return batch_bytes + measure_peak_activation_bytes(
            self.model, eager, self._communicator, self.limits
        )

    # --- initialise -------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate every tensor of the config and bind the layers to their views of it."""
        groups = kv_cache_config.kv_cache_groups
        group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        storages: dict[str, Any] = {}
        self._tensor_storages = []
        for tensor in kv_cache_config.kv_cache_tensors:
            raw = self._backend.allocate_kv(tensor.size)
            # Layers of one group on one tensor are one KV, so they share the view; another group
            # reads the same bytes by its own spec, in blocks that this group does not hold.
            views = {
                i: self._backend.view_kv(raw, groups[i].kv_cache_spec, kv_cache_config.num_blocks)
                for i in sorted({group_of[name] for name in tensor.shared_by})
            }
            storages |= {name: views[group_of[name]] for name in tensor.shared_by}
            self._tensor_storages.append(next(iter(views.values())))
        self.bind_kv_cache(kv_cache_config, storages)
        self._batch = InputBatch(self.limits, [g.kv_cache_spec.block_size for g in groups])

    def bind_kv_cache(self, kv_cache_config: KVCacheConfig, storages: Mapping[str, Any]) -> None:
        """Give every attention layer its spec, its group, and its storage by name."""
        layers = {layer.name: layer for layer in self.model.attention_layers}
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                layer = layers[name]
                layer.spec = group.kv_cache_spec
                layer.group = index
                layer.storage = storages[name]
        self._executable.bind()

    # --- run --------------------------------------------------------------------------------

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """Apply the step's diffs and run the model over its tokens."""
        self._batch.update(output)
        if output.block_copies:
            for storage in self._tensor_storages:
                self._backend.copy_blocks(storage, output.block_copies)
        if not output.num_scheduled_tokens:
            return StepHandle()
        inputs = self._batch.prepare(output.num_scheduled_tokens)
        sampled = np.flatnonzero(inputs.is_complete)
        prompts = _unscored_prompt_tokens(inputs)
        logits_rows = [inputs.query_start[1:][sampled] - 1, *(p.tokens for p in prompts)]
        batch = Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            logits_rows=np.concatenate(logits_rows).astype(np.int64),
            attention=self._build_attention_metadata(inputs),
        )
        logits = self._executable.forward(batch)
        return StepHandle(logits, [inputs.states[i] for i in sampled], prompts)

    def sample_tokens(self, handle: StepHandle, grammar: Any | None = None) -> ModelRunnerOutput:
        """Draw the next token of every request that reached the end of its known tokens.

        Raises:
            ConfigError: `grammar` is given; this runner samples without one.
        """
        if grammar is not None:
            raise ConfigError("structured output is not available; send requests without a grammar")
        result = ModelRunnerOutput()
        if handle.logits is None:
            return result
        logits = self._backend.to_host(handle.logits)  # [num_rows, vocab_size]
        self._sample(logits[: len(handle.sampled)], handle.sampled, result)
        self._score_prompts(logits[len(handle.sampled) :], handle.prompts, result)
        self.append_tokens(result.sampled_token_ids)
        return result

    def append_tokens(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Take the tokens of a step: one rank samples, all of them go on from there."""
        self._batch.append_tokens(sampled_token_ids)

    def _sample(self, logits: Any, states: list[RequestState], result: ModelRunnerOutput) -> None:
        rows = [
            SamplingRow(s.sampling_params, s.prompt_token_ids, s.output_token_ids) for s in states
        ]
        drawn = self._sampler.sample(logits, rows)
        for i, state in enumerate(states):
            logprobs = drawn.logprobs[i]
            if i in drawn.errors:
                result.errors[state.req_id] = drawn.errors[i]
                continue
            result.sampled_token_ids[state.req_id] = [drawn.token_ids[i]]
            if logprobs is not None:
                result.logprobs[state.req_id] = [logprobs]

    def _score_prompts(
        self, logits: Any, prompts: list[PromptTokens], result: ModelRunnerOutput
    ) -> None:
        """Score prompt tokens; `logits` [num_rows, vocab_size] has one row for each."""
        first = 0
        for prompt in prompts:
            stop = first + len(prompt.next_token_ids)
            num_top = prompt.state.sampling_params.prompt_logprobs or 0
            scores = self._sampler.prompt_logprobs(
                logits[first:stop], prompt.next_token_ids, num_top
            )
            result.prompt_logprobs[prompt.state.req_id] = scores
            first = stop

    def _build_attention_metadata(self, inputs: StepInputs) -> list[AttentionMetadata]:
        """Where this step's tokens live, one entry per KV cache group."""
        return [
            AttentionMetadata(
                block_table=self._batch.block_table(group, inputs),
                slot_mapping=self._batch.slot_mapping(group, inputs),
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                num_computed_tokens=inputs.num_computed_tokens,
                block_size=block_size,
            )
            for group, block_size in enumerate(self._batch.block_sizes)
        ]


def _unscored_prompt_tokens(inputs: StepInputs) -> list[PromptTokens]:
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
