"""Random submit, abort, stop, step and reset over all attention kinds, with `check()` after each.

A fake runner knows nothing but the emitted steps, and plays the device: every slot remembers which
prefix it was written for, and whatever a request reads must have been written for its own tokens.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from kvloom.config import SchedulerConfig
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import KVLimits
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.scheduler import Scheduler
from kvloom.step import SchedulerOutput
from shadow_cells import VOCAB_SIZE, ShadowRunner, undisturbed
from visibility import Kind, cache_of

NUM_OPERATIONS = 10_000  # over all worlds
EOS, STOP_ID = 0, 1
MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class World:
    """One size of everything."""

    num_blocks: int
    budget: int
    kinds: tuple[Kind, ...]
    max_num_seqs: int = 8
    max_num_bypasses: int = 2
    has_prefix_cache: bool = True
    does_preempt: bool = True

    def __str__(self) -> str:
        return f"{self.num_blocks}-{'+'.join(map(str, self.kinds))}-budget{self.budget}"


def full(block_size: int, num_groups: int = 1) -> tuple[Kind, ...]:
    return (Kind("full", block_size),) * num_groups


WORLDS = [
    World(41, 7, full(1)),
    World(100, 64, full(1), max_num_bypasses=0),
    World(21, 1, full(2), does_preempt=False),
    World(25, 16, full(2), max_num_seqs=3),
    World(12, 5, full(4)),
    World(14, 40, full(4), has_prefix_cache=False),
    World(40, 100, full(4), max_num_seqs=12),
    World(24, 23, full(4, num_groups=2)),
    World(7, 9, full(8), max_num_bypasses=5),
    World(5, 30, full(16)),
]


def mixture(seed: int) -> World:
    """A world of random kinds whose pool holds one or two requests of the largest size."""
    rng = random.Random(seed)
    base = rng.choice([1, 2, 4])
    kinds = []
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(["full", "latent", "window", "window", "chunk"])
        size = rng.choice([1, 2, 3, 5, 8, 13, 30]) if name in ("window", "chunk") else 0
        kinds.append(Kind(name, base * rng.choice([1, 1, 2, 3]), size))
    budget = rng.choice([2, 4, 8, 20, 60])
    limits = KVLimits(MAX_MODEL_LEN, budget)
    specs = [kind.spec for kind in kinds]
    reserve = sum(spec.num_transient_blocks(limits) for spec in specs)
    steady = sum(spec.num_steady_blocks(limits.max_stored_tokens) for spec in specs)
    return World(
        1 + reserve + int(steady * rng.uniform(1.0, 2.5)),
        budget,
        tuple(kinds),
        max_num_seqs=rng.choice([2, 8]),
        max_num_bypasses=rng.choice([0, 2]),
        has_prefix_cache=rng.random() < 0.8,
    )


MIXTURES = [mixture(seed) for seed in range(20)]


class Simulation:
    """One world, its requests, and what must be true of them."""

    def __init__(self, world: World, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = world
        self.manager = KVCacheManager(
            cache_of(world.kinds, world.num_blocks),
            KVLimits(MAX_MODEL_LEN, world.budget),
            world.has_prefix_cache,
        )
        config = SchedulerConfig(world.max_num_seqs, world.budget, world.max_num_bypasses)
        self.scheduler = Scheduler(config, self.manager, MAX_MODEL_LEN)
        self.runner = ShadowRunner(world.num_blocks, world.kinds)
        # The pool holds any request to its last token, as the planner would have it.
        self.max_prompt = max(n for n in range(MAX_MODEL_LEN) if self.manager.can_ever_fit(n))
        # Prompts share beginnings, in the middle of blocks and at their edges.
        self.stems = [self.rng.choices(range(VOCAB_SIZE), k=self.max_prompt) for _ in range(3)]
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_submitted = 0
        self.num_finished = 0
        self.followers: set[str] = set()
        self.num_forked_tokens = 0

    def operate(self) -> None:
        operations = [self.submit, self.branch, self.step, self.abort, self.stop, self.reset]
        [operation] = self.rng.choices(operations, weights=[30, 8, 60, 5, 3, 2])
        operation()
        self.manager.check()

    def submit(self) -> None:
        rng = self.rng
        if len(self.live) > 3 * self.world.max_num_seqs:
            return
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(0, len(stem))]
        prompt += rng.choices(range(VOCAB_SIZE), k=rng.randint(0, 6))
        prompt = prompt[: self.max_prompt] or [3]
        leader = self.add(prompt)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            self.add(prompt, leader)

    def branch(self) -> None:
        """Go on from a running request with other tokens than its last one, and often end it."""
        rng = self.rng
        leaders = [
            r for r in self.running if r.num_computed_tokens == r.num_tokens - 1 < self.max_prompt
        ]
        if leaders:
            leader = rng.choice(leaders)
            for _ in range(rng.randint(1, 3)):
                self.add([*leader.token_ids[:-1], rng.randrange(VOCAB_SIZE)], leader)
            if rng.random() < 0.8:
                self.end_one(leader.req_id, RequestStatus.FINISHED_ABORT)

    def add(self, prompt: list[int], leader: Request | None = None) -> Request:
        rng = self.rng
        room = self.max_prompt + 1 - len(prompt)
        max_tokens = rng.randint(1, room)
        params = ResolvedSamplingParams(
            seed=0,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, max_tokens // 2]),
            stop_token_ids=rng.choice([(), (STOP_ID,)]),
            ignore_eos=rng.random() < 0.3,
            eos_token_ids=frozenset({EOS}),
            prompt_logprobs=rng.choice([None, None, None, 0]) if leader is None else None,
        )
        request = Request(f"r{self.num_submitted}", prompt, params)
        request.leader = leader
        if leader is not None:
            self.followers.add(request.req_id)
        self.num_submitted += 1
        self.scheduler.add_request(request)
        self.live[request.req_id] = request
        self.outputs[request.req_id] = []
        return request

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.manager.check()
        assert output.total_num_scheduled_tokens <= self.world.budget
        assert self.scheduler.num_running <= self.world.max_num_seqs
        if self.live:
            assert output.total_num_scheduled_tokens > 0  # no step is idle while somebody waits
        self.verify_forks(output)
        self.verify_tables(output)
        self.verify_common_prefix(output.num_common_prefix_blocks)
        for event in self.scheduler.update(output, self.runner.run(output)):
            request = self.live[event.req_id]
            self.outputs[event.req_id] += event.new_token_ids
            assert request.output_token_ids == self.outputs[event.req_id]
            if event.finish_reason is not None:
                self.verify_finished(request, event.finish_reason)

    def verify_forks(self, output: SchedulerOutput) -> None:
        """Without a prefix cache, followers alone enter with tokens: with all but their last."""
        for new in output.scheduled_new_reqs:
            is_follower = new.req_id in self.followers
            if is_follower and new.num_computed_tokens == len(new.prompt_token_ids) - 1:
                self.num_forked_tokens += new.num_computed_tokens
            elif not self.world.has_prefix_cache:
                assert new.num_computed_tokens == 0

    def verify_tables(self, output: SchedulerOutput) -> None:
        """Blocks are there while a later query sees them, and no longer."""
        for request in self.running:
            num_read = request.num_computed_tokens
            num_tokens = output.num_scheduled_tokens.get(request.req_id, 0)
            tables = self.manager.get_block_ids(request.req_id)
            for kind, table in zip(self.world.kinds, tables, strict=True):
                held = {column for column, block_id in enumerate(table) if block_id}
                seen = kind.columns_seen(num_read - num_tokens, num_read)
                # What is out of sight goes when the request runs next.
                assert held == seen if num_tokens else held >= seen

    @property
    def running(self) -> list[Request]:
        return [r for r in self.live.values() if r.status is RequestStatus.RUNNING]

    def verify_common_prefix(self, num_common_prefix_blocks: list[int]) -> None:
        running = self.running
        assert len(running) == self.scheduler.num_running
        tables = [self.manager.get_block_ids(r.req_id) for r in running]
        for group, num_common in enumerate(num_common_prefix_blocks):
            columns = zip(*(t[group] for t in tables), strict=False)
            same = itertools.takewhile(lambda ids: ids[0] and len(set(ids)) == 1, columns)
            assert num_common == len(list(same))

    def verify_finished(self, request: Request, finish_reason: str) -> None:
        """Neither mates nor hits, chunks or preemptions have changed the text."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = undisturbed(prompt, request.sampling_params, MAX_MODEL_LEN)
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
            self.end_one(self.rng.choice(list(self.live)), status)

    def end_one(self, req_id: str, status: RequestStatus) -> None:
        request = self.live.pop(req_id)
        [event] = self.scheduler.finish_requests([req_id], status)
        assert event.finish_reason == status.value
        expected = undisturbed(
            request.token_ids[: request.num_prompt_tokens], request.sampling_params, MAX_MODEL_LEN
        )
        assert request.output_token_ids == expected[: request.num_output_tokens]

    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (self.manager.num_used_blocks == 0)

    def drain(self) -> None:
        while self.live:
            self.step()
            self.manager.check()


def simulate(world: World, num_operations: int, seed: int) -> Simulation:
    """Operate at random, then let all requests finish."""
    simulation = Simulation(world, seed)
    for _ in range(num_operations):
        simulation.operate()
    simulation.drain()
    assert not simulation.scheduler.has_unfinished_requests()
    assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0
    assert simulation.manager.num_used_blocks == 0
    simulation.manager.check()
    return simulation


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_random_operations(world, scale):
    simulation = simulate(world, NUM_OPERATIONS * scale // len(WORLDS), seed=WORLDS.index(world))
    # Nothing of this holds because nothing happened.
    assert simulation.num_finished > 30
    assert (simulation.scheduler.stats.num_preemptions > 0) == world.does_preempt
    num_reused_tokens = simulation.runner.num_reused_tokens
    assert (num_reused_tokens > simulation.num_forked_tokens) == world.has_prefix_cache
    assert (simulation.manager.stats.num_hit_tokens > 0) == world.has_prefix_cache
    assert simulation.num_forked_tokens > 0
    assert (simulation.runner.num_copies > 0) == any(kind.block_size > 1 for kind in world.kinds)


@pytest.mark.parametrize("world", MIXTURES, ids=str)
def test_random_operations_over_mixtures(world, scale):
    num_operations = NUM_OPERATIONS * scale // len(MIXTURES)
    simulation = simulate(world, num_operations, seed=MIXTURES.index(world))
    assert simulation.num_finished > 20
    assert simulation.num_forked_tokens > 0
    if not world.has_prefix_cache:
        assert simulation.manager.stats.num_hit_tokens == 0
