from __future__ import annotations

import pytest

from kvloom.request import Request, RequestStatus, ResolvedSamplingParams
from kvloom.sched.stop import Stop, check_stop

EOS, OTHER_EOS, S = 2, 3, 7
STOP = Stop(RequestStatus.FINISHED_STOP)
LENGTH = Stop(RequestStatus.FINISHED_LENGTH)


def check(output, *, prompt=(1, 1), max_model_len=100, **params) -> Stop | None:
    options = {"max_tokens": 50, "eos_token_ids": frozenset({EOS, OTHER_EOS}), **params}
    request = Request("r", prompt, ResolvedSamplingParams(seed=0, **options))
    request.token_ids += output
    return check_stop(request, max_model_len)


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([5], {}, None),
        ([5, EOS], {}, STOP),
        ([5, OTHER_EOS], {}, STOP),  # every id of the EOS set
        ([EOS, 5], {}, None),  # only the last token decides
        ([5, EOS], {"ignore_eos": True}, None),
        ([5, S], {"stop_token_ids": [S]}, Stop(RequestStatus.FINISHED_STOP, S)),
        ([5, S], {}, None),
        # An ignored EOS that the user names is a stop token like any other.
        (
            [EOS],
            {"ignore_eos": True, "stop_token_ids": [EOS]},
            Stop(RequestStatus.FINISHED_STOP, EOS),
        ),
        ([EOS], {"stop_token_ids": [EOS]}, STOP),
        ([5, 5, 5], {"max_tokens": 3}, LENGTH),
        ([5, 5], {"max_tokens": 3}, None),
        ([5, 5, EOS], {"max_tokens": 3}, STOP),  # "stop" when both hold
        ([5, 5], {"max_model_len": 4}, LENGTH),
        ([5, 5], {"max_model_len": 5}, None),
        ([5, EOS], {"max_model_len": 4}, STOP),
    ],
)
def test_stop_rules(output, params, expected):
    assert check(output, **params) == expected


def test_min_tokens_guards_every_stop_token():
    """Case 9: ids a, S, b, S with min_tokens 3: the S at index 1 passes, that at index 3 stops."""
    params = {"min_tokens": 3, "stop_token_ids": [S]}
    assert check([5, S], **params) is None
    assert check([5, S, 6], **params) is None
    assert check([5, S, 6, S], **params) == Stop(RequestStatus.FINISHED_STOP, S)
    for token_id in (EOS, OTHER_EOS):
        assert check([5, 5, token_id], **params) is None  # no EOS before 3 outputs
        assert check([5, 5, 5, token_id], **params) == STOP
    # The length limit is not a stop token.
    assert check([5, 5, 5], min_tokens=3, max_tokens=3) == LENGTH
    assert check([5, 5], min_tokens=3, max_model_len=4) == LENGTH
