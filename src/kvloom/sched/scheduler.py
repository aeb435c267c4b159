"""The scheduler: every step, computed tokens catch up with known tokens.

There are no phases. A long prompt, a prefix hit, one more token of a running request and a
preempted request that comes back differ only in how far apart the two numbers are. One order, of
priority and arrival, decides who gets tokens and blocks first and, from the other end, who gives
way.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvloom.config import SchedulerConfig
from kvloom.errors import RequestError
from kvloom.kv.events import EventLog, RequestPreempted
from kvloom.kv.manager import KVCacheManager
from kvloom.request import Request, RequestStatus
from kvloom.sched.admission import check_new_request, too_large
from kvloom.sched.drafts import Speculation
from kvloom.sched.forks import Forks
from kvloom.sched.grammars import GrammarDesk, Grammars
from kvloom.sched.in_flight import StepsInFlight
from kvloom.sched.outcomes import end_event, last_event, progress_event
from kvloom.sched.queue import RequestQueue, place_of
from kvloom.sched.stats import SchedulerStats
from kvloom.sched.step_builder import BlockIds, StepBuilder
from kvloom.step import ModelRunnerOutput, RequestEvent, SchedulerOutput


class Scheduler:
    """Decides who runs. The only place where a request's status changes.

    Waiting requests enter in order of their place (`place_of`), each when all of its known tokens
    fit. One that does not fit may be passed by others behind it, `max_num_bypasses` times in all;
    then they wait, too. When a running request finds no block, the last running one in that order
    is preempted: it loses its blocks, keeps its tokens, and waits at its old place in line.

    So nobody starves. Before a request enters, only those can that have a place before it, and
    `max_num_bypasses` others. Of those that arrive later, `PLACES_PER_PRIORITY` per level of
    priority between them have such a place, and none of its own level. Each of them ends: the first
    one in the order gives way to nobody, and whoever entered fits alone.

    With asynchronous stepping a step may be scheduled before the one before it is updated. Then a
    request may run one token ahead, unless the token in flight is known to be the last one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        max_model_len: int,
        events: EventLog | None = None,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Schedule over the blocks of `kv_cache_manager`; preemptions are recorded in `events`."""
        self._config = config
        self._kv = kv_cache_manager
        self._max_model_len = max_model_len
        self._events = events
        self._speculation = speculation
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._waiting = RequestQueue()  # without blocks: new, or preempted
        self._running = RequestQueue()  # with blocks
        # Drafts are proposed behind tokens that are known.
        runs_ahead = bool(config.has_async_stepping) and speculation is None
        self._in_flight = StepsInFlight(max_model_len, runs_ahead)
        self._forks = Forks(kv_cache_manager)
        self._grammars = GrammarDesk(grammars)  # those whose grammar is being compiled
        self._finished_req_ids: set[str] = set()  # for the next step's workers
        self._failed: list[RequestEvent] = []  # for the next update
        self._num_arrivals = 0
        self._num_preemptions = 0
        self._num_lost_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or a grammar, preempted ones included."""
        return len(self._waiting) + len(self._grammars) + self._forks.num_held_back

    @property
    def waits_for_grammars(self) -> bool:
        """Whether no step can do anything before a grammar has been compiled."""
        return len(self._grammars) == len(self._requests) > 0 and not self._failed

    @property
    def stats(self) -> SchedulerStats:
        """Requests by state, and what preemption cost."""
        drafts = self._speculation
        return SchedulerStats(
            self.num_running,
            self.num_waiting,
            self._num_preemptions,
            self._num_lost_tokens,
            0 if drafts is None else drafts.num_draft_tokens,
            0 if drafts is None else drafts.num_accepted_tokens,
        )

    @property
    def may_schedule(self) -> bool:
        """Whether the next step is to be scheduled now, or once the last one is updated."""
        return self._in_flight.may_follow(self._running)

    def has_unfinished_requests(self) -> bool:
        """Whether another step has anything to do; finished ids or failures may be left to tell."""
        return bool(self._requests) or bool(self._failed)

    def add_request(self, request: Request) -> None:
        """Let `request` join the line.

        Raises:
            RequestError: its id is in use, its prompt is empty, leaves no room for a token, or can
                never fit in the cache.
        """
        if request.req_id in self._requests or self._in_flight.names_ended(request.req_id):
            raise RequestError("req_id", f"{request.req_id!r} is still running; choose another id")
        check_new_request(request, self._kv, self._max_model_len)
        request.place = place_of(request.priority, self._num_arrivals)
        if request.leader is not None:  # it stands right behind its leader, whenever it comes
            request.place = request.leader.place[0], self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.req_id] = request
        if request.sampling_params.structured_outputs is None:
            self._join(request)
        else:
            self._grammars.add(request)

    def finish_requests(
        self,
        req_ids: Iterable[str],
        status: RequestStatus,
        stop_reason: int | str | None = None,
    ) -> list[RequestEvent]:
        """End requests in any state, from outside; ids that are unknown or finished are skipped.

        Returns:
            The last event of each request that was ended.
        """
        events = []
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                self._finish(request, status, stop_reason)
                events.append(last_event(request))
        return events

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Every step that is emitted must run, and be updated, in order."""
        self._take_compiled()
        config = self._config
        step = StepBuilder(config.max_num_batched_tokens, config.max_num_tokens_per_req)
        for request in self._forks.start_step():
            self._waiting.add(request)
        self._kv.start_step()
        num_preemptions = self._num_preemptions
        self._schedule_running(step)
        # Whoever just gave way must not lose the freed blocks to somebody new.
        if self._num_preemptions == num_preemptions:
            self._schedule_waiting(step)
        if self._forks.end_step() and not step.num_scheduled_tokens:
            self._schedule_waiting(step)  # only fork points were in the way
        finished, self._finished_req_ids = self._finished_req_ids, set()
        output = step.build(self._kv.num_common_prefix_blocks(), finished)
        self._in_flight.begin(output, step.requests)
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestEvent]:
        """Take over what the step computed; ended requests give their blocks back.

        Returns:
            One event per request that got tokens or log-probabilities, or ended.
        """
        events, self._failed = self._failed, []
        if self._speculation is not None:
            self._speculation.count(output.scheduled_spec_decode_tokens, result.sampled_token_ids)
        step = self._in_flight.end(output)
        for request in step.requests:
            if request.status.is_finished:  # while the step ran
                continue
            event = self._update_request(request, result)
            if event is not None:
                events.append(event)
            is_running = request.status is RequestStatus.RUNNING
            if is_running and request.req_id in output.scheduled_spec_decode_tokens:
                # The accepted drafts are stored, and what was sampled behind them is not.
                request.num_computed_tokens = request.num_tokens - 1
        for request in step.ended:
            self._kv.free(request)
        return events

    def fail_step(self, output: SchedulerOutput, reason: str) -> None:
        """Give up a step that did not run to its end, an interrupt included.

        Its blocks were published when it was scheduled, but what they hold is unknown: all requests
        of the step end with "error", and none of their blocks can be found. Others go on. If there
        is a step after it, that must be given up next.
        """
        self._finished_req_ids |= output.finished_req_ids
        self._forks.close_points()
        step = self._in_flight.end(output)
        for request in step.requests:
            self._kv.forget(request)
            if not request.status.is_finished:
                self._fail(request, reason)
        for request in step.ended:
            self._kv.free(request)

    def _join(self, request: Request) -> None:
        if not self._forks.add(request):
            self._waiting.add(request)

    def _take_compiled(self) -> None:
        """Requests whose grammar has been compiled get their place in line: that of their arrival.

        Until then they are in nobody's way, and nobody who enters counts as passing them by.
        """
        for request, error in self._grammars.take_compiled():
            if error is None:
                request.status = RequestStatus.WAITING
                self._join(request)
            else:
                self._fail(request, error)

    def _schedule_running(self, step: StepBuilder) -> None:
        for request in list(self._running):
            # One that gave way to another does not run any more, nor do those behind it.
            if step.num_free_tokens == 0 or request.status is not RequestStatus.RUNNING:
                return
            num_missing_tokens = len(request.token_ids) - request.num_computed_tokens
            # Its last token is still being computed: workers will know it when it is needed.
            if num_missing_tokens == 0 and self._in_flight.may_run_ahead(request):
                num_missing_tokens = 1
            num_tokens = step.num_fitting_tokens(request, num_missing_tokens)
            if num_tokens <= 0:
                continue
            if num_missing_tokens == 1 and self._schedule_drafts(request, step):
                continue
            if num_tokens > 1:
                num_tokens = self._kv.limit_chunk(request, num_tokens)
            new_block_ids = self._kv.allocate_slots(request, num_tokens)
            if new_block_ids is None:
                new_block_ids = self._take_from_last(request, num_tokens)
                if new_block_ids is None:
                    return
            step.add_running(request, num_tokens, new_block_ids)
            request.num_computed_tokens += num_tokens

    def _schedule_drafts(self, request: Request, step: StepBuilder) -> bool:
        """Schedule the last known token with drafts behind it, if there are any and room for them.

        They take what is left over: for them nobody waits or gives way.
        """
        if self._speculation is None:
            return False
        num_kept_tokens = self.num_running - len(step.num_scheduled_tokens)  # one for each to come
        drafts = self._speculation.propose(request, step.num_fitting_drafts(num_kept_tokens))
        if drafts and request.sampling_params.structured_outputs is not None:
            drafts = drafts[: self._grammars.num_fitting(request, drafts)]
        if drafts:
            drafts = drafts[: self._kv.limit_chunk(request, 1 + len(drafts)) - 1]
        if not drafts:
            return False
        new_block_ids = self._kv.allocate_slots(request, 1 + len(drafts))
        if new_block_ids is None:
            return False
        step.add_running(request, 1, new_block_ids)
        step.add_drafts(request.req_id, drafts)
        request.num_computed_tokens += 1
        return True

    def _take_from_last(self, request: Request, num_tokens: int) -> BlockIds | None:
        """Blocks that running requests behind `request` gave up; None if it gave way itself."""
        if self._forks.close_points():  # what only they hold costs nobody anything
            block_ids = self._kv.allocate_slots(request, num_tokens)
            if block_ids is not None:
                return block_ids
        while (last := self._running.pop_last()) is not request:
            self._preempt(last, request)
            block_ids = self._kv.allocate_slots(request, num_tokens)
            if block_ids is not None:
                return block_ids
        self._preempt(request, request)
        return None

    def _preempt(self, request: Request, needed_by: Request) -> None:
        self._kv.free(request)
        self._num_preemptions += 1
        self._num_lost_tokens += request.num_computed_tokens
        if self._events is not None:
            self._events.record(
                RequestPreempted(request.req_id, needed_by.req_id, request.num_computed_tokens)
            )
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self._waiting.add(request)
        self._end_if_too_large(request)

    def _end_if_too_large(self, request: Request) -> None:
        """End a preempted request that can never come back."""
        if not self._kv.can_ever_fit(request.num_tokens):
            self._fail(request, too_large(self._kv, request.num_tokens, "lower max_tokens"))

    def _schedule_waiting(self, step: StepBuilder) -> None:
        max_num_seqs = self._config.max_num_seqs
        num_seats = max_num_seqs - self.num_running
        passed: list[Request] = []
        for request in self._waiting.first(num_seats + self._config.max_num_bypasses):
            if self.num_running == max_num_seqs or step.num_free_tokens == 0:
                return
            if self._enter(request, step):
                for one in passed:
                    one.num_bypasses += 1
            else:
                passed.append(request)
            if not self._may_pass(passed):
                return

    def _may_pass(self, passed: list[Request]) -> bool:
        """Whether a request behind `passed` may enter; also bounds the look-ups of one step."""
        limit = self._config.max_num_bypasses
        return len(passed) <= limit and all(r.num_bypasses < limit for r in passed)

    def _enter(self, request: Request, step: StepBuilder) -> bool:
        hit = self._forks.get_hit(request) or self._kv.get_computed_blocks(request)
        num_tokens = step.num_fitting_tokens(request, request.num_tokens - hit.num_tokens)
        num_tokens = self._kv.limit_chunk(request, num_tokens, hit)
        if self._kv.allocate_slots(request, num_tokens, hit) is None:
            return False
        self._waiting.remove(request)
        self._running.add(request)
        self._forks.forget(request)
        step.block_copies += self._kv.tail_copies(request, hit)
        request.num_computed_tokens = hit.num_tokens
        block_ids = self._kv.get_block_ids(request.req_id)
        if request.status is RequestStatus.PREEMPTED:
            step.add_resumed(request, num_tokens, block_ids)
        else:
            request.num_cached_tokens = hit.num_tokens
            step.add_new(request, num_tokens, block_ids)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens += num_tokens
        return True

    def _update_request(self, request: Request, result: ModelRunnerOutput) -> RequestEvent | None:
        req_id = request.req_id
        error = result.errors.get(req_id)
        if error is not None:
            self._kv.forget(request)
            self._finish(request, RequestStatus.FINISHED_ERROR)
            return last_event(request, error)
        event = progress_event(request, result)
        if event is None:
            return None
        for num_tokens, token_id in enumerate(event.new_token_ids, 1):
            request.token_ids.append(token_id)
            stop = self._grammars.check_stop(request, self._max_model_len)
            if stop is not None:
                self._finish(request, stop.status, stop.token_id)
                end_event(event, request, num_tokens, stop.error)
                break
        if request.status is RequestStatus.PREEMPTED:  # while the step ran
            self._end_if_too_large(request)
        return event

    def _fail(self, request: Request, error: str) -> None:
        self._finish(request, RequestStatus.FINISHED_ERROR)
        self._failed.append(last_event(request, error))

    def _finish(
        self, request: Request, status: RequestStatus, stop_reason: int | str | None = None
    ) -> None:
        """End a request in any state. Workers are told of those they have seen.

        Its blocks are free once no step in flight names it.
        """
        assert status.is_finished
        is_held_back = self._forks.forget(request)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif not is_held_back and request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
            self._waiting.remove(request)
        if request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
            self._finished_req_ids.add(request.req_id)
        if status is not RequestStatus.FINISHED_ERROR:
            self._forks.leader_ends(request)
        if request.sampling_params.structured_outputs is not None:
            self._grammars.remove(request)
        if not self._in_flight.keep_blocks(request):
            self._kv.free(request)
        if self._speculation is not None:
            self._speculation.forget(request.req_id)
        request.status = status
        request.stop_reason = stop_reason
        del self._requests[request.req_id]
