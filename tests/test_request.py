import dataclasses

import pytest

from kvloom.errors import RequestError
from kvloom.request import Request, RequestStatus, ResolvedSamplingParams, SamplingParams

BAD_VALUES = [
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("n", True),
    ("n", None),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -1),
    ("top_k", 2.0),
    ("min_p", 1.5),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")),
    ("stop", ("a", "")),
    ("stop", (1,)),
    ("stop", 7),
    ("stop", None),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", 5),
    ("stop_token_ids", (True,)),
    ("stop", ("a", "b\ud800")),
    ("bad_words", ("",)),
    ("bad_words", ("\udc00",)),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 51),
    ("prompt_logprobs", 51),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: None}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1, 2]),
    ("logit_bias", None),
    ("ignore_eos", "no"),
    ("skip_special_tokens", 3),
    ("spaces_between_special_tokens", None),
    ("include_stop_str_in_output", 0),
    ("truncate_prompt_tokens", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(RequestError, match=name) as info:
        SamplingParams(**{name: value})
    assert info.value.field.partition("[")[0] == name


GOOD_VALUES = [
    ("n", 128),
    ("temperature", 0),
    ("temperature", 1e-9),
    ("top_p", 1),
    ("top_k", 10**9),
    ("min_p", 1.0),
    ("seed", 2**63 - 1),
    ("repetition_penalty", 0.5),
    ("logprobs", 0),
    ("prompt_logprobs", 50),
    ("logit_bias", {0: -100, 7: 100.0}),
    ("stop_token_ids", (0,)),
]


@pytest.mark.parametrize(("name", "value"), GOOD_VALUES)
def test_the_ends_of_each_range_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_lists_become_tuples_and_one_string_a_list_of_itself():
    params = SamplingParams(stop="END", bad_words=["a", "b"], stop_token_ids=[1, 2])
    assert params.stop == ("END",)
    assert params.bad_words == ("a", "b")
    assert params.stop_token_ids == (1, 2)


def test_min_tokens_above_max_tokens_is_refused():
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(RequestError, match=r"min_tokens: 5 .* max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_parameters_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


def test_eos_ends_generation_unless_it_is_ignored():
    given = {"seed": 0, "max_tokens": 1, "eos_token_ids": frozenset({2, 3}), "stop_token_ids": (9,)}
    assert ResolvedSamplingParams(**given).all_stop_token_ids == {2, 3, 9}
    assert ResolvedSamplingParams(**given, ignore_eos=True).all_stop_token_ids == {9}


def test_a_request_counts_its_tokens():
    request = Request("r", [5, 6, 7], ResolvedSamplingParams(seed=0, max_tokens=8))
    request.token_ids += [8, 9]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 5, 2)
    assert request.output_token_ids == [8, 9]
    assert request.status is RequestStatus.WAITING


def test_an_empty_cache_salt_is_refused():
    params = ResolvedSamplingParams(seed=0, max_tokens=8)
    assert Request("r", [1], params, cache_salt="s").cache_salt == "s"
    with pytest.raises(RequestError, match="cache_salt"):
        Request("r", [1], params, cache_salt="")


def test_finished_states_are_those_named_so():
    finished = {status.value for status in RequestStatus if status.is_finished}
    assert finished == {"stop", "length", "abort", "error"}
