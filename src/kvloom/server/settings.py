"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server can be reached, by whom, and how much it takes.

    Attributes:
        served_model_names: what clients call the model; the first is told in answers.
        api_keys: one of them is asked of every request but /health and /version; none asks nothing.
        cors_origins: origins whose pages may call the server; "*" is all.
        max_choices: choices that may wait and run at once; more are refused with 429.
        max_body_bytes: of one request; more are refused with 413.
        body_timeout_seconds: within which the body of a request has to arrive.
        send_timeout_seconds: within which the client of a stream has to take what fills the line.
        drain_seconds: how long running requests may go on after the first Ctrl-C.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_choices: int = 512
    max_body_bytes: int = 8 * 2**20
    body_timeout_seconds: float = 60.0
    send_timeout_seconds: float = 60.0
    drain_seconds: float = 60.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_choices", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; give a number from 0 to 65535")
        if not all(self.api_keys) or not all(key.isascii() for key in self.api_keys):
            raise ConfigError("an API key is empty or not ASCII; give another one")
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("served_model_names is empty; give a name")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("TLS needs both ssl_certfile and ssl_keyfile")
