"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvloom.errors import KvloomError, RequestError, UnavailableError

_FIRST_STEP = re.compile(r"[.\[][^.\[]*")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """What a request is refused with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": _printable(message),
                "type": _TYPES.get(status, "server_error"),
                "param": None if param is None else _printable(param),
                "code": code,
            }
        }
        self.headers = dict(headers or {})

    @property
    def response(self) -> JSONResponse:
        """The error as an answer."""
        return JSONResponse(self.body, self.status, self.headers)


def unavailable(message: str) -> ApiError:
    """The server takes no requests now, but may soon."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


def as_api_error(error: Exception) -> ApiError:
    """Whatever a request led to, as its answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, UnavailableError):
        return unavailable(str(error))
    if isinstance(error, KvloomError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, "the server failed on this request; its log says why", code="internal")


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of `app` have OpenAI's shape."""

    async def any_error(_request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response

    async def http_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # FastAPI could not even read the body
            return _unreadable(error.__cause__).response
        message = f"{error.detail}: see /openapi.json for what there is"
        return ApiError(error.status_code, message, headers=error.headers).response

    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors(), error.body).response

    for kind in (ApiError, KvloomError, Exception):
        app.add_exception_handler(kind, any_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


def _unreadable(cause: BaseException | None) -> ApiError:
    reason = "it is not in UTF-8"
    if isinstance(cause, RecursionError):
        reason = "lists or objects are too deep in each other"
    elif isinstance(cause, ValueError) and not isinstance(cause, UnicodeDecodeError):
        reason = "a number has too many digits"
    return ApiError(400, f"the body cannot be read as JSON: {reason}", code="invalid_json")


def from_validation(errors: Sequence[Any], body: Any) -> ApiError:
    """Pydantic's errors, located from ("body", ...) on, as one: of the first field that is wrong.

    Of a value that may be a text or a list, each way of reading it fails: where one of them gets
    further, its place is the telling one.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    param, *others = dict.fromkeys(_field(error, body) for error in errors)
    deeper = [other for other in others if other and param and other.startswith(param)]
    steps = {_FIRST_STEP.match(other, len(param or "")) for other in deeper}
    if len({step and step.group() for step in steps}) == 1:
        param = deeper[0]
    reasons = dict.fromkeys(_reason(e) for e in errors if _field(e, body) == param)
    if param is None:
        hint = "; send a JSON object with Content-Type: application/json"
        return ApiError(400, " or ".join(reasons) + hint, code="invalid_value")
    return ApiError(400, f"{param}: {' or '.join(reasons)}", param=param, code="invalid_value")


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "this server does not know or support it; leave it out"
    return str(error["msg"]).removeprefix("Value error, ")


def _field(error: Mapping[str, Any], body: Any) -> str | None:
    """`messages[0].content` of a location in the body; names of union members are no field's."""
    path, value = "", body
    *inner, last = error["loc"][1:] or (None,)
    for key in (*inner, last):
        if isinstance(key, int) and isinstance(value, list) and key < len(value):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(key, str) and isinstance(value, dict):
            is_missing = key is last and error["type"] == "missing"
            if key in value or is_missing:
                path, value = f"{path}.{key}", value.get(key)
    return path.removeprefix(".") or None


def _printable(text: str) -> str:
    """Half a surrogate pair, which a user may send, cannot be sent back."""
    return text.encode("utf-8", "backslashreplace").decode()
