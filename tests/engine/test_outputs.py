"""Events of a prompt's choices, and the deltas they are told in."""

from __future__ import annotations

import pytest

from kvloom.engine.inputs import PreparedPrompt
from kvloom.engine.outputs import Generation, TextDelta
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.sched.stop import check_stop
from kvloom.step import RequestEvent, TokenLogprobs
from stop_cases import CASE_9, ByteDecoder, byte_pieces


class Letters:
    """Token 0 is "a", 1 is "b", and so on."""

    def decode(self, ids, skip_special_tokens, spaces_between_special_tokens):
        return "".join(chr(ord("a") + i) for i in ids)

    def plain_texts(self, skip_special_tokens):
        return [chr(ord("a") + i) for i in range(26)]


def make_generation(num_choices: int = 1, **params) -> Generation:
    resolved = ResolvedSamplingParams(seed=0, max_tokens=99, **params)
    requests = [Request(f"r{i}", [9], resolved) for i in range(num_choices)]
    return Generation(Letters(), PreparedPrompt(None, [9]), requests)


def test_a_delta_is_what_was_added_since_the_last() -> None:
    generation = make_generation()
    assert generation.take_deltas() == []
    generation.push(RequestEvent("r0", [0]))
    generation.push(RequestEvent("r0", [1, 2]))
    assert generation.take_deltas() == [TextDelta(0, "abc", [0, 1, 2])]
    assert generation.take_deltas() == []
    generation.push(RequestEvent("r0", [3], finish_reason="length"))
    assert generation.take_deltas() == [TextDelta(0, "d", [3], "length")]
    assert generation.take_deltas() == []
    assert generation.output.is_finished


def test_choices_have_deltas_of_their_own() -> None:
    generation = make_generation(3)
    generation.push(RequestEvent("r2", [2]))
    generation.push(RequestEvent("r0", [0]))
    assert generation.take_deltas() == [TextDelta(0, "a", [0]), TextDelta(2, "c", [2])]
    assert generation.unfinished_req_ids == ["r0", "r1", "r2"]
    generation.push(RequestEvent("r1", [], finish_reason="abort"))
    assert generation.take_deltas() == [TextDelta(1, "", [], "abort")]
    assert generation.unfinished_req_ids == ["r0", "r2"]


def test_held_text_is_told_at_the_end() -> None:
    generation = make_generation(stop=("abc",))
    generation.push(RequestEvent("r0", [0, 1]))
    assert generation.take_deltas() == [TextDelta(0, "", [0, 1])]
    generation.push(RequestEvent("r0", [], finish_reason="abort"))
    assert generation.take_deltas() == [TextDelta(0, "ab", [], "abort")]
    assert generation.output.outputs[0].text == "ab"


def test_a_stop_string_ends_the_choice_at_once() -> None:
    generation = make_generation(stop=("bc",))
    assert generation.push(RequestEvent("r0", [0, 1])) is None
    assert generation.push(RequestEvent("r0", [2])) == "bc"
    assert generation.take_deltas() == [TextDelta(0, "a", [0, 1, 2], "stop", [], "bc")]
    # The step that was under way may end it once more; nothing of that is told.
    assert generation.push(RequestEvent("r0", [3], finish_reason="length")) is None
    [choice] = generation.output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a", "stop", "bc")
    assert generation.take_deltas() == []


@pytest.mark.parametrize(("is_kept", "text"), [(False, "a"), (True, "ac")])
def test_a_stop_token_is_text_only_on_request(is_kept: bool, text: str) -> None:
    generation = make_generation(stop_token_ids=(2,), include_stop_str_in_output=is_kept)
    generation.push(RequestEvent("r0", [0, 2], finish_reason="stop", stop_reason=2))
    [choice] = generation.output.outputs
    assert (choice.text, choice.token_ids, choice.stop_reason) == (text, [0, 2], 2)


class ByteTokenizer(ByteDecoder):
    """Token ids are indices; "E" is the end-of-sequence token."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(i for i, piece in enumerate(self.pieces) if piece is None)


@pytest.mark.parametrize(("texts", "stop", "prompt", "text", "forbidden", "num_tokens"), CASE_9)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_case_9(texts, stop, prompt, text, forbidden, num_tokens, is_streamed) -> None:
    """Text, finish and stop reason, and tokens consumed, one token a step, by the stop rules."""
    tokenizer = ByteTokenizer(byte_pieces([*texts, *prompt]))
    prompt_ids = list(range(len(texts), len(tokenizer.pieces))) or [0]
    params = ResolvedSamplingParams(
        seed=0,
        max_tokens=len(texts),
        stop=() if stop is None else (stop,),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    request = Request("r", prompt_ids, params)
    generation = Generation(tokenizer, PreparedPrompt(None, prompt_ids), [request])
    deltas: list[TextDelta] = []
    while not generation.output.is_finished:
        request.token_ids.append(request.num_output_tokens)
        stopped = check_stop(request, 1000)
        reason = None if stopped is None else stopped.status.value
        generation.push(RequestEvent("r", request.token_ids[-1:], finish_reason=reason))
        deltas += generation.take_deltas() if is_streamed else []
    deltas += generation.take_deltas()
    [choice] = generation.output.outputs
    is_stop_string = stop is not None and text in ("ab", "a")
    has_ended = is_stop_string or texts[num_tokens - 1] == "E"
    assert choice.text == "".join(delta.text for delta in deltas) == text
    assert choice.finish_reason == deltas[-1].finish_reason == ("stop" if has_ended else "length")
    assert choice.stop_reason == deltas[-1].stop_reason == (stop if is_stop_string else None)
    assert len(choice.token_ids) == num_tokens
    assert not any(char in delta.text for char in forbidden for delta in deltas)


def test_log_probabilities_of_the_prompt_alone_are_no_delta() -> None:
    generation = make_generation()
    scores = [TokenLogprobs(9, -1.0, 1, ())]
    generation.push(RequestEvent("r0", [], prompt_logprobs=scores, num_cached_tokens=4))
    assert generation.take_deltas() == []
    assert generation.output.prompt_logprobs == scores
    assert generation.output.num_cached_tokens == 4


def test_tokens_of_a_step_behind_a_stop_string_are_none_of_the_choice() -> None:
    """A step with drafts may give several tokens; the second one here completes the string."""
    generation = make_generation(stop=("bc",), logprobs=0)
    scores = [TokenLogprobs(i, -1.0, 1, ()) for i in range(5)]
    assert generation.push(RequestEvent("r0", [0, 1], scores[:2])) is None
    assert generation.push(RequestEvent("r0", [2, 3, 4], scores[2:])) == "bc"
    assert generation.take_deltas() == [TextDelta(0, "a", [0, 1, 2], "stop", scores[:3], "bc")]
    [choice] = generation.output.outputs
    assert (choice.token_ids, choice.logprobs) == ([0, 1, 2], scores[:3])
