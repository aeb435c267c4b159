"""What vLLM asks of a worker, answered by kvloom's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from kvloom.errors import ConfigError
from kvloom.runner.collectives import SingleRankCommunicator
from kvloom.runner.worker import Worker
from kvloom.sched.drafts import NgramProposer
from kvloom.step import ModelRunnerOutput
from kvloom.vllm_plugin.drafts import Drafter
from kvloom.vllm_plugin.options import engine_config
from kvloom.vllm_plugin.outputs import (
    StartedStep,
    collect_prompt_logprobs,
    substitute_failed,
    to_vllm,
    token_mask,
)
from kvloom.vllm_plugin.specs import LAYOUT, from_vllm
from kvloom.vllm_plugin.specs import to_vllm as spec_to_vllm
from kvloom.vllm_plugin.steps import StepTranslator
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.source import resolve_model

T = TypeVar("T")

NO_TIME = CompilationTimes(language_model=0.0, encoder=0.0)


class PendingOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # as the class below
    """The output of a step that may still run."""

    def __init__(self, output: Future[Any]) -> None:
        self._output = output

    def get_output(self) -> Any:
        """Wait for it."""
        return self._output.result()


class KvloomWorker(WorkerBase):  # type: ignore[misc]  # vLLM is not there when types are checked
    """One worker of vLLM's over one of kvloom's.

    A step is two calls, as in kvloom: `execute_model` starts it, `sample_tokens` ends it. With
    asynchronous scheduling vLLM calls for the next step before it has the tokens of this one: they
    are known here, so it runs right after.
    """

    _worker: Worker
    _steps: StepTranslator
    _drafter: Drafter | None
    _started: Future[StartedStep]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Runs steps while vLLM schedules the next one and hands out the tokens of the last one.
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="kvloom-step")
            if self.scheduler_config.async_scheduling
            else None
        )

    # --- start ------------------------------------------------------------------------------

    def init_device(self, **_: Any) -> None:
        """Nothing but the host."""
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False, **_: Any) -> None:
        """Read the weights.

        Raises:
            ConfigError, ModelError: with the remedy.
        """
        if load_dummy_weights:
            raise ConfigError("kvloom's plugin does not make up weights; name a model with its own")
        self._worker = self.make_worker()
        asked, possible = self.model_config.max_model_len, self._worker.model.max_model_len
        if asked > possible:
            raise ConfigError(
                f"max_model_len is {asked}, but the model was made for {possible}; lower it"
            )
        self._worker.load_model()

    def make_worker(self) -> Worker:
        """The worker of kvloom that computes."""
        config = engine_config(self.vllm_config)
        checkpoint = open_checkpoint(resolve_model(config.model.model))
        return Worker(config, checkpoint, SingleRankCommunicator())

    def get_kv_cache_spec(self, **_: Any) -> dict[str, Any]:
        """The layers that store KV. Those that share another's are no business of vLLM's."""
        block_size = self.cache_config.block_size
        return {
            name: spec_to_vllm(spec, block_size)
            for name, spec in self._worker.get_kv_cache_spec().items()
            if spec.shared_target is None
        }

    def get_supported_kv_cache_layouts(self, **_: Any) -> list[str]:
        """How vLLM shall count bytes; how they are arranged within a page is up to the kernels."""
        return [LAYOUT]

    def determine_available_memory(self, **_: Any) -> int:
        """Bytes for KV, after the largest step has been profiled.

        Raises:
            CapacityError: the memory asked for is not there.
        """
        return self._worker.determine_available_memory().kv_bytes

    def update_max_model_len(self, max_model_len: int, **_: Any) -> None:
        """Take a length that fits; what was made for the longer one serves it as well."""
        self.model_config.max_model_len = max_model_len

    def initialize_from_config(self, kv_cache_config: Any, **_: Any) -> None:
        """Allocate what vLLM planned."""
        config, groups = from_vllm(kv_cache_config, self._worker.get_kv_cache_spec())
        self._worker.initialize_kv_cache(config)
        seed = abs(self.model_config.seed or 0)
        self._steps = StepTranslator(groups, self._worker.model.vocab_size, seed)
        self._drafter = self.make_drafter()

    def make_drafter(self) -> Drafter | None:
        """What proposes drafts; None where vLLM asks for none."""
        drafts = engine_config(self.vllm_config).speculative
        if drafts.num_draft_tokens == 0:
            return None
        return Drafter(NgramProposer(drafts), drafts.num_draft_tokens)

    def compile_or_warm_up_model(self, **_: Any) -> CompilationTimes:
        """Nothing is compiled late."""
        return NO_TIME

    def get_supported_tasks(self, **_: Any) -> tuple[str, ...]:
        """Text generation."""
        return ("generate",)

    # --- run --------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, **_: Any) -> Any:
        """Start a step; None asks for `sample_tokens`."""
        self._started = self._submit(self._start, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            return None
        self._started.result()
        return EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any | None = None, **_: Any) -> Any:
        """End the step that `execute_model` started; `grammar_output` is vLLM's token bitmask."""
        output = self._submit(self._finish, self._started, grammar_output)
        return output.result() if self._thread is None else PendingOutput(output)

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run it now; or, where vLLM schedules ahead, on the thread, in the order of the calls."""
        if self._thread is not None:
            return self._thread.submit(work, *arguments)
        done: Future[T] = Future()
        done.set_result(work(*arguments))
        return done

    def take_draft_token_ids(self, **_: Any) -> Any:
        """Drafts for the step after the one that ended; None where there are none."""
        return None if self._drafter is None else self._drafter.take()

    def _start(self, scheduler_output: Any) -> StartedStep:
        *parts, step = steps = self._steps.translate(scheduler_output)
        if self._drafter is not None:
            self._drafter.forget(steps[0].finished_req_ids)
        for part in parts:  # beginnings of prompts that are scored
            self._collect(self._worker.sample_tokens(self._worker.execute_model(part), None))
        asked = scheduler_output.scheduled_spec_decode_tokens
        return StartedStep(
            list(step.num_scheduled_tokens),
            {req_id: len(token_ids) for req_id, token_ids in asked.items()},
            self._worker.execute_model(step),
        )

    def _finish(self, started: Future[StartedStep], grammar_output: Any | None) -> Any:
        step = started.result()  # raises what stopped it
        known = self._steps.known
        mask = token_mask(grammar_output, step, known)
        result = self._worker.sample_tokens(step.handle, mask)
        self._collect(result)
        if result.errors:
            tokens = substitute_failed(result, step.handle.sampled)
            result.sampled_token_ids.update(tokens)
        if self._drafter is not None:
            self._drafter.propose(result.sampled_token_ids, known)
        return to_vllm(step.req_ids, result, known)

    def _collect(self, result: ModelRunnerOutput) -> None:
        if result.prompt_logprobs:
            collect_prompt_logprobs(result, self._steps.known)

    # --- hooks ------------------------------------------------------------------------------

    def check_health(self, **_: Any) -> None:
        """A worker that answers is well."""

    def reset_mm_cache(self, **_: Any) -> None:
        """There are no images here to forget."""

    def reset_encoder_cache(self, **_: Any) -> None:
        """There is no encoder."""

    def list_loras(self, **_: Any) -> set[int]:
        """None: adapters are refused."""
        return set()

    def shutdown(self, **_: Any) -> None:
        """End the thread; memory goes with the process."""
        if self._thread is not None:
            self._thread.shutdown()
