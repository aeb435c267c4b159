"""Engines on tiny models whose executables are watched, and poisoned where nothing may be read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from kvloom.config import EngineConfig
from kvloom.engine.core import EngineCore
from kvloom.ops.backend import LateTokens
from kvloom.ops.base import AttentionMetadata, Batch
from kvloom.ops.native import NativeBackend
from kvloom.ops.reference import ReferenceBackend
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.tokenizer.tokenizer import SpecialTokens, Tokenizer
from memory_checkpoint import MemoryCheckpoint
from tiny_folder import make_tokenizer
from tiny_models import make_weights, tensor_shapes

Shape = tuple[int, ...]
POISON = 0  # a token whose embedding is NaN, and which is never the most likely


class TinyCheckpoint(MemoryCheckpoint):
    """Random weights of a config, with a poisonous token."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, config: Mapping[str, Any]) -> None:
        weights = make_weights(tensor_shapes(config))
        weights["model.embed_tokens.weight"][POISON] = np.nan
        weights["lm_head.weight"][POISON] = 0.0
        super().__init__(weights)
        self.config = dict(config)


def shape_of(batch: Batch) -> Shape:
    """All sizes of the arrays that a device is given."""
    tables = [group.block_table.shape for group in batch.attention]
    sizes = (len(batch.token_ids), len(batch.positions), len(batch.logits_rows))
    return (*sizes, *(size for table in tables for size in table))


@dataclass
class Watch:
    """What the executables of an engine were given.

    Attributes:
        warmed: the shapes of batches without requests, in order.
        seen: those of all others.
        num_decodes: for each step, how many requests had one token.
        num_prefills: for each step, how many had more.
        poisons: whether each step is computed again with poison in its padding.
    """

    poisons: bool = False
    warmed: list[Shape] = field(default_factory=list)
    seen: list[Shape] = field(default_factory=list)
    num_decodes: list[int] = field(default_factory=list)
    num_prefills: list[int] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def note(self, batch: Batch) -> None:
        counts = np.diff(batch.attention[0].query_start)
        if not counts.any():
            self.warmed.append(shape_of(batch))
            return
        self.seen.append(shape_of(batch))
        self.num_decodes.append(int((counts == 1).sum()))
        self.num_prefills.append(int((counts > 1).sum()))


class WatchedExecutable:
    def __init__(self, inner: Any, watch: Watch, to_host: Callable[[Any], Any]) -> None:
        self._inner, self._watch, self._to_host = inner, watch, to_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: Batch, late_tokens: LateTokens | None = None) -> Any:
        self._watch.note(batch)
        logits = self._inner.forward(batch, late_tokens)
        if self._watch.poisons:
            real = batch.logits_rows < batch.attention[0].query_start[-1]
            expected = np.asarray(self._to_host(logits))[real].copy()
            poisoned = poison_padding(batch, self._watch.rng)
            again = self._inner.forward(poisoned, late_tokens)
            np.testing.assert_array_equal(np.asarray(self._to_host(again))[real], expected)
        return logits


def poison_padding(batch: Batch, rng: random.Random) -> Batch:
    """NaN comes out of every token of padding; its positions and its columns lead anywhere."""
    num_real = int(batch.attention[0].query_start[-1])
    token_ids, positions = batch.token_ids.copy(), batch.positions.copy()
    token_ids[num_real:] = POISON
    positions[num_real:] = rng.randrange(30)
    groups = [_poison_table(group, rng) for group in batch.attention]
    return replace(batch, token_ids=token_ids, positions=positions, attention=groups)


def _poison_table(group: AttentionMetadata, rng: random.Random) -> AttentionMetadata:
    table = group.block_table.copy()
    used = -(-group.seq_lens // group.block_size) - group.first_columns
    for row, count in zip(table, used, strict=True):
        row[max(count, 0) :] = rng.randrange(1, int(table.max(initial=1)) + 1)
    return replace(group, block_table=table)


def _backend_class(name: str) -> type[Any]:
    if name == "torch":
        from kvloom.ops.torch_backend import TorchBackend

        return TorchBackend
    return NativeBackend if name == "native" else ReferenceBackend


@contextmanager
def watching(watch: Watch, backend: str) -> Iterator[None]:
    """Engines made meanwhile are watched; their KV memory, the null block too, begins as NaN."""

    def compile_watched(original: Any) -> Any:
        def compile_(backend: Any, *args: Any) -> Any:
            return WatchedExecutable(original(backend, *args), watch, backend.to_host)

        return compile_

    def allocate_nan(original: Any) -> Any:
        def allocate(self: Any, size_bytes: int) -> Any:
            raw = original(self, size_bytes)
            raw[:] = -1  # all bits set is a NaN in every float format
            return raw

        return allocate

    kind = _backend_class(backend)
    with (
        patch.object(kind, "compile", compile_watched(kind.compile)),
        patch.object(kind, "allocate_kv", allocate_nan(kind.allocate_kv)),
    ):
        yield


def make_engine(model: Mapping[str, Any], **options: Any) -> EngineCore:
    defaults = {"model": "tiny", "num_threads": 1, "kv_cache_bytes": 1 << 23}
    config = EngineConfig.from_options(defaults | options)
    tokenizer = Tokenizer(make_tokenizer(), SpecialTokens())  # for grammars, and there are none
    return EngineCore(config, TinyCheckpoint(model), tokenizer)


def make_prompts(seed: int, count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Half of them begin alike."""
    rng = random.Random(seed)
    stem = [rng.randrange(1, vocab_size) for _ in range(longest)]
    prompts = []
    for _ in range(count):
        shared = rng.choice([0, rng.randrange(longest)])
        rest = rng.randint(1, longest - shared)
        prompts.append(stem[:shared] + [rng.randrange(1, vocab_size) for _ in range(rest)])
    return prompts


def run(core: EngineCore, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """The texts of all prompts, which arrive two per step; some want their prompts scored."""
    texts: dict[str, list[int]] = {}
    waiting = list(enumerate(prompts))
    while waiting or core.has_unfinished_requests():
        arriving, waiting = waiting[:2], waiting[2:]
        for index, prompt in arriving:
            params = ResolvedSamplingParams(
                seed=0,
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                prompt_logprobs=1 if index % 4 == 3 else None,
            )
            texts[str(index)] = []
            core.add_requests([Request(str(index), prompt, params)])
        for event in core.step():
            assert event.error is None, event.error
            texts[event.req_id] += event.new_token_ids
        core.manager.check()
    core.shutdown()
    return list(texts.values())
