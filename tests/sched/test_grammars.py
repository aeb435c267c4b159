"""Requests with a grammar: in nobody's way until it is compiled, ended where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from drafting import Listed
from kvloom.request import Request, RequestStatus
from kvloom.structured_outputs import GrammarProgress, StructuredOutputs

COMPLETE, BROKEN = 5, 6  # token ids with which the text is complete, or cannot go on


class ScriptedGrammars:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.compiled: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[int]] = {}

    def begin(self, req_id: str, structured: StructuredOutputs) -> None:
        self.known.add(req_id)

    def take_compiled(self) -> list[tuple[str, str | None]]:
        taken, self.compiled = self.compiled, []
        return [(req_id, error) for req_id, error in taken if req_id in self.known]

    def accept(self, req_id: str, token_id: int) -> GrammarProgress:
        self.texts.setdefault(req_id, []).append(token_id)
        return GrammarProgress(token_id == COMPLETE, "too complex" if token_id == BROKEN else None)

    def num_fitting(self, req_id: str, token_ids: Sequence[int]) -> int:
        return next((i for i, t in enumerate(token_ids) if t == COMPLETE), len(token_ids))

    def end(self, req_id: str) -> None:
        self.known.remove(req_id)


GRAMMAR = StructuredOutputs(regex="a+")


@pytest.fixture
def grammars() -> ScriptedGrammars:
    return ScriptedGrammars()


@pytest.fixture
def make(setup: Callable, grammars: ScriptedGrammars) -> Callable:
    return lambda **options: setup(grammars=grammars, **options)


def test_it_waits_in_nobodys_way_and_keeps_its_place(make: Callable, grammars: ScriptedGrammars):
    one = make(max_num_seqs=1)
    first = one.add("a", [1, 2, 3], max_tokens=2, structured_outputs=GRAMMAR)
    one.add("b", [4, 5], max_tokens=2)
    one.add("c", [6, 7], max_tokens=1)
    assert first.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert (one.scheduler.num_waiting, one.scheduler.waits_for_grammars) == (3, False)
    assert one.step()[0].num_scheduled_tokens == {"b": 2}
    assert first.num_bypasses == 0
    grammars.compiled.append(("a", None))
    assert one.step()[0].num_scheduled_tokens == {"b": 1}  # compiled, but the one seat is taken
    assert first.status is RequestStatus.WAITING
    assert one.step()[0].num_scheduled_tokens == {"a": 3}  # before c, which came after it


def test_rows_are_of_those_that_sample(make: Callable, grammars: ScriptedGrammars):
    one = make(max_num_batched_tokens=6)
    one.add("free", [1, 2], max_tokens=9)
    for req_id in ("a", "b"):
        one.add(req_id, [3, 4, 5], max_tokens=9, structured_outputs=GRAMMAR)
        grammars.compiled.append((req_id, None))
    output, _ = one.step()
    assert output.num_scheduled_tokens == {"free": 2, "a": 3, "b": 1}  # b's prompt is cut
    assert output.structured_output_request_ids == {"a": 0}
    assert one.step()[0].structured_output_request_ids == {"a": 0, "b": 1}


def test_drafts_have_rows_of_their_own_and_end_where_the_grammar_does(make: Callable, grammars):
    """Of the drafts 1, 2 and COMPLETE the last one does not follow, says the grammar here."""
    one = make(speculation=(Listed([1, 2, COMPLETE], [1, 2, COMPLETE]), 3))
    one.add("a", [7, 8], max_tokens=9, structured_outputs=GRAMMAR)
    one.add("b", [9], max_tokens=9, structured_outputs=GRAMMAR)
    grammars.compiled += [("a", None), ("b", None)]
    one.update(one.schedule(), sampled_token_ids={"a": [3], "b": [3]})
    output = one.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2], "b": [1, 2]}
    assert output.structured_output_request_ids == {"a": 0, "b": 3}
    # What the model says behind drafts ends where the text is complete, too.
    events = one.update(output, sampled_token_ids={"a": [1, COMPLETE], "b": [4]})
    assert [(e.new_token_ids, e.finish_reason) for e in events] == [
        ([1, COMPLETE], "stop"),
        ([4], None),
    ]
    assert grammars.texts == {"a": [3, 1, COMPLETE], "b": [3, 4]}


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "reason", "error"),
    [
        ([7, COMPLETE], 9, "stop", None),
        ([7, COMPLETE], 2, "stop", None),  # complete, not cut
        ([7, 8], 2, "length", None),
        ([7, BROKEN], 9, "error", "too complex"),
        ([7, 99], 9, "stop", None),  # EOS
    ],
)
def test_how_it_ends(make, grammars, tokens, max_tokens, reason, error):
    one = make()
    one.add("a", [1, 2], max_tokens, structured_outputs=GRAMMAR, eos_token_ids=frozenset({99}))
    grammars.compiled.append(("a", None))
    for token_id in tokens:
        output = one.schedule()
        [event] = one.update(output, sampled_token_ids={"a": [token_id]})
    assert (event.finish_reason, event.error, event.stop_reason) == (reason, error, None)
    assert event.new_token_ids == tokens[-1:]
    assert grammars.texts["a"] == [token_id for token_id in tokens if token_id != 99]
    assert grammars.known == set()
    assert not one.scheduler.has_unfinished_requests()


def test_a_preempted_text_goes_on_where_it_was(make: Callable, grammars: ScriptedGrammars, fresh):
    """Its tokens are computed again, and not taken again by its grammar."""
    one = make(num_blocks=7, block_size=4, has_prefix_cache=False)
    requests = [
        one.add(req_id, fresh(6), max_tokens=14, structured_outputs=GRAMMAR) for req_id in "ab"
    ]
    grammars.compiled += [("a", None), ("b", None)]
    events = one.finish_all()
    assert [event.finish_reason for event in events] == ["length", "length"]
    assert requests[1].num_preemptions > 0
    for request in requests:
        assert grammars.texts[request.req_id] == request.output_token_ids


def test_abort_while_it_waits_for_its_grammar(make: Callable, grammars: ScriptedGrammars):
    one = make()
    one.add("a", [1, 2], structured_outputs=GRAMMAR)
    assert one.scheduler.waits_for_grammars
    [event] = one.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORT)
    assert event.finish_reason == "abort"
    assert grammars.known == set()
    assert (one.scheduler.num_waiting, one.scheduler.has_unfinished_requests()) == (0, False)
    assert one.step()[0].finished_req_ids == set()  # workers have never seen it
    # The id may be used again, and what the first one left behind does not count for it.
    again: Request = one.add("a", [1, 2], structured_outputs=GRAMMAR)
    one.step()
    assert again.status is RequestStatus.WAITING_FOR_GRAMMAR


def test_a_grammar_that_does_not_compile_ends_its_request(make, grammars: ScriptedGrammars):
    one = make()
    one.add("a", [1, 2], structured_outputs=GRAMMAR)
    one.add("b", [1, 2])
    grammars.compiled.append(("a", "too large"))
    _, events = one.step()
    assert {e.req_id: (e.finish_reason, e.error) for e in events} == {
        "a": ("error", "too large"),
        "b": ("length", None),
    }
    assert not one.scheduler.has_unfinished_requests()
