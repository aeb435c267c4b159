"""What all requests of a server share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom.engine.async_llm import AsyncLLM
from kvloom.server.errors import ApiError, unavailable
from kvloom.server.metrics import EngineMetrics
from kvloom.server.settings import ServerSettings

_MAX_VIEWERS = 16


@dataclass(slots=True)
class ServerState:
    """The engine once it is there, and the seats of those who wait for it.

    Attributes:
        engine: None until the model is loaded.
        metrics: observe the engine.
        is_draining: whether the server ends what runs and takes nothing new.
        num_seats: choices of all requests that are not answered yet.
        num_viewers: open cache pages.
        created: when the model was started, in seconds since 1970.
    """

    settings: ServerSettings
    engine: AsyncLLM | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    is_draining: bool = False
    num_seats: int = 0
    num_viewers: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.settings.served_model_names[0]

    def engine_for(self, model: str | None) -> AsyncLLM:
        """The engine, if it is ready and serves `model`.

        Raises:
            ApiError: 503 or 404.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if self.engine is None:
            raise unavailable("the model is still being loaded")
        if model is not None and model not in self.settings.served_model_names:
            names = ", ".join(self.settings.served_model_names)
            raise ApiError(
                404,
                f"there is no model {model!r} here; this server has: {names}",
                param="model",
                code="model_not_found",
            )
        return self.engine

    def take_seats(self, num_choices: int, param: str) -> Callable[[], None]:
        """Keep room for the choices of a request.

        Returns:
            What gives the seats back; more than once does no harm.

        Raises:
            ApiError: 429 if others fill the room, 400 if it is too small for this request alone.
        """
        limit = self.settings.max_choices
        if num_choices > limit:
            message = f"{param}: {num_choices} choices are more than this server takes, {limit}"
            raise ApiError(400, message, param=param, code="invalid_value")
        if self.num_seats + num_choices > limit:
            raise ApiError(
                429,
                f"{self.num_seats} choices wait or run, of at most {limit}; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.num_seats += num_choices
        num_taken = num_choices

        def release() -> None:
            nonlocal num_taken
            self.num_seats -= num_taken
            num_taken = 0

        return release

    def take_view(self) -> Callable[[], None]:
        """Let one more page follow the cache; returns what gives its place back.

        Raises:
            ApiError: 429: each costs the engine a little time, ten times a second.
        """
        if self.num_viewers >= _MAX_VIEWERS:
            message = f"{self.num_viewers} pages follow the cache already; close one"
            raise ApiError(429, message, code="too_many_viewers", headers={"Retry-After": "10"})
        self.num_viewers += 1

        def release() -> None:
            self.num_viewers -= 1

        return release
