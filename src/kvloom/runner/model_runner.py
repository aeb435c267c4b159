"""Runs a model over a paged KV cache: the worker's side of the four integration points.

Plan:       get_kv_cache_spec, profile_run
Initialise: initialize_kv_cache, bind_kv_cache
Run:        execute_model (with _build_attention_metadata), then sample_tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvloom.errors import CapacityError
from kvloom.kv.layout import MAX_GROUPS
from kvloom.kv.memory import format_bytes
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import KVCacheConfig, KVCacheSpec
from kvloom.ops.backend import Backend, EagerBackend, LateTokens, StepSizes
from kvloom.ops.base import AttentionMetadata, Batch, Communicator
from kvloom.runner.drafts import mask_rows, report, sampling_rows, with_drafts
from kvloom.runner.input_batch import (
    InputBatch,
    RequestState,
    RunnerLimits,
    StepInputs,
)
from kvloom.runner.profile import count_least_activation_bytes, measure_peak_activation_bytes
from kvloom.runner.static_shapes import StaticShapes
from kvloom.runner.step_handle import PreparedStep, PromptTokens, StepHandle, unscored_prompt_tokens
from kvloom.sampling.sampler import Sampler, SampleResult, SamplingRow
from kvloom.sampling.token_sampler import Sampling, TokenSampler
from kvloom.step import ModelRunnerOutput, SchedulerOutput, TokenMask

if TYPE_CHECKING:
    from kvloom.models.base import Model


@dataclass(frozen=True, slots=True)
class _StartedSampling:
    handle: StepHandle
    sampling: Sampling


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
                max_num_rows=limits.max_num_logits_rows,
                max_model_len=limits.max_model_len,
                block_size=limits.block_size,
            ),
        )
        self._sampler: TokenSampler = sampler or Sampler(model.vocab_size)
        self._batch: InputBatch  # made with the KV cache, once it is known that memory suffices
        self._shapes: StaticShapes | None = None  # likewise, if steps are padded
        self._storages: dict[str, Any] = {}  # by layer that stores KV
        self._prepared: PreparedStep | None = None
        self._sampling: _StartedSampling | None = None  # of the step that runs

    # --- plan -------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The spec of every attention layer of this rank, by layer name."""
        layers = self.model.get_kv_spec().layers
        return {layer.name: make_kv_cache_spec(layer, self.limits.block_size) for layer in layers}

    def profile_run(self, available_bytes: int | None = None) -> int:
        """Bytes the largest step needs beyond weights and KV cache, sampling and arrays included.

        The executable knows, or else they are measured on a dummy batch, unless it is certain that
        `available_bytes` do not suffice.

        Raises:
            CapacityError: they do not; nothing was allocated.
        """
        # Layers that store alike make one group; how many others make is not planned yet.
        stored = {s for s in self.get_kv_cache_spec().values() if s.shared_target is None}
        num_groups = 1 if len(stored) == 1 else MAX_GROUPS
        own_bytes = self.limits.batch_bytes(num_groups) + self._sampler.scratch_bytes
        if (known_bytes := self._executable.activation_bytes) is not None:
            return known_bytes + own_bytes
        least_bytes = own_bytes + count_least_activation_bytes(
            self.model, self._communicator, self.limits
        )
        if available_bytes is not None and least_bytes > available_bytes:
            raise CapacityError(
                f"a step of {self.limits.max_num_batched_tokens} tokens and "
                f"{self.limits.max_num_seqs} requests takes at least {format_bytes(least_bytes)}, "
                f"but only {format_bytes(available_bytes)} of memory are available now; lower "
                "max_num_batched_tokens or max_num_seqs"
            )
        eager = cast(EagerBackend, self._backend)
        return own_bytes + measure_peak_activation_bytes(
            self.model, eager, self._communicator, self.limits
        )

    # --- initialise -------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate every tensor of the config and bind the layers to their views of it.

        Within each block of a tensor, the layers of one group that store KV lie one after another,
        as `shared_by` lists them. Another group lays its own layers over the same bytes: in blocks
        that this group does not hold. A layer that shares KV reads the view of its target.
        """
        groups = kv_cache_config.kv_cache_groups
        group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        targets = {name: spec.shared_target for name, spec in self.get_kv_cache_spec().items()}
        self._storages = {}
        for tensor in kv_cache_config.kv_cache_tensors:
            raw = self._backend.allocate_kv(tensor.size)
            offsets = [0] * len(groups)
            for name in tensor.shared_by:
                if targets[name] is None:
                    group = group_of[name]
                    spec = groups[group].kv_cache_spec
                    self._storages[name] = self._backend.view_kv(
                        raw, spec, kv_cache_config.num_blocks, offsets[group]
                    )
                    offsets[group] += spec.page_size_bytes
        self.bind_kv_cache(
            kv_cache_config,
            {name: self._storages[target or name] for name, target in targets.items()},
        )
        specs = [group.kv_cache_spec for group in groups]
        self._batch = InputBatch(self.limits, [spec.block_size for spec in specs])
        if (buckets := self.limits.buckets) is not None:
            self._shapes = StaticShapes(buckets, self.limits.max_num_logits_rows, specs)

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

    def warm_up(self) -> int:
        """Run every shape that a step may have once, on padding alone; returns how many there are.

        Whatever a device compiles or sets up per shape is done then.
        """
        if self._shapes is None:
            return 0
        shapes = self._shapes.all()
        for shape in shapes:
            self._executable.forward(self._shapes.make_padding(shape))
        return len(shapes)

    # --- run --------------------------------------------------------------------------------

    @property
    def computes_meanwhile(self) -> bool:
        """Whether `execute_model` returns before it has computed."""
        return self._executable.computes_meanwhile

    def prepare_step(self, output: SchedulerOutput) -> bool:
        """Do what `execute_model` of this step begins with, while the step before it still runs.

        Returns whether `execute_model` may be called before that one's `sample_tokens`, too.
        """
        self._prepared = self._prepare(output)
        before = self._sampling
        return (
            before is not None
            and not before.handle.prompts  # their logits are read when all have been sampled
            and not output.block_copies
            and self._executable.takes_late_tokens
        )

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """Apply the step's diffs and start the model over its tokens.

        It may still run when the call returns.
        """
        step, self._prepared = self._prepared, None
        if step is None or step.output is not output:
            step = self._prepare(output)
        for copies in _repeatable(output.block_copies):
            for storage in self._storages.values():
                self._backend.copy_blocks(storage, copies)
        if step.batch is None:
            return step.handle
        late = self._find_late_tokens(step.batch, step.late_tokens)
        return replace(step.handle, logits=self._executable.forward(step.batch, late))

    def _find_late_tokens(
        self, batch: Batch, late_tokens: Sequence[tuple[int, RequestState]]
    ) -> LateTokens | None:
        """Where the device finds them; None if they are known by now, and in the batch."""
        before = self._sampling
        if not late_tokens or before is None:
            for place, state in late_tokens:
                batch.token_ids[place] = state.output_token_ids[-1]
            return None
        row_of = {state.req_id: row for row, state in enumerate(before.handle.sampled)}
        return LateTokens(
            places=np.array([place for place, _ in late_tokens]),
            rows=np.array([row_of[state.req_id] for _, state in late_tokens]),
            sampled_ids=before.sampling.token_ids,
        )

    def _prepare(self, output: SchedulerOutput) -> PreparedStep:
        """Everything about a step but the tokens that are not known yet."""
        self._batch.update(output)
        if not output.num_scheduled_tokens:
            return PreparedStep(output, StepHandle())
        drafts = output.scheduled_spec_decode_tokens
        inputs = self._batch.prepare(output.num_scheduled_tokens, drafts)
        prompts = unscored_prompt_tokens(inputs)
        last_tokens = inputs.query_start[1:][inputs.is_complete] - 1
        states = list(itertools.compress(inputs.states, inputs.is_complete.tolist()))
        rows = with_drafts(last_tokens, states, drafts)
        if prompts:
            rows = np.concatenate([rows, *(p.tokens for p in prompts)])
        assert len(rows) <= self.limits.max_num_logits_rows, "the scheduler bounds them"
        best_only = not prompts and self._wants_best_only(output, states)
        batch = Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            logits_rows=rows.astype(np.int64, copy=False),
            attention=self._build_attention_metadata(inputs),
            wants_best_only=best_only,
        )
        if self._shapes is not None:
            batch = self._shapes.pad(batch, self._shapes.find(batch))
        handle = StepHandle(None, states, drafts, prompts, len(batch.token_ids), best_only)
        return PreparedStep(output, handle, batch, inputs.late_tokens)

    def _wants_best_only(self, output: SchedulerOutput, sampled: Sequence[RequestState]) -> bool:
        """Whether no request asks its logits for more than the greatest of them."""
        return (
            self._executable.keeps_best
            and not output.structured_output_request_ids
            and self._sampler.asks_best_only(state.sampling_params for state in sampled)
        )

    def start_sampling(self, handle: StepHandle, grammar: TokenMask | None = None) -> None:
        """Have the device do `sample_tokens` as soon as it can; that will wait for it."""
        self._take_sampling()  # of a step that nobody asked for
        if handle.logits is None or not self._executable.takes_late_tokens:
            return
        rows = sampling_rows(handle.sampled, handle.drafts)
        arguments = self._sampling_arguments(rows, handle, grammar)
        sampling = self._sampler.start(handle.logits[: len(rows)], *arguments)
        if sampling is not None:
            self._sampling = _StartedSampling(handle, sampling)

    def sample_tokens(
        self, handle: StepHandle, grammar: TokenMask | None = None
    ) -> ModelRunnerOutput:
        """Draw the next token of every request that reached the end of its known tokens.

        It draws behind each draft, too, as if the drafts before were known. Those that equal what
        was drawn in their place are accepted; the first token drawn that differs is the last one.
        """
        result = ModelRunnerOutput()
        if handle.logits is None:
            return result
        drawn = self._take_sampling(handle)
        if drawn is None:
            rows = sampling_rows(handle.sampled, handle.drafts)
            arguments = self._sampling_arguments(rows, handle, grammar)
            logits = self._backend.to_host(handle.logits)  # [num_rows, vocab_size]
            drawn = self._sampler.sample(logits[: len(rows)], *arguments)
        report(drawn, handle.sampled, handle.drafts, result)
        if handle.prompts:
            logits = self._backend.to_host(handle.logits)
            self._score_prompts(logits[len(drawn.token_ids) :], handle.prompts, result)
        self.append_tokens(result.appended_token_ids)
        return result

    def append_tokens(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Take the tokens of a step: one rank samples, all of them go on from there."""
        self._batch.append_tokens(sampled_token_ids)

    def _take_sampling(self, handle: StepHandle | None = None) -> SampleResult | None:
        """The result that was started for this step, if it was; that of another one is dropped."""
        started = self._sampling
        if started is None:
            return None
        drawn = started.sampling.finish()
        self._sampling = None  # not before: it would be begun again
        return drawn if started.handle is handle else None

    def _sampling_arguments(
        self, rows: list[SamplingRow], handle: StepHandle, grammar: TokenMask | None
    ) -> tuple[Any, ...]:
        """What the sampler takes behind the logits."""
        if grammar is None:
            return rows, None, (), handle.are_best_only
        if handle.are_best_only:
            raise ValueError(
                "a mask comes for a step without structured_output_request_ids: of its logits "
                "the greatest alone was kept; name the requests that a mask is for"
            )
        return rows, grammar.bits, mask_rows(handle.sampled, handle.drafts, grammar)

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


def _repeatable(copies: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut copies, which are made in order, before each that writes what one of its part has read.

    Layers may overlay each other: then a part is done several times over the same bytes.
    """
    part: list[tuple[int, int]] = []
    read: set[int] = set()
    for source, destination in copies:
        if destination in read:
            yield part
            part, read = [], set()
        part.append((source, destination))
        read.add(source)
    if part:
        yield part
