"""Measures steps of the engine: the points between which `kvloom simulate` reckons."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvloom.cli.plan_model import read_model, resolve_dtypes
from kvloom.config import EngineConfig, resolve_block_size
from kvloom.engine.core import EngineCore
from kvloom.engine.loading import load_engine
from kvloom.errors import CapacityError
from kvloom.kv.spec import cdiv
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.simulate.profile import (
    Measured,
    Profile,
    attention_bytes,
    attention_flops,
    interpolate,
)
from kvloom.simulate.report import align, format_seconds
from kvloom.simulate.setup import ModelSource, build_ranks
from kvloom.simulate.work import Chunk, ModelWork

_NUM_SHORT = 16  # tokens of a prompt whose context is next to nothing
_NUM_DECODE_STEPS = 12  # as many as short answers have: the first few after a prompt are slower
_FEW_REQUESTS = 8  # whose steps are short
_NUM_REPEATS, _NUM_LONG_REPEATS = 5, 3  # of prompts: one step alone says little
_LONG = 256  # tokens
_IDLE_TOKENS = (16, 64)  # of prompts after a pause; longer ones lose no more
_PAUSE_SECONDS = 0.1  # enough for threads and processors to fall asleep
_MAX_REQUESTS = 64
_MAX_CONTEXT = 4096  # longer ones cost in proportion, and take minutes
_NUM_LONG_CONTEXTS = 4  # that all requests share: a quarter each of 16
_MAX_LONG_REQUESTS = 16  # as in a busy engine, which reads contexts while it computes


def measure_profile(config: EngineConfig, num_rounds: int) -> Profile:
    """Load the model, and measure everything `num_rounds` times.

    Raises:
        CapacityError, ConfigError, ModelError: with the remedy.
    """
    core = load_engine(config).core
    try:
        meter = StepMeter(core)
        meter.warm_up()
        for _ in range(num_rounds):
            meter.measure()
    finally:
        core.shutdown()
    return meter.profile(count_work_of(config))


def count_work_of(config: EngineConfig) -> ModelWork:
    """The work of one rank in the engine's formats, as `kvloom simulate` will count it."""
    device = config.device.device
    files = read_model(config.model.model)
    block_size = resolve_block_size(config.cache.block_size, device)
    source = ModelSource(files.config, resolve_dtypes(config, files, device), block_size)
    return build_ranks(config, source).work


@dataclass(frozen=True, slots=True)
class _DecodeTime:
    """Seconds of a step that gave requests a token; `num_computed` tokens before it, on average."""

    num_requests: int
    seconds: float
    num_computed: float


class StepMeter:
    """Runs steps of given shapes on an engine. No two prompts are alike: nothing is a hit.

    Prompts of another meter are, so what the engine's cache holds is forgotten.
    """

    def __init__(self, core: EngineCore) -> None:
        """Take an idle engine.

        Raises:
            CapacityError: its cache is too small to measure anything.
        """
        core.manager.reset_prefix_cache()
        scheduler = core.config.scheduler
        self._core = core
        self._numbers = itertools.count()
        self._max_chunk = min(scheduler.max_num_batched_tokens, core.max_model_len - 1)
        self._context = min(core.max_model_len - 1, _MAX_CONTEXT)
        while not core.manager.can_ever_fit(self._context):
            self._context //= 2
        if self._context < 4 * (_NUM_SHORT + _NUM_DECODE_STEPS):
            raise CapacityError(
                f"the KV cache holds a request of {self._context} tokens, too short to measure; "
                "raise memory_share or num_blocks, or max_model_len"
            )
        self._max_requests = min(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            _MAX_REQUESTS,
            self._num_fitting(2 * (_NUM_SHORT + _NUM_DECODE_STEPS)),
        )
        self._chunks: dict[int, list[float]] = defaultdict(list)
        self._later_chunks: dict[Chunk, list[float]] = defaultdict(list)
        self._decodes: dict[int, list[_DecodeTime]] = defaultdict(list)
        self._long_decodes: list[_DecodeTime] = []
        self._idle_chunks: dict[int, list[float]] = defaultdict(list)

    def warm_up(self) -> None:
        """Touch memory that no step has touched."""
        self._run_prompt(self._context - 1)
        self._run_decode(self._max_requests, _NUM_SHORT)

    def measure(self) -> None:
        """Everything once, what takes little time a few times."""
        for num_tokens in _powers_up_to(self._max_chunk):
            num_repeats = _NUM_LONG_REPEATS if num_tokens >= _LONG else _NUM_REPEATS
            for _ in range(num_repeats):
                self._chunks[num_tokens] += self._run_prompt(num_tokens)
        for num_tokens in sorted({min(number, self._max_chunk) for number in _IDLE_TOKENS}):
            for _ in range(_NUM_REPEATS):
                time.sleep(_PAUSE_SECONDS)
                self._idle_chunks[num_tokens].append(self._run_answer(num_tokens))
        for num_requests in _powers_up_to(self._max_requests):
            num_repeats = _NUM_REPEATS if num_requests <= _FEW_REQUESTS else _NUM_LONG_REPEATS
            for _ in range(num_repeats):
                self._decodes[num_requests].append(self._run_decode(num_requests, _NUM_SHORT))
        self._measure_long()

    def _measure_long(self) -> None:
        """What long contexts add, to tokens one by one and to chunks."""
        num_fitting = self._num_fitting(self._context)
        most = num_fitting if num_fitting < _NUM_LONG_CONTEXTS else _MAX_LONG_REQUESTS
        num_requests = max(number for number in self._decodes if number <= most)
        context = self._context * _NUM_LONG_CONTEXTS // max(num_requests, _NUM_LONG_CONTEXTS)
        num_output = _NUM_DECODE_STEPS + 1 + self._num_prompt_steps(num_requests, context)
        num_prompt = max(context - num_output, _NUM_SHORT)
        self._long_decodes.append(self._run_decode(num_requests, num_prompt))
        num_prompt = self._context - num_output
        for _ in range(_NUM_LONG_REPEATS):
            starts = range(0, num_prompt, self._max_chunk)
            for start, seconds in zip(starts, self._run_prompt(num_prompt), strict=True):
                if start:
                    chunk = (start, min(self._max_chunk, num_prompt - start))
                    self._later_chunks[chunk].append(seconds)

    def profile(self, work: ModelWork) -> Profile:
        """Medians of what was measured."""
        chunks = tuple((count, median(times)) for count, times in sorted(self._chunks.items()))
        decodes = tuple(
            (count, median(time.seconds for time in times))
            for count, times in sorted(self._decodes.items())
        )
        return Profile(
            model=self._core.config.model.model,
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            tensor_parallel_size=self._core.config.parallel.tensor_parallel_size,
            chunk_seconds=chunks,
            decode_seconds=decodes,
            decode_num_computed=self._num_short_computed,
            decode_seconds_per_byte=self._decode_slope(decodes, work),
            chunk_seconds_per_flop=self._chunk_slope(chunks, work),
            idle_seconds=self._idle_seconds(chunks),
        )

    @property
    def _num_short_computed(self) -> int:
        """Tokens before those of the short decode steps, on average."""
        times = [time.num_computed for rounds in self._decodes.values() for time in rounds]
        return round(median(times))

    def _decode_slope(self, decodes: Measured, work: ModelWork) -> float:
        """Seconds per byte that long contexts read more than short ones."""
        num_requests = self._long_decodes[0].num_requests
        long = median(time.num_computed for time in self._long_decodes)
        short = self._num_short_computed
        num_bytes = attention_bytes(work, (round(long), 1)) - attention_bytes(work, (short, 1))
        more = median(time.seconds for time in self._long_decodes)
        more -= interpolate(decodes, num_requests)
        return max(more / (num_requests * num_bytes), 0.0)

    def _chunk_slope(self, chunks: Measured, work: ModelWork) -> float:
        """Seconds per operation that later chunks of a prompt need more than its first."""
        seconds, flops = 0.0, 0
        for chunk, measured in self._later_chunks.items():
            seconds += median(measured) - interpolate(chunks, chunk[1])
            flops += attention_flops(work, chunk) - attention_flops(work, (0, chunk[1]))
        return max(seconds / flops, 0.0) if flops else 0.0

    def _idle_seconds(self, chunks: Measured) -> Measured:
        """Seconds that prompts take longer after a pause than after other steps."""
        return tuple(
            (count, max(median(times) - interpolate(chunks, count), 0.0))
            for count, times in sorted(self._idle_chunks.items())
        )

    def _num_fitting(self, num_tokens: int) -> int:
        """Requests of so many tokens that surely fit at once: half of what blocks alone allow."""
        manager = self._core.manager
        num_slots = manager.stats.num_usable_blocks * manager.block_size
        return max(num_slots // (2 * num_tokens), 1)

    def _num_prompt_steps(self, num_requests: int, num_prompt: int) -> int:
        """The most steps until the prompts of all are computed, while some get tokens already."""
        budget = self._core.config.scheduler.max_num_batched_tokens
        return cdiv(num_requests * num_prompt, max(budget - num_requests, 1))

    def _run_prompt(self, num_prompt: int) -> list[float]:
        """Seconds of the steps of one prompt."""
        (request,) = self._add(1, num_prompt, 1)
        return [self._step([request]).seconds for _ in range(0, num_prompt, self._max_chunk)]

    def _run_answer(self, num_prompt: int) -> float:
        """Seconds of the first step of a prompt that gets a short answer.

        Between pauses processors are as busy as requests make them: with prompts alone they would
        go on sleeping more deeply than they ever do while somebody is served.
        """
        requests = self._add(1, num_prompt, _NUM_DECODE_STEPS)
        first = self._step(requests)
        while self._core.has_unfinished_requests():
            self._core.step()
        return first.seconds

    def _run_decode(self, num_requests: int, num_prompt: int) -> _DecodeTime:
        """The mean of steps in which each of these requests gets one more token."""
        num_prompt_steps = self._num_prompt_steps(num_requests, num_prompt)
        requests = self._add(num_requests, num_prompt, _NUM_DECODE_STEPS + 1 + num_prompt_steps)
        times = []
        while self._core.has_unfinished_requests():
            times.append(self._step(requests))
        # The first of them ends the last prompt.
        times = [time for time in times if time.num_requests == num_requests][1:]
        return _DecodeTime(
            num_requests,
            fmean(time.seconds for time in times),
            fmean(time.num_computed for time in times),
        )

    def _add(self, num_requests: int, num_prompt: int, num_output: int) -> list[Request]:
        params = ResolvedSamplingParams(
            seed=0, max_tokens=num_output, temperature=0.0, ignore_eos=True
        )
        vocab_size = self._core.executor.vocab_size
        requests = []
        for _ in range(num_requests):
            number = next(self._numbers)
            ids = [(7919 * number + 31 * i) % vocab_size for i in range(num_prompt)]
            requests.append(Request(f"bench-{number}", ids, params))
        self._core.add_requests(requests)
        return requests

    def _step(self, requests: Sequence[Request]) -> _DecodeTime:
        """One step; the seconds it took, and how many requests it gave a token."""
        start = time.perf_counter()
        events = self._core.step()
        seconds = time.perf_counter() - start
        num_sampled = sum(bool(event.new_token_ids) for event in events)
        # The step behind it may be scheduled already: what it computed is told by what is known.
        computed = fmean(request.num_tokens - 2 for request in requests)
        return _DecodeTime(num_sampled, seconds, computed)


def _powers_up_to(largest: int) -> Iterator[int]:
    """1, 2, 4, ..., and the largest itself."""
    power = 1
    while power < largest:
        yield power
        power *= 2
    yield largest


def as_text(profile: Profile) -> str:
    """What people want of it: times and rates."""
    chunks = [
        (f"{count:,}", format_seconds(seconds), f"{count / seconds:,.0f}")
        for count, seconds in profile.chunk_seconds
    ]
    decodes = [
        (f"{count:,}", format_seconds(seconds), f"{count / seconds:,.1f}")
        for count, seconds in profile.decode_seconds
    ]
    idle = ", ".join(
        f"{format_seconds(seconds)} s with {count:,} tokens"
        for count, seconds in profile.idle_seconds
    )
    return (
        f"{profile.model} on {profile.machine}, tp {profile.tensor_parallel_size}\n\n"
        f"Prompts\n{_table('tokens', chunks)}\nOne more token each\n{_table('requests', decodes)}\n"
        f"The first step after a pause takes longer: {idle}\n"
    )


def _table(name: str, rows: list[tuple[str, str, str]]) -> str:
    rows = [(name, "seconds", "tokens/s"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return align([tuple(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows])
