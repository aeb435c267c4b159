"""Random submit, abort, stop, step and reset, with `check()` after each.

A fake runner knows nothing but the emitted steps, and plays the device: every slot remembers which
prefix it was written for, and whatever a request reads must have been written for its own tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvloom.config import SchedulerConfig
from kvloom.dtypes import DType
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVLimits
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.scheduler import Scheduler
from kvloom.step import CachedRequestData, ModelRunnerOutput, SchedulerOutput

NUM_OPERATIONS = 10_000  # over all worlds
VOCAB_SIZE = 50
EOS, STOP_ID = 0, 1
MAX_MODEL_LEN = 40

Cell = tuple[int, int]
"""(position, hash of the tokens up to it): what the K/V of one slot is a function of."""


def extend_cells(cells: list[Cell], token_ids: Sequence[int]) -> None:
    """Append the cells of `token_ids`, which follow those that `cells` stands for."""
    state = cells[-1][1] if cells else 0
    for position, token_id in enumerate(token_ids, len(cells)):
        state = hash((state, token_id))
        cells.append((position, state))


def next_token(cells: list[Cell]) -> int:
    """The model: greedy, a function of the whole prefix."""
    return cells[-1][1] % VOCAB_SIZE


def undisturbed(prompt: list[int], params: ResolvedSamplingParams) -> list[int]:
    """The output of a request that runs alone, from the definitions of the stop rules."""
    output: list[int] = []
    cells: list[Cell] = []
    extend_cells(cells, prompt)
    while True:
        output.append(next_token(cells))
        extend_cells(cells, output[-1:])
        is_stop = len(output) > params.min_tokens and output[-1] in params.all_stop_token_ids
        if is_stop or len(output) == params.max_tokens or len(cells) == MAX_MODEL_LEN:
            return output


@dataclass
class Row:
    """What a worker knows of one request; `cells` has one entry per known token."""

    num_prompt_tokens: int
    tables: list[list[int]]
    num_computed: int
    cells: list[Cell]


class ShadowRunner:
    """Keeps its rows by diffs alone and verifies every read against what was written."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._slots: list[dict[int, Cell]] = [{} for _ in range(num_groups)]
        self._rows: dict[str, Row] = {}
        self.num_reused_tokens = 0

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert not output.block_copies
        # All K/V of a step are written before any of it is read.
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            self._write(self._rows[req_id], num_tokens)
        sampled = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            row = self._rows[req_id]
            num_read = row.num_computed + num_tokens
            assert row.num_computed < num_read <= len(row.cells)
            self._verify(row, num_read)
            if num_read == len(row.cells):
                sampled[req_id] = [next_token(row.cells)]
                extend_cells(row.cells, sampled[req_id])
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def _apply(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            del self._rows[req_id]  # it was told of every one of them
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self._rows
            row = Row(
                len(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
                cells=[],
            )
            extend_cells(row.cells, new.prompt_token_ids)
            self._rows[new.req_id] = row
            self.num_reused_tokens += new.num_computed_tokens
        for i, req_id in enumerate(output.scheduled_cached_reqs.req_ids):
            self._apply_diff(self._rows[req_id], output.scheduled_cached_reqs, i)

    def _apply_diff(self, row: Row, cached: CachedRequestData, i: int) -> None:
        row.num_computed = cached.num_computed_tokens[i]
        if cached.resumed_from_preemption[i]:
            row.tables = [list(ids) for ids in cached.new_block_ids[i]]
            del row.cells[row.num_prompt_tokens :]
            extend_cells(row.cells, cached.new_token_ids[i])
        else:
            assert cached.new_token_ids[i] == []
            for table, ids in zip(row.tables, cached.new_block_ids[i], strict=True):
                table += ids

    def _slot(self, table: list[int], position: int) -> int:
        block_id = table[position // self._block_size]
        assert 0 < block_id < self._num_blocks
        return block_id * self._block_size + position % self._block_size

    def _write(self, row: Row, num_tokens: int) -> None:
        for slots, table in zip(self._slots, row.tables, strict=True):
            for position in range(row.num_computed, row.num_computed + num_tokens):
                slots[self._slot(table, position)] = row.cells[position]

    def _verify(self, row: Row, num_read: int) -> None:
        for slots, table in zip(self._slots, row.tables, strict=True):
            assert len(table) == -(-num_read // self._block_size)  # no block too many
            for position in range(num_read):
                assert slots[self._slot(table, position)] == row.cells[position]


@dataclass(frozen=True)
class World:
    """One size of everything."""

    num_blocks: int
    block_size: int
    budget: int
    max_num_seqs: int = 8
    num_groups: int = 1
    max_num_bypasses: int = 2
    has_prefix_cache: bool = True
    does_preempt: bool = True

    def __str__(self) -> str:
        return f"{self.num_blocks}x{self.block_size}-budget{self.budget}"

    @property
    def max_prompt(self) -> int:
        """The pool holds any request to its last token, as the planner would have it."""
        room = (self.num_blocks - 1) // self.num_groups * self.block_size
        return min(room + 1, MAX_MODEL_LEN) - 1


WORLDS = [
    World(num_blocks=41, block_size=1, budget=7),
    World(num_blocks=100, block_size=1, budget=64, max_num_bypasses=0),
    World(num_blocks=21, block_size=2, budget=1, does_preempt=False),
    World(num_blocks=25, block_size=2, budget=16, max_num_seqs=3),
    World(num_blocks=12, block_size=4, budget=5),
    World(num_blocks=14, block_size=4, budget=40, has_prefix_cache=False),
    World(num_blocks=40, block_size=4, budget=100, max_num_seqs=12),
    World(num_blocks=24, block_size=4, budget=23, num_groups=2),
    World(num_blocks=7, block_size=8, budget=9, max_num_bypasses=5),
    World(num_blocks=5, block_size=16, budget=30),
]


class Simulation:
    """One world, its requests, and what must be true of them."""

    def __init__(self, world: World, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = world
        spec = FullAttentionSpec(
            block_size=world.block_size, num_kv_heads=1, head_size=4, dtype=DType.FLOAT32
        )
        groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i in range(world.num_groups)]
        self.manager = KVCacheManager(
            KVCacheConfig(world.num_blocks, [], groups),
            KVLimits(MAX_MODEL_LEN, world.budget),
            world.has_prefix_cache,
        )
        config = SchedulerConfig(world.max_num_seqs, world.budget, world.max_num_bypasses)
        self.scheduler = Scheduler(config, self.manager, MAX_MODEL_LEN)
        self.runner = ShadowRunner(world.num_blocks, world.block_size, world.num_groups)
        # Prompts share beginnings, in the middle of blocks and at their edges.
        self.stems = [self.rng.choices(range(VOCAB_SIZE), k=world.max_prompt) for _ in range(3)]
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_submitted = 0
        self.num_finished = 0

    def operate(self) -> None:
        operations = [self.submit, self.step, self.abort, self.stop, self.reset]
        [operation] = self.rng.choices(operations, weights=[30, 60, 5, 3, 2])
        operation()
        self.manager.check()

    def submit(self) -> None:
        rng = self.rng
        if len(self.live) > 3 * self.world.max_num_seqs:
            return
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(0, len(stem))]
        prompt += rng.choices(range(VOCAB_SIZE), k=rng.randint(0, 6))
        prompt = prompt[: self.world.max_prompt] or [3]
        room = self.world.max_prompt + 1 - len(prompt)
        max_tokens = rng.randint(1, room)
        params = ResolvedSamplingParams(
            seed=0,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, max_tokens // 2]),
            stop_token_ids=rng.choice([(), (STOP_ID,)]),
            ignore_eos=rng.random() < 0.3,
            eos_token_ids=frozenset({EOS}),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        request = Request(f"r{self.num_submitted}", prompt, params)
        self.num_submitted += 1
        self.scheduler.add_request(request)
        self.live[request.req_id] = request
        self.outputs[request.req_id] = []

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.manager.check()
        assert output.total_num_scheduled_tokens <= self.world.budget
        assert self.scheduler.num_running <= self.world.max_num_seqs
        if self.live:
            assert output.total_num_scheduled_tokens > 0  # no step is idle while somebody waits
        self.verify_common_prefix(output.num_common_prefix_blocks)
        for event in self.scheduler.update(output, self.runner.run(output)):
            request = self.live[event.req_id]
            self.outputs[event.req_id] += event.new_token_ids
            assert request.output_token_ids == self.outputs[event.req_id]
            if event.finish_reason is not None:
                self.verify_finished(request, event.finish_reason)

    def verify_common_prefix(self, num_common_prefix_blocks: list[int]) -> None:
        running = [r for r in self.live.values() if r.status is RequestStatus.RUNNING]
        assert len(running) == self.scheduler.num_running
        tables = [self.manager.get_block_ids(r.req_id) for r in running]
        for group, num_common in enumerate(num_common_prefix_blocks):
            columns = zip(*(t[group] for t in tables), strict=False)
            same = itertools.takewhile(lambda ids: len(set(ids)) == 1, columns)
            assert num_common == len(list(same))

    def verify_finished(self, request: Request, finish_reason: str) -> None:
        """Neither mates nor hits, chunks or preemptions have changed the text."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = undisturbed(prompt, request.sampling_params)
        assert request.output_token_ids == expected
        params = request.sampling_params
        is_stop = len(expected) > params.min_tokens and expected[-1] in params.all_stop_token_ids
        assert finish_reason == ("stop" if is_stop else "length")
        assert request.num_cached_tokens < request.num_prompt_tokens
        del self.live[request.req_id]
        self.num_finished += 1

    def abort(self) -> None:
        self.end(RequestStatus.FINISHED_ABORT)

    def stop(self) -> None:
        self.end(RequestStatus.FINISHED_STOP)

    def end(self, status: RequestStatus) -> None:
        """End a request from outside, in whatever state it is."""
        if self.live:
            request = self.live.pop(self.rng.choice(list(self.live)))
            [event] = self.scheduler.finish_requests([request.req_id], status)
            assert event.finish_reason == status.value
            expected = undisturbed(
                request.token_ids[: request.num_prompt_tokens], request.sampling_params
            )
            assert request.output_token_ids == expected[: request.num_output_tokens]

    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (self.scheduler.num_running == 0)

    def drain(self) -> None:
        while self.live:
            self.step()
            self.manager.check()


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_random_operations(world, scale):
    simulation = Simulation(world, seed=WORLDS.index(world))
    for _ in range(NUM_OPERATIONS * scale // len(WORLDS)):
        simulation.operate()
    simulation.drain()
    assert not simulation.scheduler.has_unfinished_requests()
    assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0
    assert simulation.manager.num_used_blocks == 0
    simulation.manager.check()
    # Nothing of this holds because nothing happened.
    assert simulation.num_finished > 30
    assert (simulation.scheduler.stats.num_preemptions > 0) == world.does_preempt
    assert (simulation.runner.num_reused_tokens > 0) == world.has_prefix_cache
