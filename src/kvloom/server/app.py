"""The HTTP application: which path does what."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp

from kvloom.server.cache_view import cache_events
from kvloom.server.chat import start_chat
from kvloom.server.completions import start_completion
from kvloom.server.connection import EventStream
from kvloom.server.errors import ApiError, add_error_handlers
from kvloom.server.gate import OPEN_PATHS, Gate
from kvloom.server.replies import send
from kvloom.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from kvloom.server.state import ServerState
from kvloom.server.tokens import detokenize, tokenize


class ErrorDetail(BaseModel):
    """What is wrong, in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """What every refused request gets."""

    error: ErrorDetail


def _refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """How a path's description says what else it may answer."""
    return {status: {"model": ErrorReply, "description": _STATUSES[status]} for status in statuses}


_STATUSES = {
    400: "not valid, or not supported",
    401: "no API key, or a wrong one",
    404: "no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    429: "too many requests wait",
    500: "the engine failed",
    503: "not ready yet, or shutting down",
}
_TOKENS = _refused(400, 404, 503)
_GENERATION = {
    200: {"content": {EventStream.media_type: {}}},  # beside JSON
    **_refused(400, 404, 429, 500, 503),
}


def make_app(state: ServerState) -> ASGIApp:
    """The application over `state`, which may get its engine later."""
    # FastAPI's own pages about the paths load their scripts from elsewhere.
    app = FastAPI(
        title="kvloom",
        version=version("kvloom"),
        responses=_refused(401, 408, 413),
        docs_url=None,
        redoc_url=None,
    )
    add_error_handlers(app)
    _add_information(app, state)
    _add_generation(app, state)
    _correct_description(app, has_keys=bool(state.settings.api_keys))
    gate: ASGIApp = Gate(app, state.settings)
    if state.settings.cors_origins:
        gate = CORSMiddleware(
            gate,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return gate


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", summary="Answer a conversation", responses=_GENERATION)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await send(state, request, body, start_chat(state, body, _request_id(request)))

    @app.post("/v1/completions", summary="Complete prompts", responses=_GENERATION)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await send(state, request, body, start_completion(state, body, _request_id(request)))

    @app.post(
        "/v1/embeddings",
        summary="Refused with 400: no model family here is pooled",
        status_code=400,  # where others have their answer's
        responses=_TOKENS,
    )
    async def embeddings(body: EmbeddingRequest) -> Response:
        state.engine_for(body.model)
        raise ApiError(
            400,
            f"model: {state.model_name} has no embeddings: it generates text, as every model that "
            "this server runs; ask a server of an embedding model",
            param="model",
            code="unsupported_value",
        )

    @app.post("/tokenize", summary="Token ids of a text or a conversation", responses=_TOKENS)
    async def tokenize_text(body: TokenizeRequest) -> Response:
        return JSONResponse(await tokenize(state.engine_for(body.model), body))

    @app.post("/detokenize", summary="The text of token ids", responses=_TOKENS)
    async def detokenize_ids(body: DetokenizeRequest) -> Response:
        return JSONResponse(await detokenize(state.engine_for(body.model), body))


def _add_information(app: FastAPI, state: ServerState) -> None:
    page = files("kvloom.server").joinpath("cache.html").read_text("utf-8")

    def model_card(name: str) -> dict[str, Any]:
        max_model_len = None if state.engine is None else state.engine.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "kvloom",
            "root": state.model_name,
            "max_model_len": max_model_len,
        }

    @app.get("/v1/models", summary="The served models")
    async def models() -> Response:
        names = state.settings.served_model_names
        return JSONResponse({"object": "list", "data": [model_card(name) for name in names]})

    @app.get("/v1/models/{name:path}", summary="One served model", responses=_refused(404, 503))
    async def model(name: str) -> Response:
        state.engine_for(name)
        return JSONResponse(model_card(name))

    @app.get(
        "/health", summary="Whether requests are taken: 200, else 503", responses=_refused(503)
    )
    async def health() -> Response:
        state.engine_for(None)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        if state.engine is not None:
            await state.engine.inspect(state.metrics.read_engine)
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/cache", summary="A page that shows the KV cache live", response_class=HTMLResponse)
    async def cache_page() -> Response:
        return HTMLResponse(page)

    @app.get(
        "/cache/events",
        summary="What that page shows, as server-sent events",
        status_code=200,
        response_class=EventStream,
        responses=_refused(429, 503),
    )
    async def cache_updates() -> Response:
        engine = state.engine_for(None)
        timeout = state.settings.send_timeout_seconds
        return EventStream(cache_events(engine, state.metrics), state.take_view(), timeout)

    @app.get("/version", summary="kvloom's version")
    async def kvloom_version() -> Response:
        return JSONResponse({"version": app.version})


def _correct_description(app: FastAPI, *, has_keys: bool) -> None:
    """Say what FastAPI does not know: the gate's keys, and 400 for bodies it says get 422."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        description = describe()
        components = description["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name)
        error = {"$ref": f"#/components/schemas/{ErrorReply.__name__}"}
        for path, operations in description["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                for status, response in operation["responses"].items():
                    if status >= "400":  # JSON, whatever an answer would be
                        response["content"] = {"application/json": {"schema": error}}
                if not has_keys or path in OPEN_PATHS:
                    operation["responses"].pop("401")
                else:
                    operation["security"] = [{"key": []}]
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _request_id(request: Request) -> str:
    request_id: str = request.scope["kvloom.request_id"]
    return request_id
