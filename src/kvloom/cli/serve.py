"""`kvloom serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.cli.options import add_engine_arguments, engine_options
from kvloom.config import DEFAULT_MODEL
from kvloom.errors import ConfigError

if TYPE_CHECKING:
    from kvloom import AsyncLLM
    from kvloom.engine.stats import EngineObserver
    from kvloom.server.settings import ServerSettings

_DESCRIPTION = (
    "Serve a model over HTTP, as OpenAI's clients expect it. Ctrl-C lets running requests end; "
    "a second one stops at once."
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible",
        description=_DESCRIPTION,
        epilog="Example: kvloom serve --port 8000",
    )
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    group = parser.add_argument_group("server")
    for flag, settings in _SERVER_ARGUMENTS:
        group.add_argument(flag, **settings)
    add_engine_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="log what the engine does")
    parser.set_defaults(run=run)


_SERVER_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--host",
        {
            "default": "127.0.0.1",
            "help": "address to listen on; 0.0.0.0 is every network (default: %(default)s)",
        },
    ),
    ("--port", {"type": int, "default": 8000, "help": "0 takes a free one (default: %(default)s)"}),
    (
        "--served-model-name",
        {
            "action": "append",
            "default": [],
            "metavar": "NAME",
            "help": "what clients call the model; may be given several times (default: the model)",
        },
    ),
    (
        "--api-key-file",
        {"type": Path, "metavar": "FILE", "help": "ask clients for one of the keys in FILE"},
    ),
    (
        "--api-key",
        {
            "action": "append",
            "default": [],
            "metavar": "KEY",
            "help": "ask clients for this key; others on this machine may see it in its process "
            "list: prefer --api-key-file",
        },
    ),
    (
        "--cors-origin",
        {
            "action": "append",
            "default": [],
            "metavar": "ORIGIN",
            "help": "let web pages of this origin call the server; * is all",
        },
    ),
    (
        "--max-choices",
        {
            "type": int,
            "default": 512,
            "metavar": "N",
            "help": "choices that wait and run at once; more get 429 (default: %(default)s)",
        },
    ),
    (
        "--max-body-bytes",
        {
            "type": int,
            "default": 8 * 2**20,
            "metavar": "N",
            "help": "largest request; more gets 413 (default: %(default)s)",
        },
    ),
    (
        "--drain-seconds",
        {
            "type": float,
            "default": 60.0,
            "metavar": "X",
            "help": "how long running requests may go on after Ctrl-C (default: %(default)s)",
        },
    ),
    ("--ssl-certfile", {"metavar": "FILE", "help": "serve over TLS with this certificate"}),
    ("--ssl-keyfile", {"metavar": "FILE", "help": "its private key"}),
)


def run(args: argparse.Namespace) -> int:
    """Load the model, serve it, drain."""
    if args.served is not None:
        if args.model not in (DEFAULT_MODEL, args.served):
            raise ConfigError(f"there are two models, {args.served} and {args.model}; give one")
        args.model = args.served
    try:
        from kvloom.server.serving import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}; install it with: pip install 'kvloom[server]'"
        ) from None
    _start_logs(args.verbose)
    options = engine_options(args)

    def load(observer: EngineObserver) -> AsyncLLM:
        from kvloom import AsyncLLM

        return AsyncLLM(observer=observer, **options)

    serve(_settings(args), load, _tell_ready)
    return 0


def _settings(args: argparse.Namespace) -> ServerSettings:
    from kvloom.server.settings import ServerSettings

    keys = list(args.api_key)
    if args.api_key_file is not None:
        keys += args.api_key_file.read_text("utf-8").split()
        if not keys:
            raise ConfigError(f"{args.api_key_file} holds no key; write one per line")
    return ServerSettings(
        served_model_names=tuple(args.served_model_name) or (args.model,),
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        cors_origins=tuple(args.cors_origin),
        max_choices=args.max_choices,
        max_body_bytes=args.max_body_bytes,
        drain_seconds=args.drain_seconds,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )


def _tell_ready(address: str) -> None:
    sys.stdout.write(f"kvloom: ready on {address}\n")
    sys.stdout.flush()


def _start_logs(is_verbose: bool) -> None:
    """Access lines are JSON on stderr; the engine's own lines come when asked for."""
    level = logging.INFO if is_verbose else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
    logging.getLogger("kvloom.access").setLevel(logging.INFO)
