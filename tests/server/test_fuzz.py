"""Bodies made of fields that exist and values of any kind: whatever comes, no 5xx.

Among them are NaN, integers of any size and half surrogate pairs, which a description's fuzzer
does not send.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from live_server import LiveServer

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([10**19, -(10**400), 10**400, 2**31, 2**63])
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\x00", "user", "assistant", "text", "tiny", "function", "1"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "function", "id", "5"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
_VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
_FIELDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@st.composite
def requests(draw: Any) -> tuple[str, Any]:
    path = draw(st.sampled_from(sorted(_VALID)))
    names = st.sampled_from(sorted(_FIELDS[path].model_fields)) | st.text(max_size=3)
    changes = draw(st.dictionaries(names, _VALUES, max_size=4))
    return path, draw(st.sampled_from([_VALID[path] | changes, changes]))


def test_no_body_is_answered_with_5xx(live: LiveServer, scale: int) -> None:
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=live.url, timeout=60, headers=headers) as client:

        @settings(max_examples=100 * scale)
        @given(requests())
        def check(request: tuple[str, Any]) -> None:
            path, body = request
            answer = client.post(path, content=json.dumps(body))
            assert answer.status_code < 500, (answer.text, path, body)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["message"]

        check()
    live.check_idle()
