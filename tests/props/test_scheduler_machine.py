"""The scheduler under random events, against a model: texts, books, progress and fairness.

Hypothesis chooses a cache, a configuration and what happens: 5,000 events, 100,000 with --full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvloom.config import SchedulerConfig
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import KVLimits
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.drafts import Speculation
from kvloom.sched.queue import PLACES_PER_PRIORITY
from kvloom.sched.scheduler import Scheduler
from kvloom.step import SchedulerOutput
from shadow_cells import VOCAB_SIZE, ShadowRunner, undisturbed
from visibility import Kind, cache_of

MAX_MODEL_LEN = 40
EOS = 0
NUM_STEMS = 3
NUM_EVENTS_PER_RUN = 100
NUM_RUNS = 70

KINDS = st.one_of(
    st.tuples(st.sampled_from(["full", "latent"]), st.just(0)),
    st.tuples(st.sampled_from(["window", "chunk"]), st.integers(1, 30)),
)
CACHES = st.tuples(
    st.sampled_from([1, 2, 4]),  # the smallest block
    st.lists(st.tuples(KINDS, st.sampled_from([1, 1, 2, 3])), min_size=1, max_size=4),
)


class HalfRight:
    """Proposes what the model will say, with a wrong token in every second draft or so."""

    def propose(self, req_id: str, token_ids: Sequence[int], max_num_tokens: int) -> list[int]:
        params = ResolvedSamplingParams(seed=0, max_tokens=max_num_tokens, ignore_eos=True)
        drafts = undisturbed(list(token_ids), params, MAX_MODEL_LEN)
        wrong = len(token_ids) % (2 * max_num_tokens)
        return [(t + (i == wrong)) % VOCAB_SIZE for i, t in enumerate(drafts)]

    def forget(self, req_id: str) -> None:
        pass


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, its manager, and a runner that checks every read.

    Attributes:
        waiting: by request that has never run, those behind it in the order that entered before it.
    """

    num_events: ClassVar[int] = 0
    num_preemptions: ClassVar[int] = 0
    num_accepted_tokens: ClassVar[int] = 0

    @initialize(
        cache=CACHES,
        budget=st.sampled_from([2, 4, 8, 20, 60]),
        room=st.floats(1.0, 2.5),
        max_num_seqs=st.sampled_from([2, 8]),
        max_num_bypasses=st.sampled_from([0, 2]),
        mode=st.sampled_from(["lockstep", "async", "drafts", "async drafts"]),
        has_prefix_cache=st.sampled_from([True, True, False]),
    )
    def build(self, cache, budget, room, max_num_seqs, max_num_bypasses, mode, has_prefix_cache):
        base, layers = cache
        kinds = [Kind(name, base * times, size) for (name, size), times in layers]
        limits = KVLimits(MAX_MODEL_LEN, budget)
        specs = [kind.spec for kind in kinds]
        steady = sum(spec.num_steady_blocks(limits.max_stored_tokens) for spec in specs)
        num_blocks = 1 + sum(spec.num_transient_blocks(limits) for spec in specs)
        num_blocks += int(steady * room)
        self.config = SchedulerConfig(max_num_seqs, budget, max_num_bypasses, "async" in mode)
        self.manager = KVCacheManager(cache_of(kinds, num_blocks), limits, has_prefix_cache)
        speculation = Speculation(HalfRight(), 3, MAX_MODEL_LEN) if "drafts" in mode else None
        self.scheduler = Scheduler(
            self.config, self.manager, MAX_MODEL_LEN, speculation=speculation
        )
        self.runner = ShadowRunner(num_blocks, kinds)
        self.max_prompt = max(n for n in range(MAX_MODEL_LEN) if self.manager.can_ever_fit(n))
        self.in_flight: deque[SchedulerOutput] = deque()
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.waiting: dict[Request, int] = {}
        self.num_submitted = 0
        self.num_idle_steps = 0

    @rule(
        stem=st.integers(0, NUM_STEMS - 1),
        cut=st.floats(0.0, 1.0),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        share=st.floats(0.0, 1.0),
        priority=st.sampled_from([0, 0, 0, 1, -1, 7]),
        ignore_eos=st.booleans(),
    )
    def submit(self, stem, cut, tail, share, priority, ignore_eos):
        self._count_event()
        if len(self.live) > 3 * self.config.max_num_seqs:
            return
        text = [(7 * stem + 3 * i) % VOCAB_SIZE for i in range(self.max_prompt)]
        prompt = (text[: int(cut * len(text))] + tail)[: self.max_prompt] or [3]
        room = self.max_prompt + 1 - len(prompt)
        params = ResolvedSamplingParams(
            seed=0,
            max_tokens=max(1, int(share * room)),
            ignore_eos=ignore_eos,
            eos_token_ids=frozenset({EOS}),
        )
        request = Request(f"r{self.num_submitted}", prompt, params, priority=priority)
        self.num_submitted += 1
        self.scheduler.add_request(request)
        self.live[request.req_id] = request
        self.outputs[request.req_id] = []
        self.waiting[request] = 0

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        self._count_event()
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), status=st.sampled_from(["abort", "stop"]))
    def end(self, which, status):
        """A request ends from outside, in whatever state it is."""
        self._count_event()
        req_id = list(self.live)[which % len(self.live)]
        [event] = self.scheduler.finish_requests([req_id], RequestStatus(status))
        assert event.finish_reason == status
        self._drop(req_id)

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self):
        """The device fails: all steps in flight are given up."""
        self._count_event()
        for output in self.in_flight:
            self.scheduler.fail_step(output, "it broke")
        self.in_flight.clear()
        failed = [r.req_id for r in self.live.values() if r.status.is_finished]
        for req_id in failed:
            assert self.live[req_id].status is RequestStatus.FINISHED_ERROR
            self._drop(req_id)
        self.runner.has_lost_steps = True

    @rule()
    def reset(self):
        self._count_event()
        is_idle = self.manager.num_used_blocks == 0
        assert self.manager.reset_prefix_cache() == is_idle

    @invariant()
    def books_are_right(self):
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        num_left = 100 + sum(MAX_MODEL_LEN * (2 + r.num_preemptions) for r in self.live.values())
        while self.scheduler.has_unfinished_requests():
            self._step()
            num_left -= 1
            assert num_left > 0, "requests do not end"
        while self.in_flight:
            self._update()
        assert not self.live
        assert not self.scheduler.has_unfinished_requests()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.manager.num_used_blocks == 0
        self.manager.check()
        stats = self.scheduler.stats
        SchedulerMachine.num_preemptions += stats.num_preemptions
        SchedulerMachine.num_accepted_tokens += stats.num_accepted_tokens

    def _step(self):
        num_ahead = 1 if self.config.has_async_stepping else 0
        while len(self.in_flight) <= num_ahead:
            self._schedule()
        self._update()

    def _update(self):
        output = self.in_flight.popleft()
        for event in self.scheduler.update(output, self.runner.run(output)):
            request = self.live.get(event.req_id)
            if request is None:
                assert event.finish_reason == "error"  # told of before: its step was given up
                continue
            self.outputs[event.req_id] += event.new_token_ids
            assert request.output_token_ids == self.outputs[event.req_id]
            if event.finish_reason is not None:
                self._check_text(request, event.finish_reason)
                self._drop(event.req_id)

    def _schedule(self):
        output = self.scheduler.schedule()
        self.manager.check()
        assert output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        # Progress at least every two steps, or while one is in flight that ends something.
        is_idle = output.total_num_scheduled_tokens == 0 and bool(self.live)
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        assert self.num_idle_steps < 2
        self._check_order(output)
        self.in_flight.append(output)

    def _check_order(self, output):
        """Nobody is passed by those behind it more often than allowed, nor by too many in all."""
        entered = [self.live[new.req_id] for new in output.scheduled_new_reqs]
        for request in entered:
            del self.waiting[request]
        for request in self.waiting:
            self.waiting[request] += sum(one.place > request.place for one in entered)
            assert self.waiting[request] <= self.config.max_num_bypasses
        places = [r.place for r in self.live.values()]
        for number, place in places:
            assert number <= place + 7 * PLACES_PER_PRIORITY

    def _check_text(self, request, finish_reason):
        prompt, params = request.token_ids[: request.num_prompt_tokens], request.sampling_params
        expected = undisturbed(prompt, params, MAX_MODEL_LEN)
        assert request.output_token_ids == expected
        is_stop = not params.ignore_eos and expected[-1] == EOS
        assert finish_reason == ("stop" if is_stop else "length")

    def _drop(self, req_id):
        self.waiting.pop(self.live.pop(req_id), None)

    def _count_event(self):
        SchedulerMachine.num_events += 1


def test_whatever_happens(scale: int) -> None:
    SchedulerMachine.num_events = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=NUM_RUNS * scale,
            stateful_step_count=NUM_EVENTS_PER_RUN,
            phases=[Phase.generate],
        ),
    )
    assert SchedulerMachine.num_events >= 5000 * scale
    assert SchedulerMachine.num_preemptions > 0
    assert SchedulerMachine.num_accepted_tokens > 0
